#include "runtime/train/model_text.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <limits>
#include <string_view>
#include <vector>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

template <typename Number>
bool parse(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

RotaryScaling parse_scaling(const std::string& text) {
  const std::vector<std::string_view> parts = split(text);
  RotaryScaling scaling;
  if (text == "none") return scaling;
  bool sound = false;
  if (parts.front() == "linear" && parts.size() == 2) {
    scaling.kind = RotaryScaling::Kind::kLinear;
    sound = parse(parts[1], scaling.factor);
  } else if (parts.front() == "llama3" && parts.size() == 5) {
    scaling.kind = RotaryScaling::Kind::kLlama3;
    sound = parse(parts[1], scaling.factor) && parse(parts[2], scaling.low_frequency_factor) &&
            parse(parts[3], scaling.high_frequency_factor) &&
            parse(parts[4], scaling.original_context);
  }
  if (sound) return scaling;
  throw_usage(
      "option --rotary-scaling: '{}'; legal are none, linear,FACTOR and "
      "llama3,FACTOR,LOW,HIGH,CONTEXT, such as llama3,8,1,4,8192",
      text);
}

std::vector<int> parse_layers(const std::string& text) {
  std::vector<int> layers;
  if (text.empty()) return layers;
  for (const std::string_view part : split(text)) {
    const std::size_t dash = part.find('-');
    int first = 0, last = 0;
    const bool sound = parse(part.substr(0, dash), first) &&
                       (dash == std::string_view::npos || parse(part.substr(dash + 1), last));
    if (dash == std::string_view::npos) last = first;
    if (!sound || first < 0 || last < first || last >= TransformerLimits::kLayers) {
      throw_usage(
          "option --full-layers: '{}' in '{}'; legal are layers from 0 on and ranges, such "
          "as 0,4-7",
          part, text);
    }
    for (int layer = first; layer <= last; ++layer) layers.push_back(layer);
  }
  return layers;
}

std::string text_of(const std::vector<int>& layers) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < layers.size();) {
    std::size_t end = i + 1;
    while (end < layers.size() && layers[end] == layers[end - 1] + 1) ++end;
    parts.push_back(end - i == 1 ? fmt::format("{}", layers[i])
                                 : fmt::format("{}-{}", layers[i], layers[end - 1]));
    i = end;
  }
  return fmt::format("{}", fmt::join(parts, ","));
}

}  // namespace

void add_model_text(OptionTable& table, TransformerConfig& model, ModelText& text) {
  table.add_integer("positions", model.positions, 1, TransformerLimits::kContext,
                    "the model is made for; gpt2 learns them; auto: as many as context", "auto");
  table.add_real("norm-epsilon", model.norm_epsilon, kPositive, "of all norms");
  table.add_integer("head-dim", model.head_dim, 1, TransformerLimits::kWidth,
                    "width of a head (llama); auto: width / heads", "auto");
  table.add_real("rotary-base", model.rotary_base,
                 {.low = 1, .high = std::numeric_limits<double>::infinity(), .low_open = true},
                 "of rotary positions (llama)");
  table.add_text(
      "rotary-scaling", text.rotary_scaling, "SCALING",
      "of rotary positions (llama): none, linear,FACTOR or llama3,FACTOR,LOW,HIGH,CONTEXT");
  table.add_flag("qkv-bias", model.qkv_bias, "of queries, keys and values (llama)");
  table.add_flag("attention-output-bias", model.attention_output_bias, "(llama)");
  table.add_flag("mlp-bias", model.mlp_bias, "(llama)");
  table.add_flag("qk-norm", model.qk_norm, "RMSNorm of each head's queries and keys (llama)");
  table.add_integer("window", model.window, 1, TransformerLimits::kContext,
                    "positions that a query sees, itself the last (llama); auto: all", "auto");
  table.add_text("full-layers", text.full_layers, "LIST",
                 "blocks that see all positions in spite of window: 0,4-7");
}

void take_model_text(const ModelText& text, TransformerConfig& model) {
  model.rotary_scaling = parse_scaling(text.rotary_scaling);
  model.full_layers = parse_layers(text.full_layers);
}

ModelText text_of(const TransformerConfig& model) {
  const RotaryScaling& scaling = model.rotary_scaling;
  ModelText text;
  if (scaling.kind == RotaryScaling::Kind::kLinear) {
    text.rotary_scaling = fmt::format("linear,{}", scaling.factor);
  } else if (scaling.kind == RotaryScaling::Kind::kLlama3) {
    text.rotary_scaling =
        fmt::format("llama3,{},{},{},{}", scaling.factor, scaling.low_frequency_factor,
                    scaling.high_frequency_factor, scaling.original_context);
  }
  text.full_layers = text_of(model.full_layers);
  return text;
}

}  // namespace sluice
