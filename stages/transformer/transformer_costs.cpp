// What a transformer's layers compute, for partitions.
#include <algorithm>

#include <sluice/transformer.hpp>

#include "comm/base/index.hpp"
#include "stages/transformer/sizes.hpp"

namespace sluice {

namespace {

// Pairs of a query and a key that it sees, half of them on the diagonal.
double seen_pairs(const TransformerConfig& config, int block) {
  const double context = config.context;
  const int window = window_of(config, block);
  const double seen = window == 0 ? context : std::min<double>(window, context);
  return seen * context - seen * seen / 2;
}

// The ends' costs are 0; cost(block) is that of a block.
template <typename Cost>
std::vector<double> costs_of_blocks(const TransformerConfig& config, const Cost& cost) {
  std::vector<double> costs(at(config.layers) + 2);
  for (int block = 0; block < config.layers; ++block) {
    costs[at(block) + 1] = cost(block_costs(config, block));
  }
  return costs;
}

}  // namespace

BlockCosts block_costs(const TransformerConfig& config, int block) {
  const TransformerSizes sizes = sizes_of(config);
  const double context = config.context;
  const auto width = static_cast<double>(sizes.width);
  const auto query_width = static_cast<double>(sizes.query_width());
  const double mlp = width * static_cast<double>(sizes.mlp_width);
  const double raising_products = config.kind == TransformerKind::kGpt2 ? 1 : 2;
  return {.scores = 4 * seen_pairs(config, block) * query_width,
          .qkv = 2 * context * width * (query_width + 2 * static_cast<double>(sizes.kv_width())),
          .output = 2 * context * query_width * width,
          .up = 2 * context * raising_products * mlp,
          .down = 2 * context * mlp};
}

std::vector<double> layer_costs(const TransformerConfig& config) {
  validate(config);
  const double context = config.context;
  const double width = config.width;
  std::vector<double> costs = costs_of_blocks(config, [](const BlockCosts& block) {
    return block.scores + block.qkv + block.output + block.up + block.down;
  });
  costs.front() = 2 * context * width;
  costs.back() = 2 * context * width * config.vocabulary;
  return costs;
}

double training_flops(const TransformerConfig& config) {
  validate(config);
  double flops = 6.0 * static_cast<double>(parameter_count(config)) * config.context;
  for (int block = 0; block < config.layers; ++block) {
    flops += 3 * block_costs(config, block).scores;
  }
  return flops;
}

std::vector<double> recompute_costs(const TransformerConfig& config) {
  validate(config);
  return costs_of_blocks(config, [&](const BlockCosts& block) {
    switch (config.recompute) {
      case Recompute::kAttention:
        return block.scores;
      case Recompute::kBlock:
        return block.scores + block.qkv + block.up;  // whose results backward reads
      case Recompute::kNone:
        break;
    }
    return 0.0;
  });
}

}  // namespace sluice
