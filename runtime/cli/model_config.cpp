#include "runtime/cli/model_config.hpp"

#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include <sluice/error.hpp>

namespace sluice {

using Json = nlohmann::ordered_json;

std::string model_config_text(const TransformerConfig& config,
                              const std::vector<std::pair<std::string, std::string>>& resolved) {
  Json json;
  json["format"] = 1;
  json["model"] = {{"kind", config.kind == TransformerKind::kGpt2 ? "gpt2" : "llama"},
                   {"layers", config.layers},
                   {"heads", config.heads},
                   {"kv_heads", config.kv_heads},
                   {"width", config.width},
                   {"context", config.context},
                   {"vocabulary", config.vocabulary},
                   {"mlp_width", config.mlp_width},
                   {"dropout", config.dropout},
                   {"tied", config.tied},
                   {"rotary_base", config.rotary_base},
                   {"precision", name_of(config.precision)}};
  for (const auto& [name, value] : resolved) json["options"][name] = value;
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

TransformerConfig read_model_config(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / "config.json";
  std::ifstream in(path);
  if (!in) {
    throw Error(
        ErrorCode::kWeights,
        fmt::format("'{}' cannot be read; a directory that --save wrote is needed", path.string()));
  }
  TransformerConfig config;
  try {
    const Json model = Json::parse(in).at("model");
    const std::string kind = model.at("kind").get<std::string>();
    if (kind != "gpt2" && kind != "llama") {
      throw Error(
          ErrorCode::kWeights,
          fmt::format("'{}': model kind '{}' is neither gpt2 nor llama", path.string(), kind));
    }
    config.kind = kind == "gpt2" ? TransformerKind::kGpt2 : TransformerKind::kLlama;
    config.layers = model.at("layers").get<int>();
    config.heads = model.at("heads").get<int>();
    config.kv_heads = model.at("kv_heads").get<int>();
    config.width = model.at("width").get<int>();
    config.context = model.at("context").get<int>();
    config.vocabulary = model.at("vocabulary").get<int>();
    config.mlp_width = model.at("mlp_width").get<int>();
    config.dropout = model.at("dropout").get<float>();
    config.tied = model.at("tied").get<bool>();
    config.rotary_base = model.at("rotary_base").get<float>();
    config.precision = model.at("precision").get<std::string>() == name_of(DType::kBf16)
                           ? DType::kBf16
                           : DType::kF32;
  } catch (const Json::exception& error) {
    throw Error(ErrorCode::kWeights,
                fmt::format("'{}' is damaged: {}", path.string(), error.what()));
  }
  validate(config);
  return config;
}

}  // namespace sluice
