// The operators of a backend as function pointers: those of <sluice/operators.hpp>, with their
// names, parameters and contracts. Each source of a backend fills one part of the table; no entry
// is null. Internal to stages/; other code calls operators.hpp, which asks the context for its
// table.
#pragma once

#include <cstddef>

#include <sluice/operators.hpp>

namespace sluice {

struct LinearOperators {
  decltype(&sluice::linear_forward) linear_forward;
  decltype(&sluice::linear_residual_forward) linear_residual_forward;
  decltype(&sluice::linear_backward_input) linear_backward_input;
  decltype(&sluice::linear_backward_weight) linear_backward_weight;
  decltype(&sluice::linear_activation_forward) linear_activation_forward;
  decltype(&sluice::linear_activation_backward_input) linear_activation_backward_input;
  decltype(&sluice::linear_forward_workspace) linear_forward_workspace;
  decltype(&sluice::linear_backward_weight_workspace) linear_backward_weight_workspace;
  decltype(&sluice::linear_activation_backward_input_workspace)
      linear_activation_backward_input_workspace;
};

struct EmbeddingOperators {
  decltype(&sluice::embedding_forward) embedding_forward;
  decltype(&sluice::embedding_backward_weight) embedding_backward_weight;
  decltype(&sluice::embedding_backward_weight_workspace) embedding_backward_weight_workspace;
};

struct NormOperators {
  decltype(&sluice::layer_norm_forward) layer_norm_forward;
  decltype(&sluice::layer_norm_backward) layer_norm_backward;
  decltype(&sluice::rms_norm_forward) rms_norm_forward;
  decltype(&sluice::rms_norm_backward) rms_norm_backward;
  decltype(&sluice::norm_backward_workspace) norm_backward_workspace;
};

struct AttentionOperators {
  // Of one kind of device, hence without the parameter that names it.
  std::size_t (*attention_state_bytes)(const AttentionShape& shape, DType dtype);
  decltype(&sluice::attention_forward) attention_forward;
  decltype(&sluice::attention_backward) attention_backward;
  decltype(&sluice::attention_forward_workspace) attention_forward_workspace;
  decltype(&sluice::attention_backward_workspace) attention_backward_workspace;
  decltype(&sluice::attention_engine) attention_engine;
};

struct RotaryOperators {
  decltype(&sluice::rotary) rotary;
};

struct QueryKeyNormOperators {
  decltype(&sluice::query_key_norm_forward) query_key_norm_forward;
  decltype(&sluice::query_key_norm_backward) query_key_norm_backward;
  decltype(&sluice::query_key_norm_backward_workspace) query_key_norm_backward_workspace;
};

struct ElementOperators {
  decltype(&sluice::pointwise_forward) pointwise_forward;
  decltype(&sluice::pointwise_backward) pointwise_backward;
  decltype(&sluice::swiglu_forward) swiglu_forward;
  decltype(&sluice::swiglu_backward) swiglu_backward;
  decltype(&sluice::dropout) dropout;
  decltype(&sluice::dropout_residual) dropout_residual;
  decltype(&sluice::add) add;
  decltype(&sluice::convert) convert;
};

struct LossOperators {
  decltype(&sluice::row_cross_entropy) row_cross_entropy;
  decltype(&sluice::sum_of_losses) sum_of_losses;
  decltype(&sluice::mean_squared_error) mean_squared_error;
};

// Over all tensors of a stage at once.
struct UpdateOperators {
  decltype(&sluice::adamw) adamw;
  decltype(&sluice::sgd) sgd;
  decltype(&sluice::convert_all) convert_all;
  decltype(&sluice::sums_of_squares) sums_of_squares;
};

struct OperatorTable : LinearOperators,
                       EmbeddingOperators,
                       NormOperators,
                       AttentionOperators,
                       RotaryOperators,
                       QueryKeyNormOperators,
                       ElementOperators,
                       LossOperators,
                       UpdateOperators {};

}  // namespace sluice
