#include "runtime/cli/model_config.hpp"

#include <fstream>
#include <nlohmann/json.hpp>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/checkpoint/save_state.hpp"

namespace sluice {

using Json = nlohmann::ordered_json;

namespace {

// Calls visit(name, field) for each field that the weights depend on, except the two enumerations.
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

}  // namespace

std::string model_config_text(const TransformerConfig& config) {
  Json model;
  model["kind"] = config.kind == TransformerKind::kGpt2 ? "gpt2" : "llama";
  each_field(config, [&](const char* name, const auto& field) { model[name] = field; });
  model["precision"] = name_of(config.precision);
  return model.dump();
}

TransformerConfig read_model_config(const std::filesystem::path& directory) {
  std::filesystem::path path = directory / "config.json";
  std::ifstream in(path);
  std::error_code ignored;
  std::string text;
  if (!in && !std::filesystem::exists(directory / "state.json", ignored)) {
    throw_error(ErrorCode::kWeights, "'{}' cannot be read; a directory that --save wrote is needed",
                path.string());
  }
  if (!in) {
    path = directory / "state.json";
    text = read_save_state(directory).model;
    if (text.empty()) {
      throw_error(ErrorCode::kWeights, "'{}' names no model; 'sluice train --save' writes one",
                  path.string());
    }
  }
  TransformerConfig config;
  try {
    const Json model = in ? Json::parse(in).at("model") : Json::parse(text);
    const std::string kind = model.at("kind").get<std::string>();
    if (kind != "gpt2" && kind != "llama") {
      throw_error(ErrorCode::kWeights, "'{}': model kind '{}' is neither gpt2 nor llama",
                  path.string(), kind);
    }
    config.kind = kind == "gpt2" ? TransformerKind::kGpt2 : TransformerKind::kLlama;
    each_field(config, [&](const char* name, auto& field) { model.at(name).get_to(field); });
    config.precision = model.at("precision").get<std::string>() == name_of(DType::kBf16)
                           ? DType::kBf16
                           : DType::kF32;
  } catch (const Json::exception& error) {
    throw_error(ErrorCode::kWeights, "'{}' is damaged: {}", path.string(), error.what());
  }
  validate(config);
  return config;
}

}  // namespace sluice
