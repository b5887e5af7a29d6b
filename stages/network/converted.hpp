// Layers and losses of one type between neighbours of another: copies of their operands are made in
// scratch at each call. The first calls of a layer on a CPU are watched. Internal to stages/.
#pragma once

#include <memory>

#include <sluice/layers.hpp>

#include "stages/tensor/unwritten.hpp"

namespace sluice::nn {

// The layer takes numbers of the type `takes`; its output becomes one of `gives`. Gradients of
// input and output have the types of those. `watched`: its first calls were, or need not be.
[[nodiscard]] std::unique_ptr<Layer> converted(std::unique_ptr<Layer> layer, DType takes,
                                               DType gives, bool watched);
// A model's input as its first layer gets it: f32 becomes the stream's type.
[[nodiscard]] inline TensorSpec at_entry(const TensorSpec& input, const Precision& precision) {
  return {input.dtype == DType::kF32 ? precision.stream : input.dtype, input.shape};
}
// The loss takes outputs in f32.
[[nodiscard]] std::unique_ptr<Loss> widened(std::unique_ptr<Loss> loss);

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

}  // namespace sluice::nn
