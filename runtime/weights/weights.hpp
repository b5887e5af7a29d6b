// Weights on disk: safetensors with global parameter names.
//
// A directory holds model.safetensors, or model-<i>-of-<n>.safetensors (i from 00001) with
// model.safetensors.index.json; optimizer state likewise as optimizer-<i>-of-<n>.safetensors, names
// "<kind>.<parameter>". Files are written under another name and renamed, so a reader never sees
// half a file.
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

namespace sluice {

struct NamedTensor {
  std::string name;
  Tensor tensor;  // host memory
};

// A tensor to be written, whose bytes are made when it is their turn, all at once or in parts.
struct FileTensor {
  std::string name;
  TensorSpec spec;
  // The next of them, spec.bytes() in all, valid until the next call; may use `scratch`.
  std::function<std::span<const std::byte>(std::vector<std::byte>& scratch)> bytes;
};

// Throws Error(kIo) naming path and cause, a name that comes twice included; leaves no partial
// file. `written`, if not empty, gets the file's bytes in order, in pieces, as they are written.
void write_safetensors(const std::filesystem::path& path, std::span<const FileTensor> tensors,
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
  [[nodiscard]] const Entry* find(const std::string& name) const;
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const;
  // The bytes of an entry are not needed soon: their pages may leave memory.
  void release(const Entry& entry) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// All files of one kind ("model" or "optimizer") in a directory.
class WeightsDirectory {
 public:
  // Throws Error(kWeights): nothing there, a single file and an index, an index that names a
  // missing file, parts and index that disagree, parts that no index names, a tensor twice, parts
  // whose metadata "step" differ (a save cut short over an older one).
  WeightsDirectory(const std::filesystem::path& directory, const std::string& kind);
  [[nodiscard]] const SafetensorsFile::Entry* find(const std::string& name) const;
  [[nodiscard]] std::vector<std::string> names() const;  // sorted
  // The name of the file that holds it. Requires find(name).
  [[nodiscard]] std::string file_of(const std::string& name) const;

 private:
  void require_one_save() const;

  std::filesystem::path directory_;
  struct Place {
    std::size_t file = 0;  // of files_
    const SafetensorsFile::Entry* entry = nullptr;
  };
  std::vector<SafetensorsFile> files_;
  std::vector<std::string> file_names_;
  std::map<std::string, Place> by_name_;
};

// Whether `directory` holds a file or an index of this kind.
[[nodiscard]] bool has_weights(const std::filesystem::path& directory, const std::string& kind);

// File name of part `index` (from 0) of `count`: "model.safetensors" for one.
[[nodiscard]] std::string weights_file_name(const std::string& kind, int index, int count);
[[nodiscard]] std::string weights_index_name(const std::string& kind);
// Writes the index file over parts: tensor name -> file name. Returns its text.
std::string write_weights_index(const std::filesystem::path& directory, const std::string& kind,
                                const std::map<std::string, std::string>& file_of,
                                std::size_t total_bytes);

}  // namespace sluice
