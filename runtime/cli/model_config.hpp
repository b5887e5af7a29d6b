// config.json, which is saved next to weights: enough to build the model again.
#pragma once

#include <filesystem>
#include <string>

#include <sluice/transformer.hpp>

#include "runtime/cli/train_options.hpp"

namespace sluice {

// JSON: {"format": 1, "model": {...}, "options": {name: value, ...}}. A byte of
// a value that is not UTF-8, for example in a path, becomes U+FFFD.
[[nodiscard]] std::string model_config_text(const TransformerConfig& config,
                                            const OptionValues& options);

// The model of a saved directory. Throws Error(kWeights) naming the file and the field that is
// missing or wrong.
[[nodiscard]] TransformerConfig read_model_config(const std::filesystem::path& directory);

}  // namespace sluice
