// The tensors of one directory by the names that a pipeline gives them: parameters, buffers, state
// of optimizers ("<kind>.<parameter>"). A parameter may lie there in parts, transposed, or in
// another floating-point type.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sluice/parameter.hpp>
#include <sluice/tensor.hpp>

#include "runtime/checkpoint/save_state.hpp"
#include "runtime/weights/weights.hpp"

namespace sluice {

// The f32 values of a parameter that the model's files hold rounded are state of this kind.
inline constexpr const char* kMasterKind = "master";

class SavedTensors {
 public:
  // Of a save. A file is opened when a tensor of it is read. Throws Error(kWeights) where parts of
  // a parameter do not fit together.
  SavedTensors(std::filesystem::path directory, const SaveState& state);
  // Of another program's files, which hold what `layout` says: also throws where one of its
  // tensors is missing, or is of a type that is not f32, bf16 or f16.
  SavedTensors(std::filesystem::path directory, const FileLayout& layout);

  // Whether the directory is one host's own (--save-local), with the tensors of its ranks alone.
  [[nodiscard]] bool local() const { return local_; }
  // From now on a parameter is its f32 values where the directory holds both.
  void prefer_masters() { masters_ = true; }
  // Names of parameters and buffers, sorted.
  [[nodiscard]] std::vector<std::string> parameters() const;
  // Of the whole, in the type of the files.
  [[nodiscard]] std::optional<TensorSpec> find(const std::string& name) const;
  // The file's tensors that it is made of, as state.json has them.
  [[nodiscard]] std::vector<SavedTensor> tensors_of(const std::string& name) const;
  // All values as f32. Requires find(name) with as many elements. Throws Error(kWeights) where a
  // file is not what it was said to be.
  void read(const std::string& name, std::span<float> into);

 private:
  // Parts by first row; their order is that of rows once whole() has passed.
  struct Whole {
    std::vector<SavedTensor> parts;
    TensorSpec spec;
  };

  void add(const SavedTensor& tensor);
  void put_together();
  [[nodiscard]] const Whole* whole(const std::string& name) const;
  void read_tensor(const SavedTensor& part, std::span<float> rows);

  std::filesystem::path directory_;
  bool local_ = false, masters_ = false;
  std::map<std::string, Whole> by_name_;
  std::map<std::string, SafetensorsFile> files_;  // those that are open
};

}  // namespace sluice
