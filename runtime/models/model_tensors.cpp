#include "runtime/models/model_tensors.hpp"

#include <fmt/core.h>

#include <sluice/hugging_face.hpp>

#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/checkpoint/verify.hpp"
#include "runtime/files/sha256.hpp"

namespace sluice {

SavedTensors open_model_tensors(const std::filesystem::path& directory, Verify verify) {
  if (is_hugging_face(directory)) {
    return SavedTensors(directory, read_hugging_face(directory).layout);
  }
  const SaveSelection selection = select_saves(directory);
  if (selection.candidates.empty()) {  // what is missing, is said by one of these
    return SavedTensors(directory, read_hugging_face(newest_save(directory)).layout);
  }
  const Save& save = selection.candidates.front();
  require_sound(save.directory, save.state, verify != Verify::kOff);
  return SavedTensors(save.directory, save.state);
}

void load_model(Pipeline& pipeline, const std::filesystem::path& directory, Verify verify) {
  if (is_hugging_face(directory)) {
    load_weights(pipeline, directory, read_hugging_face(directory).layout);
  } else {
    load_weights(pipeline, directory, verify);
  }
}

std::string digest_all(std::span<const ParameterDigest> parameters) {
  std::string lines;
  for (const ParameterDigest& parameter : parameters) {
    lines += fmt::format("{}  {}\n", parameter.sha256, parameter.name);
  }
  return sha256_hex(std::as_bytes(std::span<const char>(lines)));
}

}  // namespace sluice
