// The files of a save, written with their hashes: which rank writes which, tensors, indices.
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "comm/group/topology.hpp"
#include "runtime/checkpoint/save_state.hpp"
#include "runtime/checkpoint/weights.hpp"
#include "runtime/layout/save_shares.hpp"

namespace sluice {

// Which of the job's ranks write, and which part is whose: by rank of the pipeline, then replica.
struct SaveParts {
  std::vector<int> part_of_rank;  // [rank of the job], -1: saves nothing
  int count = 0;
};
[[nodiscard]] SaveParts save_parts(const std::vector<SavedParameter>& shares,
                                   const Topology& topology);

// Writes `tensors` to the file `name` of `directory`, and adds the file and its tensors to `state`.
// Throws Error(kIo) naming the file.
void write_save_file(const std::filesystem::path& directory, const std::string& name,
                     std::span<const NamedTensor> tensors,
                     const std::map<std::string, std::string>& metadata, SaveState& state);

// Writes the index of one kind of weights ("model" or "optimizer") where `state` has several files
// of it, and adds the index to `state`.
void write_save_index(const std::filesystem::path& directory, const std::string& kind,
                      SaveState& state);

}  // namespace sluice
