// From a transformer's configuration to its layers, and what they compute, for partitions.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include <sluice/operators.hpp>
#include <sluice/tensor.hpp>
#include <sluice/transformer.hpp>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "stages/layers/branches.hpp"
#include "stages/layers/ends.hpp"
#include "stages/layers/residual.hpp"
#include "stages/transformer/sizes.hpp"

namespace sluice::nn {
namespace {

// Places of dropout within a layer; part of the random streams' keys.
enum Place : std::uint32_t { kEmbedded = 0, kProbabilities = 1, kAttention = 2, kMlp = 3 };

DropoutSite site(const TransformerConfig& config, int number, Place place) {
  return {config.dropout, random_site(static_cast<std::uint32_t>(number), place)};
}

Norm::Kind norm_kind(const TransformerConfig& config) {
  return config.kind == TransformerKind::kGpt2 ? Norm::Kind::kLayer : Norm::Kind::kRms;
}

// Radford et al. 2019: what is added to the residual stream starts smaller, by the number of
// additions.
double output_deviation(const TransformerConfig& config) {
  return 0.02 / std::sqrt(2.0 * config.layers);
}

// Whose block it is. In a model a block knows the context; in a Sequential it takes any.
enum class Within { kModel, kSequential };

std::int64_t by_sample_from(const TransformerConfig& config, Within within) {
  if (within == Within::kSequential) return kRowsToSumBySample;
  return config.sums_by_sample() ? 0 : std::numeric_limits<std::int64_t>::max();
}

// cost: of BlockCosts, in floating-point operations.
ResidualOptions residual_options(const TransformerConfig& config, Within within, int number,
                                 Place output, double (*cost)(const BlockCosts&)) {
  return {.width = config.width,
          .norm = norm_kind(config),
          .norm_name = output == kAttention ? "norm1." : "norm2.",
          .norm_epsilon = config.norm_epsilon,
          .output = site(config, number, output),
          .precision = config.precision,
          .stream = config.stream_precision,
          .by_sample_from = by_sample_from(config, within),
          .context = within == Within::kModel ? config.context : 0,
          .cost = [config, cost](std::int64_t sequence) {
            TransformerConfig sample = config;
            sample.context = static_cast<int>(sequence);
            return cost(block_costs(sample, 0)) / 2;
          }};
}

template <typename T>
std::unique_ptr<Layer> with_branch(const ResidualOptions& outer, const typename T::Options& options,
                                   const char* named) {
  return std::make_unique<ResidualLayer>(
      outer, [=](const ResidualOptions& around, const std::string& name, ParameterSet& parameters) {
        typename T::Options mine = options;
        mine.precision = around.precision;
        mine.result = around.result();
        mine.shards = around.shards;
        return std::make_unique<T>(mine, name + named, parameters);
      });
}

std::unique_ptr<Layer> make_attention(const TransformerConfig& config, Within within, int number) {
  const ResidualOptions outer = residual_options(
      config, within, number, kAttention,
      [](const BlockCosts& costs) { return costs.scores + costs.qkv + costs.output; });
  const bool llama = config.kind == TransformerKind::kLlama;
  const TransformerSizes sizes = sizes_of(config);
  SelfAttention::Options options{.width = config.width,
                                 .heads = sizes.heads,
                                 .kv_heads = sizes.kv_heads,
                                 .head_dim = sizes.head_dim,
                                 .window = config.window,
                                 .probabilities = site(config, number, kProbabilities),
                                 .recompute = config.recompute == Recompute::kAttention,
                                 .output_deviation = output_deviation(config),
                                 .qkv_bias = !llama || config.qkv_bias,
                                 .output_bias = !llama || config.attention_output_bias};
  if (llama) options.positions = {config.rotary_base, config.rotary_scaling};
  if (config.qk_norm) options.qk_norm = config.norm_epsilon;
  return with_branch<SelfAttention>(outer, options, "attention.");
}

std::unique_ptr<Layer> make_mlp(const TransformerConfig& config, Within within, int number) {
  const ResidualOptions outer = residual_options(
      config, within, number, kMlp, [](const BlockCosts& costs) { return costs.up + costs.down; });
  const bool gpt2 = config.kind == TransformerKind::kGpt2;
  const Mlp::Options options{.kind = gpt2 ? Mlp::Kind::kGelu : Mlp::Kind::kSwiGlu,
                             .width = config.width,
                             .hidden = sizes_of(config).mlp_width,
                             .output_deviation = output_deviation(config),
                             .bias = gpt2 || config.mlp_bias};
  return with_branch<Mlp>(outer, options, "mlp.");
}

// One that is recomputed where the configuration says so; its parameters have names of their own.
template <typename Make>
LayerSpec part(const TransformerConfig& config, const char* kind, const Make& make,
               const ShardForms& forms = {.dealt = true}) {
  LayerSpec spec{.kind = kind, .make = make, .name = "", .trusted = true, .forms = forms};
  return config.recompute == Recompute::kBlock ? recompute(std::move(spec)) : spec;
}

std::string settings(const TransformerConfig& config) {
  const RotaryScaling& scaling = config.rotary_scaling;
  return settings_of(static_cast<int>(config.kind), config.layers, config.heads, config.width,
                     config.kv_heads, config.mlp_width, config.dropout, config.rotary_base,
                     config.norm_epsilon, config.head_dim, static_cast<int>(scaling.kind),
                     scaling.factor, scaling.low_frequency_factor, scaling.high_frequency_factor,
                     scaling.original_context, config.qkv_bias, config.attention_output_bias,
                     config.mlp_bias, config.qk_norm, config.window,
                     static_cast<int>(config.precision), static_cast<int>(config.stream_precision),
                     static_cast<int>(config.recompute), config.batch_invariant);
}

LayerSpec make_block(const TransformerConfig& config, Within within) {
  const auto checked = [=](std::unique_ptr<Layer> (*make)(const TransformerConfig&, Within, int)) {
    return [=](int number) {
      validate(config);
      if (!config.full_layers.empty()) {
        throw_usage(
            "full_layers of {} blocks; legal in a block: none, and a window of 0 for one that sees "
            "all positions",
            config.full_layers.size());
      }
      if (!config.recompute_blocks.empty()) {
        throw_usage("recompute_blocks of {} blocks; legal in a block: none, and `recompute`",
                    config.recompute_blocks.size());
      }
      return make(config, within, number);
    };
  };
  LayerSpec block = group({part(config, "attention_block", checked(make_attention)),
                           part(config, "mlp_block", checked(make_mlp))});
  block.kind = "transformer_block";
  block.settings = settings(config);
  block.one_number = true;
  return block;
}

HeadOptions head_options(const TransformerConfig& config) {
  return {.vocabulary = config.vocabulary,
          .width = config.width,
          .norm = norm_kind(config),
          .norm_epsilon = config.norm_epsilon,
          .tied = config.tied,
          .precision = config.precision,
          .stream = config.stream_precision,
          .by_sample_from = by_sample_from(config, Within::kModel),
          .context = config.context,
          .chunks = config.logit_chunks};
}

LayerSpec embedding_of(const TransformerConfig& config) {
  EmbeddingOptions options{.classes = config.vocabulary,
                           .width = config.width,
                           .context = config.context,
                           .table_name = "token_embedding.weight",
                           .positions_name = "position_embedding.weight",
                           .deviation = 0.02,
                           .tied = config.tied,
                           .dropout = site(config, 0, kEmbedded),
                           .stream = config.stream_precision};
  if (config.kind == TransformerKind::kGpt2) {
    options.positions = config.positions > 0 ? config.positions : config.context;
  }
  return {.kind = "token_embedding",
          .make = [options](int) { return make_embedding(options); },
          .settings = settings_of(config.vocabulary, config.width, options.positions,
                                  config.context, config.tied, config.dropout),
          .name = "",
          .trusted = true,
          .forms = {.dealt = true}};
}

LayerSpec make_head(const TransformerConfig& config) {
  const auto make = [options = head_options(config)](int) {
    return std::make_unique<HeadLayer>(options);
  };
  const ShardForms forms{.of_whole = ShardForms::kPanels, .dealt = true};
  LayerSpec head{.kind = "head", .make = make, .name = "", .trusted = true, .forms = forms};
  // With chunks it keeps statistics alone.
  if (config.logit_chunks == 1) head = part(config, "head", make, forms);
  head.settings = settings_of(config.vocabulary, config.width, config.tied, config.logit_chunks);
  return head;
}

}  // namespace

LayerSpec transformer_block(const TransformerConfig& config) {
  return make_block(config, Within::kSequential);
}

std::vector<LayerSpec> transformer_layers(const TransformerConfig& config) {
  validate(config);
  std::vector<LayerSpec> layers = {embedding_of(config)};
  TransformerConfig mine = config;
  mine.full_layers.clear();
  mine.recompute_blocks.clear();
  for (int block = 0; block < config.layers; ++block) {
    mine.window = window_of(config, block);
    mine.recompute = recompute_of(config, block);
    layers.push_back(make_block(mine, Within::kModel));
    layers.back().name = fmt::format("blocks.{}.", block);
  }
  layers.push_back(make_head(mine));
  return layers;
}

LossSpec transformer_loss(const TransformerConfig& config) {
  validate(config);
  return {"cross_entropy_loss",
          [options = head_options(config)] { return std::make_unique<TokenLoss>(options); },
          settings_of(config.vocabulary, config.logit_chunks), ShardForms::kPanels};
}

}  // namespace sluice::nn

