// The first calls of a layer on a CPU are watched. Internal to stages/.
#pragma once

#include <sluice/layers.hpp>

#include "stages/tensor/unwritten.hpp"

namespace sluice {

// Runs `body`, which writes `tensor` and reads the layer's input. The first time, numbers that it
// leaves unwritten and an input that it changes are an Error(kUsage). `was`: that was done.
template <typename Body>
void watched(bool& was, const LayerCall& call, const char* what, const Tensor& tensor,
             const Body& body) {
  if (was || call.compute().device().kind != DeviceKind::kCpu) return body();
  const Unchanged input({&call.x, 1});
  mark_unwritten(tensor);
  body();
  require_written(tensor, what);
  input.require("input");
  was = true;
}

}  // namespace sluice
