// Kernels that operators of several files share. Internal to stages/cuda.
#pragma once

#include "stages/compute.hpp"
#include "stages/tensor.hpp"

namespace sluice::cuda {

// sums [width] f32 += the sums of dy's columns; dy [rows, width], f32 or bf16. Sums run in f32 in
// an order that depends on the shape alone. In stream order.
void add_column_sums(ComputeContext& ctx, const Tensor& dy, const Tensor& sums);
// What it takes of ctx.workspace().
[[nodiscard]] std::size_t column_sums_workspace(std::int64_t rows, std::int64_t width);

}  // namespace sluice::cuda
