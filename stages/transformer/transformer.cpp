#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <string_view>

#include <sluice/error.hpp>
#include <sluice/transformer.hpp>

#include "comm/base/throw_error.hpp"
#include "stages/compute/matmul_spec.hpp"

namespace sluice {

namespace {

void require_range(std::string_view option, int value, int least, int most) {
  if (value < least || value > most) {
    throw_usage("{} {} is not between {} and {}; nearest legal: {}", option, value, least, most,
                std::clamp(value, least, most));
  }
}

// "a or b": the legal neighbours of value among multiples of `unit`.
std::string nearest_multiples(int value, int unit) {
  const int below = value / unit * unit;
  const int above = below + unit;
  return below > 0 ? fmt::format("{} or {}", below, above) : fmt::format("{}", above);
}

void require_positive(std::string_view what, float value, std::string_view usual) {
  if (!std::isfinite(value) || value <= 0) {
    throw_usage("{} {} is not above 0 and finite; usual: {}", what, value, usual);
  }
}

void validate_head_size(const TransformerConfig& config) {
  require_range("--head-dim", config.head_dim, 0, TransformerLimits::kHeadDim);
  if (config.head_dim > 0) {
    if (config.head_dim % 2 != 0) {
      throw_usage(
          "--head-dim {} is odd, and rotary positions need an even number; nearest "
          "legal: {}",
          config.head_dim, nearest_multiples(config.head_dim, 2));
    }
    return;
  }
  if (config.width % config.heads != 0) {
    const std::string also =
        config.kind == TransformerKind::kLlama ? ", or a --head-dim of its own" : "";
    throw_usage("--width {} is not a multiple of --heads {}; nearest legal: --width {}{}",
                config.width, config.heads, nearest_multiples(config.width, config.heads), also);
  }
  if (config.kind == TransformerKind::kLlama && config.width / config.heads % 2 != 0) {
    throw_usage(
        "--width {} over --heads {} gives an odd head size of {}, and rotary "
        "positions need an even one; nearest legal: --width {}",
        config.width, config.heads, config.width / config.heads,
        nearest_multiples(config.width, 2 * config.heads));
  }
}

void validate_kv_heads(const TransformerConfig& config) {
  require_range("--kv-heads", config.kv_heads, 0, config.heads);
  if (config.kv_heads > 0 && config.heads % config.kv_heads != 0) {
    int nearest = config.kv_heads;
    while (config.heads % nearest != 0) {
      --nearest;
    }
    throw_usage("--heads {} is not a multiple of --kv-heads {}; nearest legal: --kv-heads {}",
                config.heads, config.kv_heads, nearest);
  }
}

void validate_rotary(const TransformerConfig& config) {
  if (!std::isfinite(config.rotary_base) || config.rotary_base <= 1.0F) {
    throw_usage("--rotary-base {} is not above 1; usual: 10000", config.rotary_base);
  }
  const RotaryScaling& scaling = config.rotary_scaling;
  if (scaling.kind == RotaryScaling::Kind::kNone) return;
  require_positive("--rotary-scaling: the factor", scaling.factor, "2 to 32");
  if (scaling.kind == RotaryScaling::Kind::kLinear) return;
  require_positive("--rotary-scaling: the low frequency factor", scaling.low_frequency_factor, "1");
  require_positive("--rotary-scaling: the high frequency factor", scaling.high_frequency_factor,
                   "4");
  if (scaling.low_frequency_factor >= scaling.high_frequency_factor) {
    throw_usage(
        "--rotary-scaling: the low frequency factor {} is not below the high one {}; "
        "usual: 1 and 4",
        scaling.low_frequency_factor, scaling.high_frequency_factor);
  }
  if (scaling.original_context < 1) {
    throw_usage(
        "--rotary-scaling: the original context {} is not at least 1; nearest "
        "legal: 1; usual: 8192",
        scaling.original_context);
  }
}

void validate_window(const TransformerConfig& config) {
  require_range("--window", config.window, 0, TransformerLimits::kWindow);
  const std::vector<int>& full = config.full_layers;
  if (full.empty()) return;
  if (config.window == 0) {
    throw_usage(
        "--full-layers names {} blocks that see all positions, but without --window "
        "all blocks do; legal: none of them, or a --window of at least 1",
        full.size());
  }
  for (const int block : full) require_range("--full-layers", block, 0, config.layers - 1);
  const auto falls = std::adjacent_find(full.begin(), full.end(), std::greater_equal<>());
  if (falls != full.end()) {
    throw_usage(
        "--full-layers has {} after {}; legal: numbers of blocks, ascending, each "
        "once",
        falls[1], falls[0]);
  }
}

// What only llama has.
void refuse_of_llama(const TransformerConfig& config) {
  const auto refuse_option = [](const char* option, bool set) {
    if (set) {
      throw_usage("{} is an option of --model llama; legal with --model gpt2: none", option);
    }
  };
  refuse_option("--kv-heads", config.kv_heads != 0 && config.kv_heads != config.heads);
  refuse_option("--head-dim", config.head_dim != 0);
  refuse_option("--rotary-base", config.rotary_base != TransformerConfig{}.rotary_base);
  refuse_option("--rotary-scaling", config.rotary_scaling.kind != RotaryScaling::Kind::kNone);
  refuse_option("--qkv-bias", config.qkv_bias);
  refuse_option("--attention-output-bias", config.attention_output_bias);
  refuse_option("--mlp-bias", config.mlp_bias);
  refuse_option("--qk-norm", config.qk_norm);
  refuse_option("--window", config.window != 0);
  refuse_option("--full-layers", !config.full_layers.empty());
}

void validate_recomputation(const TransformerConfig& config) {
  const std::size_t blocks = config.recompute_blocks.size();
  if (blocks == 0 || std::ssize(config.recompute_blocks) == config.layers) return;
  throw_usage("--recompute names {} block{}, the model has {}; legal: one setting for each", blocks,
              blocks == 1 ? "" : "s", config.layers);
}

int owner_of(const Partition& partition, int layer) {
  const auto above = std::upper_bound(partition.first.begin(), partition.first.end(), layer);
  return static_cast<int>(above - partition.first.begin()) - 1;
}

}  // namespace

bool TransformerConfig::sums_by_sample() const {
  return context >= kRowsToSumBySample || batch_invariant;
}

void validate(const TransformerConfig& config) {
  require_range("--layers", config.layers, 1, TransformerLimits::kLayers);
  require_range("--heads", config.heads, 1, TransformerLimits::kHeads);
  require_range("--width", config.width, 1, TransformerLimits::kWidth);
  require_range("--context", config.context, 1, TransformerLimits::kContext);
  require_range("--positions", config.positions, 0, TransformerLimits::kContext);
  if (config.positions > 0 && config.positions < config.context) {
    throw_usage("--context {} is more than the model's {} positions; nearest legal: {}",
                config.context, config.positions, config.positions);
  }
  require_range("--vocabulary", config.vocabulary, 1, TransformerLimits::kVocabulary);
  require_range("--mlp-width", config.mlp_width, 0, TransformerLimits::kMlpWidth);
  require_range("--logit-chunks", config.logit_chunks, 1, TransformerLimits::kLogitChunks);
  if (config.kind == TransformerKind::kGpt2) refuse_of_llama(config);
  validate_head_size(config);
  if (config.kind == TransformerKind::kLlama) {
    validate_kv_heads(config);
    validate_window(config);
  }
  if (!(config.dropout >= 0.0F && config.dropout < 1.0F)) {
    throw_usage("--dropout {} is not in [0, 1); nearest legal: {}", config.dropout,
                config.dropout >= 1.0F ? 0.99 : 0.0);
  }
  validate_recomputation(config);
  require_positive("--norm-epsilon", config.norm_epsilon, "1e-05 or 1e-06");
  validate_rotary(config);
  if (config.precision != DType::kF32 && config.precision != DType::kBf16) {
    throw_usage("--precision {} is not supported; legal: f32, bf16", name_of(config.precision));
  }
  if (config.stream_precision != DType::kF32 && config.stream_precision != config.precision) {
    throw_usage(
        "--stream-precision {} with --precision {}; legal: f32, and bf16 with --precision bf16",
        name_of(config.stream_precision), name_of(config.precision));
  }
}

std::vector<int> tied_stages(const TransformerConfig& config, const Partition& partition) {
  if (!config.tied) {
    return {};
  }
  const int embedding = owner_of(partition, 0);
  const int head = owner_of(partition, config.layers + 1);
  return embedding == head ? std::vector<int>{embedding} : std::vector<int>{embedding, head};
}

}  // namespace sluice
