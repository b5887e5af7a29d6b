#include "runtime/models/model_config.hpp"

#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <system_error>

#include <sluice/error.hpp>
#include <sluice/hugging_face.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/checkpoint/save_state.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/models/config_json.hpp"

namespace sluice {

namespace {

using Json = nlohmann::ordered_json;

// Calls visit(name, field) for each field that the weights depend on, except enumerations and
// layers. Saves that are older than a field lack it.
template <typename Config, typename Visit>
void each_field(Config& config, const Visit& visit) {
  visit("layers", config.layers);
  visit("heads", config.heads);
  visit("kv_heads", config.kv_heads);
  visit("width", config.width);
  visit("context", config.context);
  visit("vocabulary", config.vocabulary);
  visit("mlp_width", config.mlp_width);
  visit("dropout", config.dropout);
  visit("tied", config.tied);
  visit("rotary_base", config.rotary_base);
}

template <typename Config, typename Visit>
void each_later_field(Config& config, const Visit& visit) {
  visit("positions", config.positions);
  visit("norm_epsilon", config.norm_epsilon);
  visit("head_dim", config.head_dim);
  visit("qkv_bias", config.qkv_bias);
  visit("attention_output_bias", config.attention_output_bias);
  visit("mlp_bias", config.mlp_bias);
  visit("qk_norm", config.qk_norm);
  visit("window", config.window);
  visit("full_layers", config.full_layers);
  visit("rotary_scaling_factor", config.rotary_scaling.factor);
  visit("rotary_low_frequency_factor", config.rotary_scaling.low_frequency_factor);
  visit("rotary_high_frequency_factor", config.rotary_scaling.high_frequency_factor);
  visit("rotary_original_context", config.rotary_scaling.original_context);
}

using Scaling = RotaryScaling::Kind;
const std::map<std::string, Scaling>& scalings() {
  static const std::map<std::string, Scaling> names = {
      {"none", Scaling::kNone}, {"linear", Scaling::kLinear}, {"llama3", Scaling::kLlama3}};
  return names;
}

TransformerConfig config_from(const Json& model, const std::filesystem::path& path) {
  TransformerConfig config;
  try {
    const std::string kind = model.at("kind").get<std::string>();
    if (kind != "gpt2" && kind != "llama") {
      throw_error(ErrorCode::kWeights, "'{}': model kind '{}' is neither gpt2 nor llama",
                  path.string(), kind);
    }
    config.kind = kind == "gpt2" ? TransformerKind::kGpt2 : TransformerKind::kLlama;
    each_field(config, [&](const char* name, auto& field) { model.at(name).get_to(field); });
    each_later_field(config, [&](const char* name, auto& field) {
      if (model.contains(name)) model.at(name).get_to(field);
    });
    config.rotary_scaling.kind = scalings().at(model.value("rotary_scaling", "none"));
    const auto precision = [](const std::string& name) {
      return name == name_of(DType::kBf16) ? DType::kBf16 : DType::kF32;
    };
    config.precision = precision(model.at("precision").get<std::string>());
    config.stream_precision = precision(model.value("stream_precision", "f32"));
  } catch (const Json::exception& error) {
    throw_error(ErrorCode::kWeights, "'{}' is damaged: {}", path.string(), error.what());
  } catch (const std::out_of_range&) {
    throw_error(ErrorCode::kWeights, "'{}': rotary_scaling is neither none, linear nor llama3",
                path.string());
  }
  validate(config);
  return config;
}

}  // namespace

std::string model_config_text(const TransformerConfig& config) {
  Json model;
  model["kind"] = config.kind == TransformerKind::kGpt2 ? "gpt2" : "llama";
  each_field(config, [&](const char* name, const auto& field) { model[name] = field; });
  each_later_field(config, [&](const char* name, const auto& field) { model[name] = field; });
  for (const auto& [name, kind] : scalings()) {
    if (kind == config.rotary_scaling.kind) model["rotary_scaling"] = name;
  }
  model["precision"] = name_of(config.precision);
  model["stream_precision"] = name_of(config.stream_precision);
  return dump_json(model);
}

TransformerConfig read_model_config(const std::filesystem::path& directory) {
  if (is_hugging_face(directory)) return read_hugging_face(directory).config;
  std::filesystem::path path = directory / "config.json";
  std::error_code ignored;
  const bool saved = std::filesystem::exists(directory / "state.json", ignored);
  if (!saved && std::filesystem::exists(path, ignored)) {
    return read_hugging_face(directory).config;  // says what the file lacks
  }
  if (!saved) {
    throw_error(ErrorCode::kWeights,
                "'{}' holds neither a save of Sluice (state.json) nor a model of Hugging Face "
                "(config.json with 'model_type')",
                directory.string());
  }
  path = directory / "state.json";
  const std::string text = read_save_state(directory).model;
  if (text.empty()) {
    throw_error(ErrorCode::kWeights, "'{}' names no model; 'sluice train --save' writes one",
                path.string());
  }
  return config_from(parse_ordered_json(text), path);
}

}  // namespace sluice
