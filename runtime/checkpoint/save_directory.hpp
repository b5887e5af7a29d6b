// A directory of saves: DIR/step-<step, 8 digits or more>/ are complete; `.step-*.partial` is one
// that is being written, `.step-*.deleted` one that is being removed. One process calls this.
//
// A save is complete before it gets its name: its files and its directory are synced, it is
// renamed, DIR is synced. Nothing that exists is removed before its successor is durable. Only
// files with names that Sluice gives (is_save_file_name(), state.json, their `.partial`) are ever
// deleted; a directory that holds others stays, with them.
//
// Every function throws Error(kIo) that names the path and the cause, unless it says otherwise.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/checkpoint/save_state.hpp"

namespace sluice {

// Begins the name of an empty file by which hosts find out whether they see the same directory.
inline constexpr std::string_view kVisiblePrefix = ".visible-";

// A step-* directory with a state.json that parses and is of that step.
struct Save {
  std::filesystem::path directory;
  SaveState state;
};

struct SaveScan {
  std::vector<Save> saves;          // the newest (largest sequence) first
  std::vector<std::string> broken;  // step-* directories without such a state.json: why
};

// "step-00001200".
[[nodiscard]] std::string step_directory_name(std::uint64_t step);

// Lists DIR; an absent DIR has no saves. Reads state.json of every step, no tensors. Changes
// nothing.
[[nodiscard]] SaveScan scan_saves(const std::filesystem::path& directory);

// What `--resume DIR`, `generate DIR` and the like mean: a step's directory (by a state.json of
// format 2, or by its name) alone, else all of DIR's. `of_0_1`: files of version 0.1 lie directly
// in DIR.
struct SaveSelection {
  std::vector<Save> candidates;  // the newest first
  std::vector<std::string> broken;
  bool one_step = false;  // the path is a step's directory
  bool of_0_1 = false;    // no candidates: DIR itself holds a save of version 0.1
};
[[nodiscard]] SaveSelection select_saves(const std::filesystem::path& path);
// The newest candidate's directory, or DIR where it is of version 0.1. Throws Error(kWeights) where
// there is none, saying what is there instead. For reading weights (generate, digest).
[[nodiscard]] std::filesystem::path newest_save(const std::filesystem::path& path);

// Creates DIR where it is missing, removes what cut saves and removals left, and returns the names
// of what it removed.
std::vector<std::string> open_save_directory(const std::filesystem::path& directory);

// Creates an empty `.step-*.partial` for `step`, and returns its path. One that is there is
// cleared.
[[nodiscard]] std::filesystem::path begin_save(const std::filesystem::path& directory,
                                               std::uint64_t step);
// Writes state.json into `partial`, syncs, renames it to its step's name (an older save of the same
// step is replaced: exchanged first, removed after), syncs DIR, replaces DIR/latest. All files of
// `state` are there, complete and synced.
void publish_save(const std::filesystem::path& directory, const std::filesystem::path& partial,
                  const SaveState& state);
// Removes the unpublished `partial`.
void abandon_save(const std::filesystem::path& partial);

struct Retention {
  int keep = 2;                  // newest saves that stay; at least 1
  std::uint64_t keep_every = 0;  // saves of steps that are multiples stay as well; 0: none
  std::string only_run = {};     // not empty: saves of all other runs are removed (--overwrite)
};
// After publish_save(): removes the older saves. A save that cannot be removed is no error: returns
// one line for each.
std::vector<std::string> prune_saves(const std::filesystem::path& directory,
                                     const Retention& retention);

// Throws Error(kIo) where the file system of DIR has less than `bytes` (and a reserve of 1 MiB)
// free for this process, with both numbers.
void require_space(const std::filesystem::path& directory, std::uint64_t bytes);

}  // namespace sluice
