// The operators of a backend as function pointers: those of <sluice/operators.hpp>, with their
// names, parameters and contracts. Each source of a backend fills one part of the table; no entry
// is null. Internal to stages/; other code calls operators.hpp, which asks the context for its
// table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <sluice/compute.hpp>
#include <sluice/tensor.hpp>

namespace sluice {

struct LinearOperators {
  void (*linear_forward)(ComputeContext& ctx, const Tensor& x, const Tensor& weight,
                         const Tensor& bias, const Tensor& y);
  void (*linear_backward_input)(ComputeContext& ctx, const Tensor& dy, const Tensor& weight,
                                const Tensor& dx);
  void (*linear_backward_weight)(ComputeContext& ctx, const Tensor& x, const Tensor& dy,
                                 const Tensor& dweight, const Tensor& dbias);
  void (*linear_activation_forward)(ComputeContext& ctx, Activation activation, const Tensor& x,
                                    const Tensor& weight, const Tensor& bias, const Tensor& raised,
                                    const Tensor& y);
  void (*linear_activation_backward_input)(ComputeContext& ctx, Activation activation,
                                           const Tensor& dy, const Tensor& weight,
                                           const Tensor& raised, const Tensor& draised);
  std::size_t (*linear_forward_workspace)(ComputeContext& ctx, const LinearShape& shape);
  std::size_t (*linear_backward_weight_workspace)(ComputeContext& ctx, const LinearShape& shape);
  std::size_t (*linear_activation_backward_input_workspace)(ComputeContext& ctx,
                                                            Activation activation,
                                                            const LinearShape& shape);
};

struct EmbeddingOperators {
  void (*embedding_forward)(ComputeContext& ctx, const Tensor& tokens, const Tensor& table,
                            const Tensor& positions, const Tensor& out);
  void (*embedding_backward_weight)(ComputeContext& ctx, const Tensor& tokens, const Tensor& dout,
                                    const Tensor& dtable, const Tensor& dpositions);
  std::size_t (*embedding_backward_weight_workspace)(ComputeContext& ctx, std::int64_t rows,
                                                     std::int64_t vocabulary, std::int64_t width);
};

struct NormOperators {
  void (*layer_norm_forward)(ComputeContext& ctx, const Tensor& x, const Tensor& delta,
                             const Tensor& gamma, const Tensor& beta, float epsilon,
                             const Tensor& y, const Tensor& stats);
  void (*layer_norm_backward_input)(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                                    const Tensor& gamma, const Tensor& stats, const Tensor& dx);
  void (*layer_norm_backward_weight)(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                                     const Tensor& stats, const Tensor& dgamma,
                                     const Tensor& dbeta);
  void (*rms_norm_forward)(ComputeContext& ctx, const Tensor& x, const Tensor& delta,
                           const Tensor& gamma, float epsilon, const Tensor& y,
                           const Tensor& stats);
  void (*rms_norm_backward_input)(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                                  const Tensor& gamma, const Tensor& stats, const Tensor& dx);
  void (*rms_norm_backward_weight)(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                                   const Tensor& stats, const Tensor& dgamma);
  std::size_t (*norm_backward_weight_workspace)(ComputeContext& ctx, std::int64_t rows,
                                                std::int64_t width, int terms);
};

struct AttentionOperators {
  std::size_t (*attention_state_bytes)(const AttentionShape& shape, DType dtype);
  void (*attention_forward)(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                            const Dropout& dropout, const Tensor& out, std::byte* state);
  void (*attention_backward)(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                             const Tensor& out, const Tensor& dout, const Dropout& dropout,
                             const std::byte* state, const Tensor& dqkv);
  std::size_t (*attention_forward_workspace)(ComputeContext& ctx, const AttentionShape& shape,
                                             DType dtype, bool drops);
  std::size_t (*attention_backward_workspace)(ComputeContext& ctx, const AttentionShape& shape,
                                              DType dtype, bool drops);
  std::string (*attention_engine)(ComputeContext& ctx, const AttentionShape& shape, DType dtype,
                                  bool drops);
};

struct RotaryOperators {
  void (*rotary)(ComputeContext& ctx, const AttentionShape& shape, float base, const Tensor& qkv,
                 bool backward);
};

struct ElementOperators {
  void (*gelu_forward)(ComputeContext& ctx, const Tensor& x, const Tensor& y);
  void (*gelu_backward)(ComputeContext& ctx, const Tensor& x, const Tensor& dy, const Tensor& dx);
  void (*swiglu_forward)(ComputeContext& ctx, const Tensor& gate_up, const Tensor& y);
  void (*swiglu_backward)(ComputeContext& ctx, const Tensor& gate_up, const Tensor& dy,
                          const Tensor& dgate_up);
  void (*relu_forward)(ComputeContext& ctx, const Tensor& x, const Tensor& y);
  void (*relu_backward)(ComputeContext& ctx, const Tensor& x, const Tensor& dy, const Tensor& dx);
  void (*dropout)(ComputeContext& ctx, const Tensor& x, const Dropout& dropout, const Tensor& y);
  void (*add)(ComputeContext& ctx, const Tensor& x, const Tensor& y);
  void (*convert)(ComputeContext& ctx, const Tensor& from, const Tensor& to);
};

struct LossOperators {
  void (*softmax_cross_entropy)(ComputeContext& ctx, const Tensor& logits, const Tensor& targets,
                                StepValue<double> scale, bool gradient, double* sum);
  void (*mean_squared_error)(ComputeContext& ctx, const Tensor& outputs, const Tensor& targets,
                             StepValue<double> scale, bool gradient, double* sum);
};

// Over all tensors of a stage at once.
struct UpdateOperators {
  void (*adamw)(ComputeContext& ctx, const AdamWStep& step, std::span<const UpdateRun> runs);
  void (*sgd)(ComputeContext& ctx, const SgdStep& step, std::span<const UpdateRun> runs);
  void (*convert_all)(ComputeContext& ctx, std::span<const Conversion> conversions);
  void (*sums_of_squares)(ComputeContext& ctx, std::span<const std::span<const float>> vectors,
                          double* sums);
};

struct OperatorTable : LinearOperators,
                       EmbeddingOperators,
                       NormOperators,
                       AttentionOperators,
                       RotaryOperators,
                       ElementOperators,
                       LossOperators,
                       UpdateOperators {};

}  // namespace sluice
