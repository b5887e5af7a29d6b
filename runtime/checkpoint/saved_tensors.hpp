// The tensors of one directory by the names that a pipeline gives them: parameters, buffers, state
// of optimizers ("<kind>.<parameter>"). A parameter may lie there in parts, transposed, or in
// another floating-point type, and a state in ranges of elements of its slices.
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

struct ElementRange;  // runtime/layout/job_layout.hpp

// The f32 values of a parameter that the model's files hold rounded are state of this kind.
inline constexpr const char* kMasterKind = "master";

class SavedTensors {
 public:
  // Of a save. A file is opened when a tensor of it is read. Throws Error(kWeights) where parts of
  // a parameter do not fit together, or the ranges of a state do not hold each element once.
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
  // The file's tensors that a read() of these elements reads, as state.json has them. None of a
  // slice of another shape.
  [[nodiscard]] std::vector<SavedTensor> tensors_of(const std::string& name, std::int64_t first,
                                                    std::int64_t count,
                                                    const Slice& slice = {}) const;
  // The values as f32 of elements from `first` on, of a slice in its order or of the whole.
  struct Share {
    std::span<float> into;
    std::int64_t first = 0;
    Slice slice = {};
  };
  // Requires find(name) with these elements. Reads what shares have among each other once. Takes
  // memory only where elements do not follow each other in the files: for kPieceElements of the
  // whole, or all of it where its parts are transposed. Throws Error(kWeights) where a file is not
  // what it was said to be.
  void read(const std::string& name, std::span<const Share> shares);
  void read(const std::string& name, std::span<float> into, std::int64_t first = 0,
            const Slice& slice = {}) {
    const Share share{into, first, slice};
    read(name, {&share, 1});
  }
  static constexpr std::int64_t kPieceElements = 1 << 18;

 private:
  // Parts that hold the elements of a slice, or of the whole, in their order.
  struct SavedSlice {
    Slice slice;
    std::span<const SavedTensor> parts;  // of the whole's
  };
  // `slices` follow each other and cover the whole once put_together() has passed.
  struct Whole {
    std::vector<SavedTensor> parts;
    TensorSpec spec;
    std::vector<SavedSlice> slices;
  };
  struct Piece;

  void add(const SavedTensor& tensor);
  void put_together();
  void join_rows(const std::string& name, Whole& whole) const;
  void join_ranges(const std::string& name, Whole& whole) const;
  void find_slices(const std::string& name, Whole& whole) const;
  void require_ranges(const std::string& name, const Whole& whole) const;
  // What holds all elements of the whole from the first to the last of these, or just these.
  [[nodiscard]] static std::vector<Piece> pieces_of(const Whole& whole, const Slice& slice,
                                                    const ElementRange& elements);
  // Calls visit(part, from, elements) for each part with any elements of the piece: which of its
  // own these are.
  template <typename Visit>
  static void for_parts(const Piece& piece, const Visit& visit);
  [[nodiscard]] const Whole* whole(const std::string& name) const;
  // Elements of the whole from `first` on.
  void read_range(const Whole& whole, std::int64_t first, std::span<float> into);
  void read_by_pieces(const Whole& whole, std::span<const Share> shares);
  void read_piece(const Piece& piece, std::span<float> into);
  void read_tensor(const SavedTensor& part, std::int64_t first, std::span<float> into);

  std::filesystem::path directory_;
  bool local_ = false, masters_ = false;
  std::map<std::string, Whole> by_name_;
  std::map<std::string, SafetensorsFile> files_;  // those that are open
};

}  // namespace sluice
