// The model of a save: enough to build it again.
#pragma once

#include <filesystem>
#include <string>

#include <sluice/transformer.hpp>

namespace sluice {

// A JSON object of the fields that the weights depend on: `model` of state.json.
[[nodiscard]] std::string model_config_text(const TransformerConfig& config);

// The model of one directory: `model` of a save's state.json; else what read_hugging_face() says.
// Throws Error(kWeights) naming the file and the field that is missing or wrong.
[[nodiscard]] TransformerConfig read_model_config(const std::filesystem::path& directory);

}  // namespace sluice
