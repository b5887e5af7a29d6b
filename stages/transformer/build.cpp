#include "stages/transformer/build.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include <sluice/tensor.hpp>

#include "stages/layers/attention.hpp"
#include "stages/layers/ends.hpp"
#include "stages/layers/mlp.hpp"
#include "stages/layers/recompute.hpp"

namespace sluice {

namespace {

// Places of dropout within a layer; part of the random streams' keys.
enum Place : std::uint32_t { kEmbedded = 0, kProbabilities = 1, kAttention = 2, kMlp = 3 };

DropoutSite site(const TransformerConfig& config, int layer, Place place) {
  return {config.dropout, random_site(static_cast<std::uint32_t>(layer), place)};
}

Norm::Kind norm_kind(const TransformerConfig& config) {
  return config.kind == TransformerKind::kGpt2 ? Norm::Kind::kLayer : Norm::Kind::kRms;
}

// Radford et al. 2019: what is added to the residual stream starts smaller, by the number of
// additions.
double output_deviation(const TransformerConfig& config) {
  return 0.02 / std::sqrt(2.0 * config.layers);
}

ResidualOptions residual_options(const TransformerConfig& config, const std::string& name,
                                 int layer, Place output) {
  return {.name = name,
          .norm = norm_kind(config),
          .width = config.width,
          .norm_epsilon = config.norm_epsilon,
          .output_deviation = output_deviation(config),
          .output = site(config, layer, output),
          .precision = config.precision,
          .stream = config.stream_precision};
}

std::unique_ptr<StreamLayer> make_attention(const TransformerConfig& config,
                                            const std::string& name, int layer,
                                            ParameterSet& parameters, WeightCopies& copies) {
  const bool llama = config.kind == TransformerKind::kLlama;
  const TransformerSizes sizes = sizes_of(config);
  SelfAttention::Options options{.heads = sizes.heads,
                                 .kv_heads = sizes.kv_heads,
                                 .head_dim = sizes.head_dim,
                                 .window = window_of(config, layer - 1),
                                 .probabilities = site(config, layer, kProbabilities),
                                 .recompute = config.recompute == Recompute::kAttention,
                                 .qkv_bias = !llama || config.qkv_bias,
                                 .output_bias = !llama || config.attention_output_bias};
  if (llama) options.positions = {config.rotary_base, config.rotary_scaling};
  if (config.qk_norm) options.qk_norm = config.norm_epsilon;
  return std::make_unique<AttentionLayer>(residual_options(config, name, layer, kAttention),
                                          std::move(options), parameters, copies);
}

std::unique_ptr<StreamLayer> make_mlp(const TransformerConfig& config, const std::string& name,
                                      int layer, ParameterSet& parameters, WeightCopies& copies) {
  const bool gpt2 = config.kind == TransformerKind::kGpt2;
  MlpLayer::Options options{residual_options(config, name, layer, kMlp)};
  options.kind = gpt2 ? MlpLayer::Kind::kGelu : MlpLayer::Kind::kSwiGlu;
  options.hidden = sizes_of(config).mlp_width;
  options.bias = gpt2 || config.mlp_bias;
  return std::make_unique<MlpLayer>(options, parameters, copies);
}

// Appends a layer that keeps something per micro-batch, wrapped if it is to be recomputed.
void append(const TransformerConfig& config, std::unique_ptr<StreamLayer> layer,
            std::vector<std::unique_ptr<StreamLayer>>& layers) {
  if (config.recompute == Recompute::kBlock) {
    layer = std::make_unique<RecomputedLayer>(std::move(layer));
  }
  layers.push_back(std::move(layer));
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

std::vector<std::size_t> build_layer(const TransformerConfig& config, int index,
                                     ParameterSet& parameters, WeightCopies& copies,
                                     std::vector<std::unique_ptr<StreamLayer>>& layers) {
  std::vector<std::size_t> first_parameters = {parameters.size()};
  if (index == 0) {
    EmbeddingLayer::Options options;
    options.vocabulary = config.vocabulary;
    options.width = config.width;
    if (config.kind == TransformerKind::kGpt2) {
      options.positions = config.positions > 0 ? config.positions : config.context;
    }
    options.tied = config.tied;
    options.dropout = site(config, 0, kEmbedded);
    options.stream = config.stream_precision;
    layers.push_back(std::make_unique<EmbeddingLayer>(options, parameters));
  } else if (index <= config.layers) {
    const std::string name = "blocks." + std::to_string(index - 1);
    append(config, make_attention(config, name, index, parameters, copies), layers);
    first_parameters.push_back(parameters.size());
    append(config, make_mlp(config, name, index, parameters, copies), layers);
  } else {
    HeadLayer::Options options;
    options.vocabulary = config.vocabulary;
    options.width = config.width;
    options.norm = norm_kind(config);
    options.norm_epsilon = config.norm_epsilon;
    options.tied = config.tied;
    options.precision = config.precision;
    options.chunks = config.logit_chunks;
    auto head = std::make_unique<HeadLayer>(options, parameters, copies);
    if (config.logit_chunks > 1) {
      layers.push_back(std::move(head));  // keeps statistics alone
    } else {
      append(config, std::move(head), layers);
    }
  }
  return first_parameters;
}

std::vector<std::unique_ptr<StreamLayer>> build_block(const TransformerConfig& config,
                                                      const std::string& name, int layer,
                                                      ParameterSet& parameters,
                                                      WeightCopies& copies) {
  std::vector<std::unique_ptr<StreamLayer>> parts;
  append(config, make_attention(config, name, layer, parameters, copies), parts);
  append(config, make_mlp(config, name, layer, parameters, copies), parts);
  return parts;
}

std::vector<ParameterInfo> parameter_list(const TransformerConfig& config) {
  validate(config);
  ParameterSet parameters;
  WeightCopies copies(config.precision);
  std::vector<std::unique_ptr<StreamLayer>> layers;
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

}  // namespace sluice
