// Which code computes attention on a GPU: cuDNN's fused graphs, or the kernels of
// stages/cuda/flash_attention.hpp, which take what cuDNN does not: f32, dropout (the library's
// random numbers would be its own), shapes it refuses, and builds without it. Both keep the same
// state. The choice is a function of shape, type, dropout, device model and library, so that
// forward and backward of a micro-batch agree, and so do all depths of a pipeline.
#pragma once

#include <string>

#include "stages/operators.hpp"

namespace sluice::cuda {

// "cuDNN", or "own kernels (why)", for reports. Makes the plan that attention_forward would make;
// requires a context of a GPU.
[[nodiscard]] std::string attention_engine(ComputeContext& ctx, const AttentionShape& shape,
                                           DType dtype, bool dropout);

}  // namespace sluice::cuda