namespace sluice {
namespace {

// Pairs of a query and a key that it sees, half of them on the diagonal.
double seen_pairs(const TransformerConfig& config, int block) {
  const double context = config.context;
  const int window = window_of(config, block);
  const double seen = window == 0 ? context : std::min<double>(window, context);
  return seen * context - seen * seen / 2;
}

// The ends' costs are 0; cost(of, block) is that of a block of these parts.
template <typename Cost>
std::vector<double> costs_of_blocks(const TransformerConfig& config, const Cost& cost) {
  std::vector<double> costs(at(config.layers) + 2);
  for (int block = 0; block < config.layers; ++block) {
    costs[at(block) + 1] = cost(block_costs(config, block), block);
  }
  return costs;
}

}  // namespace

TransformerSizes sizes_of(const TransformerConfig& config) {
  const bool gpt2 = config.kind == TransformerKind::kGpt2;
  TransformerSizes sizes;
  sizes.width = config.width;
  sizes.heads = config.heads;
  sizes.head_dim = config.head_dim > 0 ? config.head_dim : config.width / config.heads;
  sizes.kv_heads = gpt2 || config.kv_heads == 0 ? config.heads : config.kv_heads;
  sizes.mlp_width = config.mlp_width;
  if (config.mlp_width == 0) {
    const std::int64_t multiple = 64;
    const std::int64_t eight_thirds = (8 * sizes.width + 2) / 3;
    sizes.mlp_width = gpt2 ? 4 * sizes.width : (eight_thirds + multiple - 1) / multiple * multiple;
  }
  return sizes;
}

int window_of(const TransformerConfig& config, int block) {
  const bool full = std::binary_search(config.full_layers.begin(), config.full_layers.end(), block);
  return full ? 0 : config.window;
}

Recompute recompute_of(const TransformerConfig& config, int block) {
  return config.recompute_blocks.empty() ? config.recompute : config.recompute_blocks[at(block)];
}

Transformer::Transformer(const TransformerConfig& config)
    : Sequential(Sequential(nn::transformer_layers(config), nn::transformer_loss(config))
                     .with_input({DType::kI32, Shape{config.context}})) {}

std::vector<ParameterInfo> parameter_list(const TransformerConfig& config) {
  const std::unique_ptr<Stage> whole = Transformer(config)(0, 1);
  std::vector<ParameterInfo> list;
  for (const Parameter* parameter : whole->parameters()->all()) {
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

BlockCosts block_costs(const TransformerConfig& config, int block) {
  const TransformerSizes sizes = sizes_of(config);
  const double context = config.context;
  const auto width = static_cast<double>(sizes.width);
  const auto query_width = static_cast<double>(sizes.query_width());
  const double mlp = width * static_cast<double>(sizes.mlp_width);
  const double raising_matmuls = config.kind == TransformerKind::kGpt2 ? 1 : 2;
  return {.scores = 4 * seen_pairs(config, block) * query_width,
          .qkv = 2 * context * width * (query_width + 2 * static_cast<double>(sizes.kv_width())),
          .output = 2 * context * query_width * width,
          .up = 2 * context * raising_matmuls * mlp,
          .down = 2 * context * mlp};
}

std::vector<double> layer_costs(const TransformerConfig& config) {
  validate(config);
  const double context = config.context;
  const double width = config.width;
  std::vector<double> costs = costs_of_blocks(config, [](const BlockCosts& of, int) {
    return of.scores + of.qkv + of.output + of.up + of.down;
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
  return costs_of_blocks(config, [&](const BlockCosts& of, int block) {
    switch (recompute_of(config, block)) {
      case Recompute::kAttention:
        return of.scores;
      case Recompute::kBlock:
        return of.scores + of.qkv + of.up;  // whose results backward reads
      case Recompute::kNone:
        break;
    }
    return 0.0;
  });
}

}  // namespace sluice
