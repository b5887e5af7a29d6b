// A directory of saves: DIR/step-<step, 8 digits or more>/ are complete; `.step-*.partial` is one
// that is being written, `.step-*.deleted` one that is being removed.
//
// A save is complete before it gets its name: its files and its directory are synced, it is
// renamed, DIR is synced. Nothing that exists is removed before its successor is durable. Only
// regular files with names that Sluice gives (is_save_file_name(), state.json, their `.partial`) in
// real directories are ever deleted. Whatever else has a name that Sluice needs is set aside: it
// becomes `step-<step>.kept-1` (or -2, ...) and is never looked at again. `lines` of the functions
// below gets a line for people about each such event and about what cannot be removed.
//
// find_visibility() is collective; one process calls the others. Every function throws Error(kIo)
// that names the path and the cause, unless it says otherwise.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/group/collectives.hpp"
#include "runtime/checkpoint/save_state.hpp"

namespace sluice {

// Begins the name of an empty file by which hosts find out whether they see the same directory.
inline constexpr std::string_view kVisiblePrefix = ".visible-";

// A step-* directory with a state.json that parses and is of that step; or a complete save that a
// kill left without its name, if it is newer than all that have one.
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

// The name that a save has in DIR, or gets there: "step-00000004" of DIR/.step-00000004.partial
// too.
[[nodiscard]] std::string save_name(const std::filesystem::path& save);

// Lists DIR; an absent DIR has no saves. Reads state.json of every step, no tensors. Changes
// nothing.
[[nodiscard]] SaveScan scan_saves(const std::filesystem::path& directory);

// What `--resume DIR`, `generate DIR` and the like mean: a step's directory (by its name, or by
// a state.json where it holds no steps) alone, else all of DIR's. Throws Error(kWeights) where DIR
// is something else than a directory.
struct SaveSelection {
  std::vector<Save> candidates;  // the newest first
  std::vector<std::string> broken;
  bool one_step = false;  // the path is a step's directory
};
[[nodiscard]] SaveSelection select_saves(const std::filesystem::path& path);
// The first candidate with optimizer state; the first where none has it. Requires a candidate.
[[nodiscard]] const Save& newest_resumable(const SaveSelection& selection);
// The newest candidate's directory, or DIR where it holds a config.json or weights. Throws
// Error(kWeights) where there is none, saying what is there instead. For reading weights (generate,
// digest).
[[nodiscard]] std::filesystem::path newest_save(const std::filesystem::path& path);

// Creates DIR where it is missing. If scan_saves() finds the newest save without its name, it gets
// that. Other remains of cut saves and removals go. Returns lines for people; what cannot be
// removed is only a line.
[[nodiscard]] std::vector<std::string> open_save_directory(const std::filesystem::path& directory);

// Whether DIR has names of what cut saves, removals and starts leave. Changes nothing.
[[nodiscard]] bool has_leftovers(const std::filesystem::path& directory);

// Creates an empty `.step-*.partial` for `step`, and returns its path. One that is there is
// cleared.
[[nodiscard]] std::filesystem::path begin_save(const std::filesystem::path& directory,
                                               std::uint64_t step, std::vector<std::string>& lines);
// Writes state.json into `partial`, syncs, renames it to its step's name (an older save of the same
// step goes after), syncs DIR, replaces DIR/latest. All files of
// `state` are there, complete and synced. A DIR/latest that is not Sluice's stays.
void publish_save(const std::filesystem::path& directory, const std::filesystem::path& partial,
                  const SaveState& state, std::vector<std::string>& lines);
// Removes the unpublished `partial`.
void abandon_save(const std::filesystem::path& partial);

struct Retention {
  std::string run = {};            // whose saves these are
  int keep = 2;                    // newest saves that stay; at least 1; exports count apart
  std::uint64_t keep_every = 0;    // saves of steps that are multiples stay as well; 0: none
  bool remove_other_runs = false;  // else the saves of other runs stay
  std::vector<std::filesystem::path> damaged = {};  // saves that do not count
};
// After publish_save(): removes the older saves. A save that cannot be removed is only a line.
void prune_saves(const std::filesystem::path& directory, const Retention& retention,
                 std::vector<std::string>& lines);

// Replaces a text file that is there for people. False, and nothing is written, where the path has
// something that is no regular file, or a text for which is_own() is false. Throws Error(kIo).
bool write_for_people(const std::filesystem::path& path, const std::string& text,
                      const std::function<bool(std::string_view)>& is_own);

// Whether all hosts see DIR of rank 0. `hosts`: of each rank.
struct Visibility {
  std::string problem;        // why rank 0 cannot make a file there; else empty
  std::vector<double> after;  // seconds until a rank's host saw it, by its first rank; the others
                              // have 0. -1: not within `patience`
};
// Collective. Rank 0 makes a file in DIR, the first rank of every host looks for it, and it goes.
[[nodiscard]] Visibility find_visibility(Collectives& world, const std::vector<std::string>& hosts,
                                         const std::filesystem::path& directory,
                                         double patience = 10);

// Throws Error(kIo) where the file system of DIR, which may not be there yet, has less than `bytes`
// (and a reserve of 1 MiB) free for this process, with all three numbers.
void require_space(const std::filesystem::path& directory, std::uint64_t bytes);

}  // namespace sluice
