// A transformer's sizes with their defaults filled in, and what its parts cost. Internal to
// stages/.
#pragma once

#include <cstdint>

#include <sluice/transformer.hpp>

namespace sluice {

struct TransformerSizes {
  std::int64_t width = 0, mlp_width = 0;
  int heads = 0, kv_heads = 0, head_dim = 0;
  [[nodiscard]] std::int64_t query_width() const { return std::int64_t{heads} * head_dim; }
  [[nodiscard]] std::int64_t kv_width() const { return std::int64_t{kv_heads} * head_dim; }
};
// Requires: validate(config) passes.
[[nodiscard]] TransformerSizes sizes_of(const TransformerConfig& config);

// AttentionShape::window of block `block` of 0 .. layers - 1.
[[nodiscard]] int window_of(const TransformerConfig& config, int block);
// What it recomputes.
[[nodiscard]] Recompute recompute_of(const TransformerConfig& config, int block);

// Floating-point operations of one sample's forward through a block, of `context` positions.
struct BlockCosts {
  double scores = 0;  // two matmuls over the scores that are seen
  double qkv = 0, output = 0;
  double up = 0, down = 0;
};
[[nodiscard]] BlockCosts block_costs(const TransformerConfig& config, int block);

}  // namespace sluice
