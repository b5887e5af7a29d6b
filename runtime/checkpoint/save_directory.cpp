#include "runtime/checkpoint/save_directory.hpp"

#include <fmt/core.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <iterator>
#include <set>
#include <system_error>
#include <thread>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/steady_seconds.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/checkpoint/verify.hpp"
#include "runtime/files/atomic_file.hpp"
#include "runtime/files/sha256.hpp"
#include "runtime/files/writable.hpp"
#include "runtime/weights/weights.hpp"

namespace sluice {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kStep = "step-", kPartial = ".partial", kDeleted = ".deleted";

[[noreturn]] void fail(const std::string& what, const fs::path& path, const std::string& cause) {
  throw_error(ErrorCode::kIo, "cannot {} '{}': {}", what, path.string(), cause);
}

void require(const std::error_code& error, const std::string& what, const fs::path& path) {
  if (error) fail(what, path, error.message());
}

bool is_step_name(std::string_view name) {
  return name.starts_with(kStep) && name.size() >= kStep.size() + 8 &&
         name.find_first_not_of("0123456789", kStep.size()) == std::string_view::npos;
}

// ".step-00000012.partial" or ".deleted".
bool is_leftover_name(std::string_view name) {
  for (const std::string_view end : {kPartial, kDeleted}) {
    if (name.starts_with(".") && name.ends_with(end) &&
        is_step_name(name.substr(1, name.size() - 1 - end.size()))) {
      return true;
    }
  }
  return false;
}

// A file that a start or a save of a job that was killed did not finish.
bool is_unfinished_file(std::string_view name) {
  return name == "latest.partial" || name == "options.conf.partial" ||
         name.starts_with(kVisiblePrefix) || name.starts_with(kWritablePrefix);
}

bool is_own_file(std::string_view name) {
  if (name.ends_with(kPartial)) name.remove_suffix(kPartial.size());
  return name == "state.json" || is_save_file_name(name);
}

// Throws Error(kWeights) as read_save_state() does, and where a directory has another step's name.
SaveState read_step(const fs::path& directory, std::string_view name) {
  SaveState state = read_save_state(directory);
  if (is_step_name(name) && name != step_directory_name(state.step)) {
    throw_error(ErrorCode::kWeights, "'{}' is damaged: it is of step {}",
                (directory / "state.json").string(), state.step);
  }
  return state;
}

// Names in `directory`; none where it does not exist.
std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entry(directory, error);
  if (error == std::errc::no_such_file_or_directory) return names;
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  require(error, "list directory", directory);
  std::sort(names.begin(), names.end());
  return names;
}

bool is_real_directory(const fs::path& path) {
  std::error_code error;
  return fs::is_directory(fs::symlink_status(path, error));
}

bool name_exists(const fs::path& path) {
  std::error_code error;
  return fs::exists(fs::symlink_status(path, error));
}

// Whether it is a directory of Sluice's files alone, with a state.json.
bool is_own_save(const fs::path& directory) {
  if (!is_real_directory(directory)) return false;
  const std::vector<std::string> names = names_in(directory);
  return std::find(names.begin(), names.end(), "state.json") != names.end() &&
         std::all_of(names.begin(), names.end(), [&](const std::string& name) {
           std::error_code error;
           return is_own_file(name) &&
                  fs::is_regular_file(fs::symlink_status(directory / name, error));
         });
}

// Gives a name of its own to what Sluice did not write but whose name it needs. Returns a line that
// says so.
std::string set_aside(const fs::path& path) {
  const std::string step = save_name(path);
  fs::path kept;
  int number = 0;
  do {
    kept = path.parent_path() / fmt::format("{}.kept-{}", step, ++number);
  } while (name_exists(kept));
  rename_durably(path, kept);
  return fmt::format("'{}' holds what Sluice did not write: it is '{}' now", path.string(),
                     kept.filename().string());
}

