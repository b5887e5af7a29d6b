// The save that `--resume` goes on from, as far as it is read before MPI starts: no tensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <sluice/data.hpp>

#include "comm/group/communicator.hpp"
#include "runtime/checkpoint/save_state.hpp"
#include "runtime/program/options/option_table.hpp"

namespace sluice {

struct SavedRun {
  std::filesystem::path directory;  // of the save
  std::filesystem::path root;       // the directory of saves that holds it
  std::string run;                  // CheckpointOptions::run of the runs that go on from it
  std::uint64_t step = 0;
  OptionValues options;  // as saved; empty where a program other than `sluice train` saved
  OptionValues data;     // data_identity() at the save; may be empty
  std::vector<std::string> arithmetic;  // SaveState's
  int ranks = 0, virtual_replicas = 0;  // of the job that saved; 0: not known
  int tensor_shards = 1;
  GradientOrder gradient_order = GradientOrder::kStep;
};

// The newest save of `path`, which is a directory of saves or one step's directory. Nothing where
// it holds no save. Throws Error(kWeights) where all that it holds is broken, or where the newest
// save has weights only.
[[nodiscard]] std::optional<SavedRun> find_saved_run(const std::filesystem::path& path);

// Collective. Calls `body` with the directory of the newest save of a path, as newest_save() finds
// it on rank 0. Where `body` throws and that save is gone, a job that saves there has removed it:
// then `body` is called with the next one. `body` throws on all ranks or on none.
void with_newest_save(const std::filesystem::path& path, Communicator& world,
                      const std::function<void(const std::filesystem::path& save)>& body);
// What one save's directory records; of another program's directory, nothing.
[[nodiscard]] SaveState saved_state(const std::filesystem::path& save);

// What training on `file` depends on: the number of tokens and a hash of them, not its path.
[[nodiscard]] OptionValues data_identity(const TokenFile& file);

// "tokens 4000 -> 5000, sha256 ..": what differs in `now`. Empty where nothing does, or where
// one of the two is empty.
[[nodiscard]] std::string data_difference(const OptionValues& saved, const OptionValues& now);

}  // namespace sluice
