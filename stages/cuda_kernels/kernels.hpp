// The parts of a GPU's table of operators that call no library, and the kernels that other sources
// call. Each source fills its part. Internal to stages/cuda.
#pragma once

#include "stages/compute/operator_table.hpp"

namespace sluice::cuda {

[[nodiscard]] EmbeddingOperators embedding_operators();
[[nodiscard]] NormOperators norm_operators();
[[nodiscard]] RotaryOperators rotary_operators();
[[nodiscard]] QueryKeyNormOperators query_key_norm_operators();
[[nodiscard]] ElementOperators element_operators();
[[nodiscard]] LossOperators loss_operators();
[[nodiscard]] UpdateOperators update_operators();

void pointwise_forward(ComputeContext& ctx, Pointwise function, const Tensor& x, const Tensor& y);
void pointwise_backward(ComputeContext& ctx, Pointwise function, const Tensor& x, const Tensor& dy,
                        const Tensor& dx);
void swiglu_forward(ComputeContext& ctx, const Tensor& gate_up, const Tensor& y);
void swiglu_backward(ComputeContext& ctx, const Tensor& gate_up, const Tensor& dy,
                     const Tensor& dgate_up);
void convert(ComputeContext& ctx, const Tensor& from, const Tensor& to);

// sums [width] f32 += or = the sums of dy's columns; dy [rows, width], f32 or bf16. Sums run in f32
// in an order that depends only on the shape. In stream order.
void sum_columns(ComputeContext& ctx, const Tensor& dy, const Tensor& sums,
                 Write write = Write::kAdd);
// Bytes of ctx.workspace() that it takes.
[[nodiscard]] std::size_t column_sums_workspace(std::int64_t rows, std::int64_t width);

}  // namespace sluice::cuda