// Removes Sluice's files in a directory, then the directory. What is not Sluice's is set aside;
// then returns the line that says so. A name that is no directory is set aside as it is.
std::string remove_save(const fs::path& directory) {
  if (!is_real_directory(directory)) return set_aside(directory);
  std::error_code error;
  bool foreign = false;
  for (const std::string& name : names_in(directory)) {
    const fs::path path = directory / name;
    if (is_own_file(name) && fs::is_regular_file(fs::symlink_status(path, error))) {
      fs::remove(path, error);
      require(error, "remove", path);
    } else {
      foreign = true;
    }
  }
  if (foreign) return set_aside(directory);
  fs::remove(directory, error);
  require(error, "remove directory", directory);
  return "";
}

// A name for a save that is being removed.
fs::path name_for_removal(const fs::path& step) {
  return step.parent_path() / fmt::format(".{}{}", step.filename().string(), kDeleted);
}

void add_line(std::vector<std::string>& lines, std::string line) {
  if (!line.empty()) lines.push_back(std::move(line));
}

// The save loses its name before its files go, so that what has a name is complete.
void retire_save(const fs::path& step, std::vector<std::string>& lines) {
  if (!is_real_directory(step)) return add_line(lines, set_aside(step));
  const fs::path away = name_for_removal(step);
  if (name_exists(away)) add_line(lines, remove_save(away));
  rename_durably(step, away);
  add_line(lines, remove_save(away));
}

// What has the step's name already is an older save of that step, or is set aside.
void give_name(const fs::path& partial, const fs::path& step, std::vector<std::string>& lines) {
  if (name_exists(step) && !is_own_save(step)) add_line(lines, set_aside(step));
  if (!name_exists(step)) return rename_durably(partial, step);
  // Between the two renames both saves are complete without a name; open_save_directory() gives the
  // newer one its name back.
  const fs::path away = name_for_removal(step);
  if (name_exists(away)) add_line(lines, remove_save(away));
  rename_durably(step, away);
  rename_durably(partial, step);
  add_line(lines, remove_save(away));
}

// The state of a complete save that lost its step's name, or never got it, to a kill.
std::optional<SaveState> unnamed_save(const fs::path& leftover) {
  if (!is_own_save(leftover)) return std::nullopt;
  try {
    SaveState state = read_step(leftover, save_name(leftover));
    require_complete(leftover, state);
    return state;
  } catch (const Error&) {
    return std::nullopt;
  }
}

// Gives the newest save its name back.
void name_unnamed_save(const fs::path& directory, std::vector<std::string>& lines) {
  const SaveScan scan = scan_saves(directory);
  if (scan.saves.empty()) return;
  const fs::path& newest = scan.saves.front().directory;
  const std::string name = save_name(newest);
  if (newest.filename() == name) return;
  rename_durably(newest, directory / name);
  lines.push_back(
      fmt::format("'{}' is complete: it is '{}' now", newest.filename().string(), name));
}

}  // namespace

bool write_for_people(const fs::path& path, const std::string& text,
                      const std::function<bool(std::string_view)>& is_own) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (fs::exists(status)) {
    if (!fs::is_regular_file(status)) return false;
    std::ifstream in(path, std::ios::binary);
    const std::string present(std::istreambuf_iterator<char>(in), {});
    if (!present.empty() && !is_own(present)) return false;
  }
  write_file(path, text);
  return true;
}

std::string step_directory_name(std::uint64_t step) { return fmt::format("{}{:08}", kStep, step); }

