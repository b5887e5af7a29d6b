// The parameters of a model in a directory, whoever wrote it: one save of Sluice, of any version,
// or a directory of Hugging Face.
#pragma once

#include <filesystem>

#include <sluice/checkpoint.hpp>

#include "runtime/checkpoint/saved_tensors.hpp"

namespace sluice {

class Pipeline;

// Throws Error(kWeights) as read_hugging_face() or the reader of saves does; so for a save that
// require_sound() refuses, which compares hashes unless `verify` is kOff.
[[nodiscard]] SavedTensors open_model_tensors(const std::filesystem::path& directory,
                                              Verify verify = Verify::kFull);

// Collective. Values of all parameters of the pipeline; load_weights() of either kind.
void load_model(Pipeline& pipeline, const std::filesystem::path& directory,
                Verify verify = Verify::kFull);

}  // namespace sluice
