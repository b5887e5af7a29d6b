#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include <sluice/error.hpp>
#include <sluice/transformer.hpp>

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
  require_range("--positions", config.positions, 0, TransformerLimits::kContext);
  if (config.positions > 0 && config.positions < config.context) {
    refuse(fmt::format("--context {} is more than the model's {} positions; nearest legal: {}",
                       config.context, config.positions, config.positions));
  }
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

std::vector<int> tied_stages(const TransformerConfig& config, const Partition& partition) {
  if (!config.tied) {
    return {};
  }
  const int embedding = owner_of(partition, 0);
  const int head = owner_of(partition, config.layers + 1);
  return embedding == head ? std::vector<int>{embedding} : std::vector<int>{embedding, head};
}

}  // namespace sluice
