// Small models that tests of several folders build.
#pragma once

#include <sluice/transformer.hpp>

namespace sluice::testing {

// Two blocks of odd sizes.
[[nodiscard]] inline TransformerConfig odd_model(TransformerKind kind) {
  return {.kind = kind,
          .layers = 2,
          .heads = 4,
          .width = 24,
          .context = 13,
          .vocabulary = 19,
          .kv_heads = kind == TransformerKind::kLlama ? 2 : 0,
          .mlp_width = 40};
}

// All options of llama at once.
inline void set_options_of_llama(TransformerConfig& model) {
  model.kind = TransformerKind::kLlama;
  model.kv_heads = 1;
  model.head_dim = 10;
  model.rotary_scaling = {.kind = RotaryScaling::Kind::kLinear, .factor = 2};
  model.qkv_bias = model.attention_output_bias = model.mlp_bias = model.qk_norm = true;
  model.window = 5;
  model.full_layers = {1};
}

}  // namespace sluice::testing