SaveScan scan_saves(const fs::path& directory) {
  SaveScan scan;
  // A job that saves there may remove all that was listed, each time after it has saved anew.
  constexpr int kAttempts = 10;
  bool gone = true;
  for (int attempt = 0; attempt < kAttempts && gone && scan.saves.empty(); ++attempt) {
    scan = {};
    gone = false;
    for (const std::string& name : names_in(directory)) {
      if (!is_step_name(name)) continue;
      try {
        scan.saves.push_back({directory / name, read_step(directory / name, name)});
      } catch (const Error& error) {
        std::error_code ignored;
        if (fs::exists(directory / name, ignored)) {
          scan.broken.emplace_back(error.what());
        } else {
          gone = true;
        }
      }
    }
  }
  const auto newer = [](const Save& a, const Save& b) {
    return std::pair(a.state.sequence, a.state.step) > std::pair(b.state.sequence, b.state.step);
  };
  std::sort(scan.saves.begin(), scan.saves.end(), newer);
  const std::uint64_t named = scan.saves.empty() ? 0 : scan.saves.front().state.sequence;
  for (const std::string& name : names_in(directory)) {
    if (!is_leftover_name(name) || name_exists(directory / save_name(name))) continue;
    auto state = unnamed_save(directory / name);
    if (state && state->sequence > named) {
      scan.saves.push_back({directory / name, std::move(*state)});
    }
  }
  std::sort(scan.saves.begin(), scan.saves.end(), newer);
  return scan;
}

std::string save_name(const fs::path& save) {
  const std::string name = save.filename().string();
  return is_leftover_name(name) ? name.substr(1, name.find('.', 1) - 1) : name;
}

SaveSelection select_saves(const fs::path& path) {
  SaveSelection selection;
  std::error_code error;
  if (fs::exists(path, error) && !fs::is_directory(path, error)) {
    throw_error(ErrorCode::kWeights, "'{}' is no directory, so it holds no save", path.string());
  }
  const std::string name = fs::weakly_canonical(path, error).filename().string();
  const bool state = fs::exists(path / "state.json", error);
  SaveScan scan = is_step_name(name) ? SaveScan() : scan_saves(path);
  // A step without state.json is a damaged one. A save may have another name, but has no steps.
  if (is_step_name(name) ? state || has_weights(path, "model")
                         : state && scan.saves.empty() && scan.broken.empty()) {
    selection.one_step = true;
    try {
      selection.candidates.push_back({path, read_step(path, name)});
    } catch (const Error& damage) {
      selection.broken.emplace_back(damage.what());
    }
    return selection;
  }
  selection.candidates = std::move(scan.saves);
  selection.broken = std::move(scan.broken);
  return selection;
}

const Save& newest_resumable(const SaveSelection& selection) {
  const auto found = std::find_if(selection.candidates.begin(), selection.candidates.end(),
                                  [](const Save& save) { return !save.state.weights_only; });
  return found == selection.candidates.end() ? selection.candidates.front() : *found;
}

fs::path newest_save(const fs::path& path) {
  const SaveSelection selection = select_saves(path);
  if (!selection.candidates.empty()) return selection.candidates.front().directory;
  std::error_code error;
  // A model that lacks a part: the reader of config.json says which.
  if (selection.broken.empty() &&
      (fs::exists(path / "config.json", error) || has_weights(path, "model"))) {
    return path;
  }
  throw_error(
      ErrorCode::kWeights,
      "'{}' {}; what 'sluice train --save' wrote, or a directory of Hugging Face, is needed",
      path.string(),
      !selection.broken.empty()
          ? fmt::format("holds no sound save: {}", joined(selection.broken, "; "))
      : fs::exists(path, error) ? "holds no save"
                                : "does not exist");
}

bool has_leftovers(const fs::path& directory) {
  const std::vector<std::string> names = names_in(directory);
  return std::any_of(names.begin(), names.end(), [](const std::string& name) {
    return is_leftover_name(name) || is_unfinished_file(name);
  });
}

std::vector<std::string> open_save_directory(const fs::path& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  require(error, "create directory", directory);
  std::vector<std::string> lines;
  name_unnamed_save(directory, lines);
  for (const std::string& name : names_in(directory)) {
    const bool file = is_unfinished_file(name);
    if (!file && !is_leftover_name(name)) continue;
    try {
      if (file && is_real_directory(directory / name)) continue;  // not Sluice's
      if (file) {
        fs::remove(directory / name, error);
        require(error, "remove", directory / name);
      }
      std::string line = file ? "" : remove_save(directory / name);
      if (line.empty()) line = fmt::format("removed '{}', which a cut save left", name);
      lines.push_back(std::move(line));
    } catch (const Error& stays) {
      lines.emplace_back(stays.what());
    }
  }
  return lines;
}

