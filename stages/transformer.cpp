#include "stages/transformer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "comm/error.hpp"
#include "stages/layers/build.hpp"
#include "stages/transformer_stage.hpp"

namespace sluice {

namespace {

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorCode::kUsage, message); }

void require_range(std::string_view option, int value, int least, int most) {
  if (value < least || value > most) {
    refuse(fmt::format("{} {} is not between {} and {}; nearest legal: {}", option, value, least,
                       most, std::clamp(value, least, most)));
  }
}

// "a or b": the legal neighbours of value among multiples of `unit`.
std::string nearest_multiples(int value, int unit) {
  const int below = value / unit * unit;
  const int above = below + unit;
  return below > 0 ? fmt::format("{} or {}", below, above) : fmt::format("{}", above);
}

void validate_attention(const TransformerConfig& config) {
  if (config.width % config.heads != 0) {
    refuse(fmt::format("--width {} is not a multiple of --heads {}; nearest legal: --width {}",
                       config.width, config.heads, nearest_multiples(config.width, config.heads)));
  }
  if (config.kind != TransformerKind::kLlama) {
    return;
  }
  require_range("--kv-heads", config.kv_heads, 0, config.heads);
  if (config.kv_heads > 0 && config.heads % config.kv_heads != 0) {
    int nearest = config.kv_heads;
    while (config.heads % nearest != 0) {
      --nearest;
    }
    refuse(
        fmt::format("--heads {} is not a multiple of --kv-heads {}; nearest legal: --kv-heads {}",
                    config.heads, config.kv_heads, nearest));
  }
  if (config.width / config.heads % 2 != 0) {
    refuse(
        fmt::format("--width {} over --heads {} gives an odd head size of {}, and rotary "
                    "positions need an even one; nearest legal: --width {}",
                    config.width, config.heads, config.width / config.heads,
                    nearest_multiples(config.width, 2 * config.heads)));
  }
}

void validate(const TransformerConfig& config, const Partition& partition, int stage) {
  validate(config);
  const std::vector<int>& first = partition.first;
  const int layers = config.layers + 2;
  const bool covers = first.size() >= 2 && first.front() == 0 && first.back() == layers &&
                      std::is_sorted(first.begin(), first.end());
  if (!covers) {
    refuse(
        fmt::format("the partition [{}] does not cut layers 0 to {} (embedding, {} blocks, head) "
                    "into stages, ascending from 0 to {}",
                    fmt::join(first, ", "), layers - 1, config.layers, layers));
  }
  if (first[1] < 1 || first[first.size() - 2] == layers) {
    refuse(
        fmt::format("the partition [{}] leaves the first or the last stage empty; they hold the "
                    "embedding and the head",
                    fmt::join(first, ", ")));
  }
  if (stage < 0 || stage >= partition.stages()) {
    throw Error(ErrorCode::kInternal,
                fmt::format("stage {} of a partition into {} stages", stage, partition.stages()));
  }
}

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

int owner_of(const Partition& partition, int layer) {
  const auto above = std::upper_bound(partition.first.begin(), partition.first.end(), layer);
  return static_cast<int>(above - partition.first.begin()) - 1;
}

}  // namespace

void validate(const TransformerConfig& config) {
  require_range("--layers", config.layers, 1, TransformerLimits::kLayers);
  require_range("--heads", config.heads, 1, TransformerLimits::kHeads);
  require_range("--width", config.width, 1, TransformerLimits::kWidth);
  require_range("--context", config.context, 1, TransformerLimits::kContext);
  require_range("--vocabulary", config.vocabulary, 1, TransformerLimits::kVocabulary);
  require_range("--mlp-width", config.mlp_width, 0, TransformerLimits::kMlpWidth);
  validate_attention(config);
  if (!(config.dropout >= 0.0F && config.dropout < 1.0F)) {
    refuse(fmt::format("--dropout {} is not in [0, 1); nearest legal: {}", config.dropout,
                       config.dropout >= 1.0F ? 0.99 : 0.0));
  }
  if (!std::isfinite(config.rotary_base) || config.rotary_base <= 1.0F) {
    refuse(fmt::format("--rotary-base {} is not above 1; usual: 10000", config.rotary_base));
  }
  if (config.precision != DType::kF32 && config.precision != DType::kBf16) {
    refuse(fmt::format("--precision {} is not supported; legal: f32, bf16",
                       name_of(config.precision)));
  }
}

std::vector<double> layer_costs(const TransformerConfig& config) {
  validate(config);
  const double context = config.context;
  const double width = config.width;
  const BlockCosts block = block_costs(config);
  std::vector<double> costs(static_cast<size_t>(config.layers) + 2,
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
  std::vector<double> costs(static_cast<size_t>(config.layers) + 2, again);
  costs.front() = costs.back() = 0;  // no products
  return costs;
}

std::vector<ParameterInfo> parameter_list(const TransformerConfig& config) {
  validate(config);
  ParameterSet parameters;
  WeightCopies copies(config.precision);
  std::vector<std::unique_ptr<Layer>> layers;
  for (int index = 0; index < config.layers + 2; ++index) {
    (void)build_layer(config, index, parameters, copies, layers);
  }
  std::vector<ParameterInfo> list;
  for (const Parameter* parameter : parameters.all()) {
    // The only name used twice is the tied embedding, whose owner comes first.
    if (list.empty() || !parameter->tied || parameter->name != list.front().name) {
      list.push_back({parameter->name, parameter->shape});
    }
  }
  return list;
}

std::int64_t parameter_count(const TransformerConfig& config) {
  std::int64_t count = 0;
  for (const ParameterInfo& parameter : parameter_list(config)) {
    count += parameter.shape.elements();
  }
  return count;
}

std::vector<int> tied_stages(const TransformerConfig& config, const Partition& partition) {
  if (!config.tied) {
    return {};
  }
  const int embedding = owner_of(partition, 0);
  const int head = owner_of(partition, config.layers + 1);
  return embedding == head ? std::vector<int>{embedding} : std::vector<int>{embedding, head};
}

std::unique_ptr<Stage> make_transformer_stage(const TransformerConfig& config,
                                              const Partition& partition, int stage) {
  validate(config, partition, stage);
  const auto at = static_cast<size_t>(stage);
  const LayerRange range{partition.first[at], partition.first[at + 1]};
  if (stage == partition.stages() - 1) {
    return std::make_unique<LastTransformerStage>(config, range);
  }
  return std::make_unique<TransformerStage>(config, range);
}

}  // namespace sluice
