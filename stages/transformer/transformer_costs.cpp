// What a transformer's layers compute, for partitions.
#include <sluice/transformer.hpp>

#include "comm/base/index.hpp"
#include "stages/transformer/build.hpp"

namespace sluice {

namespace {

// Floating-point operations of one sample's forward through a block.
struct BlockCosts {
  double attention = 0;      // two products over the causal half of the scores
  double kept_products = 0;  // those whose results backward reads: qkv and the raised values
  double results = 0;        // those that end in the residual stream
};

BlockCosts block_costs(const TransformerConfig& config) {
  const TransformerSizes sizes = sizes_of(config);
  const double context = config.context;
  const auto width = static_cast<double>(sizes.width);
  const double mlp = width * static_cast<double>(sizes.mlp_width);
  const double raising_products = config.kind == TransformerKind::kGpt2 ? 1 : 2;
  const double qkv = width * width + 2 * width * static_cast<double>(sizes.kv_width());
  return {.attention = 2 * context * context * width,
          .kept_products = 2 * context * (qkv + raising_products * mlp),
          .results = 2 * context * (width * width + mlp)};
}

}  // namespace

std::vector<double> layer_costs(const TransformerConfig& config) {
  validate(config);
  const double context = config.context;
  const double width = config.width;
  const BlockCosts block = block_costs(config);
  std::vector<double> costs(at(config.layers) + 2,
                            block.attention + block.kept_products + block.results);
  costs.front() = 2 * context * width;
  costs.back() = 2 * context * width * config.vocabulary;
  return costs;
}

std::vector<double> recompute_costs(const TransformerConfig& config) {
  validate(config);
  const BlockCosts block = block_costs(config);
  const double again = config.recompute == Recompute::kNone ? 0
                       : config.recompute == Recompute::kAttention
                           ? block.attention
                           : block.attention + block.kept_products;
  std::vector<double> costs(at(config.layers) + 2, again);
  costs.front() = costs.back() = 0;  // no products
  return costs;
}

}  // namespace sluice
