// Runs a primitive of oneDNN, with signals held back.
//
// Kernels of oneDNN before 3.11.2 for matmuls in f32 (AVX2 and AVX-512, sums over more than 84
// elements) point the stack pointer into the heap. A signal handler that runs then writes its frame
// there: over other data, or over malloc's own, after which the process aborts
// (https://github.com/uxlfoundation/oneDNN/issues/4845). It does not matter whose handler it is or
// what it does. So no thread that computes may take a signal: see also parallel_range().
#pragma once

#include <dnnl.hpp>
#include <span>

#include "comm/base/held_signals.hpp"

namespace sluice {

[[nodiscard]] inline dnnl_status_t execute_primitive(const dnnl::primitive& primitive,
                                                     const dnnl::stream& stream,
                                                     std::span<const dnnl_exec_arg_t> arguments) {
  const HeldSignals held;
  return dnnl_primitive_execute(primitive.get(), stream.get(), static_cast<int>(arguments.size()),
                                arguments.data());
}

}  // namespace sluice
