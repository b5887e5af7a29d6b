// A GPU's operators, those that call libraries too, and the kernels that other sources call. Their
// contexts have a CudaBackend. Internal to stages/.
#pragma once

#include "stages/compute/operator_table.hpp"

namespace sluice::cuda {

SLUICE_OPERATORS(SLUICE_DECLARE)
void dropout(ComputeContext& ctx, const Tensor& x, const Dropout& dropout, const Tensor& y);

// sums [width] f32 += or = the sums of dy's columns; dy [rows, width], f32 or bf16. Sums run in f32
// in an order that depends only on the shape. In stream order.
void sum_columns(ComputeContext& ctx, const Tensor& dy, const Tensor& sums,
                 Write write = Write::kAdd);
// Bytes of ctx.workspace() that it takes.
[[nodiscard]] std::size_t column_sums_workspace(std::int64_t rows, std::int64_t width);

}  // namespace sluice::cuda
