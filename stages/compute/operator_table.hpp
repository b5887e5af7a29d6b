// The operators of a backend as function pointers: those of <sluice/operators.hpp> and of
// internal_operators.hpp, with their names, parameters and contracts. No entry is null. Internal to
// stages/; other code calls those functions, which ask the context for its table.
#pragma once

#include <sluice/operators.hpp>

#include "stages/compute/internal_operators.hpp"

// X of the name of each, but for dropout(): <sluice/layers.hpp> has another function of that name.
// clang-format off
#define SLUICE_OPERATORS(X) \
  X(linear_forward) X(linear_residual_forward) X(linear_forward_workspace)                      \
  X(linear_backward_input) X(linear_backward_weight) X(linear_backward_weight_workspace)        \
  X(linear_activation_forward) X(linear_activation_backward_input)                              \
  X(linear_activation_backward_input_workspace)                                                 \
  X(embedding_forward) X(embedding_backward_weight) X(embedding_backward_weight_workspace)      \
  X(layer_norm_forward) X(layer_norm_backward) X(rms_norm_forward) X(rms_norm_backward)         \
  X(norm_backward_workspace)                                                                    \
  X(attention_forward) X(attention_forward_workspace) X(attention_state_bytes)                  \
  X(attention_backward) X(attention_backward_workspace) X(attention_engine)                     \
  X(rotary) X(query_key_norm_forward)                                                           \
  X(query_key_norm_backward) X(query_key_norm_backward_workspace)                               \
  X(pointwise_forward) X(pointwise_backward) X(swiglu_forward) X(swiglu_backward)               \
  X(dropout_residual) X(add) X(convert) X(convert_all)                                          \
  X(sum_of_shards) X(sum_of_shards_workspace) X(finish_sum)                                     \
  X(row_cross_entropy) X(sum_of_losses) X(mean_squared_error)                                   \
  X(embedding_part_forward) X(embedding_part_backward_weight)                                   \
  X(panel_maxima) X(panel_sums) X(panel_losses)                                                 \
  X(adamw) X(sgd) X(sums_of_squares)
// clang-format on

// A backend declares them in its namespace, and fills a table.
// NOLINTNEXTLINE(bugprone-macro-parentheses): a name is declared.
#define SLUICE_DECLARE(name) decltype(sluice::name) name;
#define SLUICE_ENTRY(name) name,

namespace sluice {

struct OperatorTable {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a name is declared.
#define SLUICE_POINTER(name) decltype(&sluice::name) name;
  SLUICE_OPERATORS(SLUICE_POINTER)
#undef SLUICE_POINTER
  void (*dropout)(ComputeContext&, const Tensor&, const Dropout&, const Tensor&);
};

}  // namespace sluice
