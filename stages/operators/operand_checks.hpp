// What the public operators may be called with: each compares its operands here once, before a
// backend gets them. Internal to stages/; dispatch.cpp calls it.
//
// A check returns, or throws Error(kUsage) whose one line names the operator, the operand that does
// not fit, those that it has to fit, with type and shape, and what would be legal. `name` is the
// operator's. An operand of rows is compared as [rows, width]: rows is the product of all its
// dimensions but the last. Weights, tables and vectors have exactly the dimensions of
// operators.hpp. An operand with elements has data. Contents, alignment, overlap and the size of
// memory behind a pointer are not checked. A check that returns allocates nothing and formats
// nothing.
#pragma once

#include <span>

#include <sluice/compute.hpp>
#include <sluice/tensor.hpp>

namespace sluice::operands {

void linear_forward(const char* name, const Tensor& x, const Tensor& weight, const Tensor& bias,
                    const Tensor& y);
void linear_backward_input(const char* name, const Tensor& dy, const Tensor& weight,
                           const Tensor& dx);
void linear_backward_weight(const char* name, const Tensor& x, const Tensor& dy,
                            const Tensor& dweight, const Tensor& dbias);
void linear_activation_forward(const char* name, Activation activation, const Tensor& x,
                               const Tensor& weight, const Tensor& bias, const Tensor& raised,
                               const Tensor& y);
void linear_activation_backward_input(const char* name, Activation activation, const Tensor& dy,
                                      const Tensor& weight, const Tensor& raised,
                                      const Tensor& draised);

void embedding_forward(const char* name, const Tensor& tokens, const Tensor& table,
                       const Tensor& positions, const Tensor& out);
void embedding_backward_weight(const char* name, const Tensor& tokens, const Tensor& dout,
                               const Tensor& dtable, const Tensor& dpositions);

// Of either norm. beta, dbeta: null for RMSNorm, which has none and keeps one number per row.
void norm_forward(const char* name, const Tensor& x, const Tensor& delta, const Tensor& gamma,
                  const Tensor* beta, const Tensor& y, const Tensor& stats);
void norm_backward_input(const char* name, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                         const Tensor& stats, std::int64_t stats_per_row, const Tensor& dx);
void norm_backward_weight(const char* name, const Tensor& dy, const Tensor& x, const Tensor& stats,
                          const Tensor& dgamma, const Tensor* dbeta);

// Checks only the shape: heads share keys evenly, and products of sizes do not overflow.
void attention_shape(const char* name, const AttentionShape& shape);
void attention_forward(const char* name, const AttentionShape& shape, const Tensor& qkv,
                       const Tensor& out, const std::byte* state);
void attention_backward(const char* name, const AttentionShape& shape, const Tensor& qkv,
                        const Tensor& out, const Tensor& dout, const std::byte* state,
                        const Tensor& dqkv);
void rotary(const char* name, const AttentionShape& shape, const Tensor& qkv);

// y of x's type and shape: activations, dropout.
void elementwise(const char* name, const Tensor& x, const Tensor& y);
// Gradients of these: dy and dx of x's type and shape.
void elementwise_backward(const char* name, const Tensor& x, const Tensor& dy, const Tensor& dx);
void swiglu_forward(const char* name, const Tensor& gate_up, const Tensor& y);
void swiglu_backward(const char* name, const Tensor& gate_up, const Tensor& dy,
                     const Tensor& dgate_up);
void add(const char* name, const Tensor& x, const Tensor& y);
void convert(const char* name, const Tensor& from, const Tensor& to);
void convert_all(const char* name, std::span<const Conversion> conversions);

void softmax_cross_entropy(const char* name, const Tensor& logits, const Tensor& targets,
                           const double* sum);
void mean_squared_error(const char* name, const Tensor& outputs, const Tensor& targets,
                        const double* sum);

void adamw(const char* name, std::span<const UpdateRun> runs);
void sgd(const char* name, const SgdStep& step, std::span<const UpdateRun> runs);
void sums_of_squares(const char* name, std::span<const std::span<const float>> vectors,
                     const double* sums);

}  // namespace sluice::operands
