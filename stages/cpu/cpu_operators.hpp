// The CPU's operators, the specification of every other backend's; the parts of their table, each
// filled by the source that has them; and the operators that other sources call.
#pragma once

#include "stages/compute/operator_table.hpp"

namespace sluice::cpu {

// Their contexts have a CpuBackend.
[[nodiscard]] const OperatorTable& cpu_operators();

[[nodiscard]] LinearOperators linear_operators();
[[nodiscard]] EmbeddingOperators embedding_operators();
[[nodiscard]] NormOperators norm_operators();
[[nodiscard]] AttentionOperators attention_operators();
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
void add(ComputeContext& ctx, const Tensor& x, const Tensor& y);
void convert(ComputeContext& ctx, const Tensor& from, const Tensor& to);

}  // namespace sluice::cpu
