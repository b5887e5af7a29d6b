// The files of a save, written with their hashes: which rank writes which, tensors, indices.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/parameter.hpp>

#include "comm/group/topology.hpp"
#include "runtime/checkpoint/save_state.hpp"
#include "runtime/weights/weights.hpp"

namespace sluice {

// Which of the job's ranks write a file of one kind, and which part is whose: by rank of the
// pipeline, then replica, then tensor rank.
struct SaveParts {
  std::vector<int> part_of_rank;  // [rank of the job], -1: writes none
  int count = 0;

  // The name of a rank's file, which is to write one.
  [[nodiscard]] std::string file_name(const std::string& kind, int rank) const {
    return weights_file_name(kind, part_of_rank[static_cast<std::size_t>(rank)], count);
  }
};
// `tensors`: how many of the kind each rank of the job saves; one with none writes no file.
[[nodiscard]] SaveParts save_parts(const std::vector<int>& tensors, const Topology& topology);

// A tensor of a save's file: where it is listed and where its values come from.
struct SaveTensor {
  SavedTensor listed;  // without the file
  std::function<std::span<const std::byte>(std::vector<std::byte>& scratch)> bytes;
};
[[nodiscard]] SaveTensor save_tensor(const NamedTensor& named);
// The parts of a parameter of f32, which outlives them, in type `dtype`.
void add_parts(const NamedTensor& parameter, const FileLayout& layout, DType dtype,
               std::vector<SaveTensor>& tensors);

// Writes `tensors` to the file `name` of `directory`, and adds the file and its tensors to `state`.
// Throws Error(kIo) naming the file.
void write_save_file(const std::filesystem::path& directory, const std::string& name,
                     std::span<const SaveTensor> tensors,
                     const std::map<std::string, std::string>& metadata, SaveState& state);
// The same for a file that holds no tensors.
void write_save_text(const std::filesystem::path& directory, const std::string& name,
                     std::string_view text, SaveState& state);

// Writes the index of one kind of weights ("model" or "optimizer") where `state` has several files
// of it, and adds the index to `state`.
void write_save_index(const std::filesystem::path& directory, const std::string& kind,
                      SaveState& state);

}  // namespace sluice
