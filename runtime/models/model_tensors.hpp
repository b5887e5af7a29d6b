// The parameters of a model in a directory, whoever wrote it: one save of Sluice, or a directory of
// Hugging Face; and digests, by which two of them are compared.
#pragma once

#include <filesystem>
#include <span>
#include <string>

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

struct ParameterDigest {
  std::string name, sha256;  // hex; of the little-endian bytes of the f32 values
};
// Of the lines "<sha256>  <name>\n". The parameters are sorted by name.
[[nodiscard]] std::string digest_all(std::span<const ParameterDigest> parameters);

}  // namespace sluice
