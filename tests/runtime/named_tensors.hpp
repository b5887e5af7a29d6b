// Tensors in memory as a safetensors file, for tests.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "runtime/weights/weights.hpp"

namespace sluice {

// As the one of weights.hpp.
inline void write_safetensors(const std::filesystem::path& path,
                              std::span<const NamedTensor> tensors,
                              const std::map<std::string, std::string>& metadata,
                              const std::function<void(std::span<const std::byte>)>& written = {}) {
  std::vector<FileTensor> files;
  for (const auto& [name, tensor] : tensors) {
    const std::span bytes(tensor.as<const std::byte>(), tensor.spec.bytes());
    files.push_back({name, tensor.spec, [bytes](std::vector<std::byte>&) { return bytes; }});
  }
  write_safetensors(path, files, metadata, written);
}

}  // namespace sluice
