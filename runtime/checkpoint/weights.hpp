// Weights on disk: safetensors with global parameter names.
//
// A directory holds model.safetensors, or model-<i>-of-<n>.safetensors (i from 00001) with
// model.safetensors.index.json; optimizer state likewise as optimizer-<i>-of-<n>.safetensors, names
// "<kind>.<parameter>". save_state.hpp describes what else a save has. Files are written under
// another name and renamed, so a reader never sees half a file.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <sluice/tensor.hpp>

#include "runtime/checkpoint/save_state.hpp"

namespace sluice {

struct NamedTensor {
  std::string name;
  Tensor tensor;  // host memory
};

// Throws Error(kIo) naming path and cause, a name that comes twice included; leaves no partial
// file. `written`, if not empty, gets the file's bytes in order, in pieces, as they are written.
void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata,
                       const std::function<void(std::span<const std::byte>)>& written = {});

// One file, memory-mapped, checked whole on opening: header length, JSON, dtypes, shapes against
// offsets, offsets in range, without overlap or gap, file length. Throws Error(kWeights) naming the
// file and what is wrong. Never reads outside the mapping, for any bytes.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) = delete;
  struct Entry {
    std::string name;
    TensorSpec spec;
    std::span<const std::byte> bytes;  // in the mapping, maybe unaligned for the dtype
  };
  [[nodiscard]] const std::vector<Entry>& entries() const;  // by offset
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// All files of one kind ("model" or "optimizer") in a directory.
class WeightsDirectory {
 public:
  // Throws Error(kWeights): nothing there, a single file and an index, an index that names a
  // missing file, parts and index that disagree, a tensor twice, parts whose metadata "step" differ
  // (a save cut short over an older one).
  WeightsDirectory(const std::filesystem::path& directory, const std::string& kind);
  [[nodiscard]] const SafetensorsFile::Entry* find(const std::string& name) const;
  [[nodiscard]] std::vector<std::string> names() const;  // sorted
  // Copies into `into`; throws Error(kWeights) where the tensor is missing, or dtype or shape
  // differ, with both shapes.
  void read(const std::string& name, const Tensor& into) const;
  // The metadata "step" of the parts; empty where they have none.
  [[nodiscard]] std::string step() const;

 private:
  void require_one_save() const;

  std::filesystem::path directory_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, const SafetensorsFile::Entry*> by_name_;
};

// Whether `directory` holds a file or an index of this kind.
[[nodiscard]] bool has_weights(const std::filesystem::path& directory, const std::string& kind);

// File name of part `index` (from 0) of `count`: "model.safetensors" for one.
[[nodiscard]] std::string weights_file_name(const std::string& kind, int index, int count);
// The index file over parts: tensor name -> file name. Returns its name, size and hash.
SavedFile write_weights_index(const std::filesystem::path& directory, const std::string& kind,
                              const std::map<std::string, std::string>& file_of,
                              std::size_t total_bytes);

struct ParameterDigest {
  std::string name, sha256;  // hex; of the little-endian bytes
};
// Sorted by name.
[[nodiscard]] std::vector<ParameterDigest> digest_parameters(const WeightsDirectory& weights);
// Of the lines "<sha256>  <name>\n".
[[nodiscard]] std::string digest_all(std::span<const ParameterDigest> parameters);

}  // namespace sluice