fs::path begin_save(const fs::path& directory, std::uint64_t step,
                    std::vector<std::string>& lines) {
  const fs::path partial = directory / fmt::format(".{}{}", step_directory_name(step), kPartial);
  std::error_code error;
  if (name_exists(partial)) add_line(lines, remove_save(partial));
  fs::create_directory(partial, error);
  require(error, "create directory", partial);
  return partial;
}

void publish_save(const fs::path& directory, const fs::path& partial, const SaveState& state,
                  std::vector<std::string>& lines) {
  write_file(partial / "state.json", to_json_text(state));
  sync_directory(partial);
  const std::string name = step_directory_name(state.step);
  give_name(partial, directory / name, lines);
  try {
    write_for_people(directory / "latest", name + "\n", [](std::string_view text) {
      return is_step_name(text.substr(0, text.find('\n')));
    });
  } catch (const Error& error) {
    lines.emplace_back(error.what());  // the save itself is complete
  }
}

void abandon_save(const fs::path& partial) {
  if (name_exists(partial)) (void)remove_save(partial);
}

void prune_saves(const fs::path& directory, const Retention& retention,
                 std::vector<std::string>& lines) {
  std::array<int, 2> kept = {0, 0};  // with optimizer state, weights alone
  for (const Save& save : scan_saves(directory).saves) {
    const bool other = save.state.run != retention.run;
    if (other && !retention.remove_other_runs) continue;
    const bool damaged = std::find(retention.damaged.begin(), retention.damaged.end(),
                                   save.directory) != retention.damaged.end();
    int& count = kept[save.state.weights_only ? 1 : 0];
    const bool milestone = retention.keep_every > 0 && save.state.step % retention.keep_every == 0;
    if (!other && (count < retention.keep || (milestone && !damaged))) {
      if (!damaged) ++count;
      continue;
    }
    try {
      retire_save(save.directory, lines);
    } catch (const Error& error) {
      lines.emplace_back(error.what());
    }
  }
}

Visibility find_visibility(Collectives& world, const std::vector<std::string>& hosts,
                           const fs::path& directory, double patience) {
  const int rank = world.communicator().rank();
  const fs::path token =
      directory / world.broadcast_string(std::string(kVisiblePrefix) + random_id(), 0);
  std::string problem;
  try {
    if (rank == 0) write_file(token, "");
  } catch (const Error& error) {
    problem = error.what();
  }
  problem = world.broadcast_string(problem, 0);
  std::error_code error;
  const double start = steady_seconds();
  const bool looks = std::find(hosts.begin(), hosts.end(), hosts[at(rank)]) - hosts.begin() == rank;
  double after = 0;
  // A network file system may show a new name seconds later.
  while (looks && problem.empty() && after >= 0 && !fs::exists(token, error)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    // Opening the directory makes NFS ask its server again.
    (void)fs::directory_iterator(directory, error);
    after = steady_seconds() - start;
    if (after > patience) after = -1;
  }
  Visibility all = {std::move(problem), std::vector<double>(hosts.size())};
  world.all_gather(after, all.after);
  if (rank == 0) fs::remove(token, error);
  return all;
}

void require_space(const fs::path& directory, std::uint64_t bytes) {
  constexpr std::uint64_t kReserve = std::uint64_t{1} << 20;
  struct statvfs info = {};
  if (::statvfs(nearest_existing(directory).c_str(), &info) != 0) {
    fail("look at the file system of", directory, std::generic_category().message(errno));
  }
  const std::uint64_t free = std::uint64_t{info.f_bavail} * info.f_frsize;
  if (free >= bytes + kReserve) return;
  throw_error(ErrorCode::kIo,
              "a save into '{}' takes {:.1f} MiB and leaves {} MiB free, but its file system has "
              "{:.1f} MiB free",
              directory.string(), static_cast<double>(bytes) / (1 << 20), kReserve >> 20,
              static_cast<double>(free) / (1 << 20));
}

}  // namespace sluice
