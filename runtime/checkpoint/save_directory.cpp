#include "runtime/checkpoint/save_directory.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/checkpoint/weights.hpp"
#include "runtime/files/atomic_file.hpp"
#include "runtime/files/durable.hpp"
#include "runtime/files/writable.hpp"

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

// A file that a start or a save of a job that was killed did not finish. Only the lock's holder
// calls this; a job that still drafts its own lock tries again.
bool is_unfinished_file(std::string_view name) {
  return name == "latest.partial" || name == "options.conf.partial" ||
         name.starts_with(kVisiblePrefix) || name.starts_with(kWritablePrefix) ||
         (name.starts_with(".lock.") && name.ends_with(kPartial));
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

// Removes Sluice's files, then the directory. Returns the first name that is not Sluice's, which
// stays with the directory.
std::string remove_save(const fs::path& directory) {
  std::error_code error;
  std::string foreign;
  for (const std::string& name : names_in(directory)) {
    const fs::path path = directory / name;
    if (is_own_file(name) && fs::is_regular_file(fs::symlink_status(path, error))) {
      fs::remove(path, error);
      require(error, "remove", path);
    } else if (foreign.empty()) {
      foreign = name;
    }
  }
  if (!foreign.empty()) return foreign;
  fs::remove(directory, error);
  require(error, "remove directory", directory);
  return "";
}

// A free name for a save that is being removed.
fs::path name_for_removal(const fs::path& step) {
  return step.parent_path() / fmt::format(".{}{}", step.filename().string(), kDeleted);
}

// The save loses its name before its files go, so that what has a name is complete.
std::string retire_save(const fs::path& step) {
  const fs::path away = name_for_removal(step);
  std::error_code error;
  if (fs::exists(fs::symlink_status(away, error))) {
    if (const std::string foreign = remove_save(away); !foreign.empty()) {
      return fmt::format("'{}' holds '{}', which Sluice did not write; it stays", away.string(),
                         foreign);
    }
  }
  rename_durably(step, away);
  const std::string foreign = remove_save(away);
  if (foreign.empty()) return "";
  return fmt::format("'{}' holds '{}', which Sluice did not write; it stays", away.string(),
                     foreign);
}

// Exchanges two names at once where the file system can.
bool exchange(const fs::path& a, const fs::path& b) {
#ifdef RENAME_EXCHANGE
  return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
#else
  return false;
#endif
}

void give_name(const fs::path& partial, const fs::path& step) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(step, error))) {
    rename_durably(partial, step);
    return;
  }
  if (exchange(partial, step)) {
    sync_directory(step.parent_path());
    (void)remove_save(partial);
    return;
  }
  const fs::path away = name_for_removal(step);
  if (fs::exists(fs::symlink_status(away, error))) (void)remove_save(away);
  rename_durably(step, away);
  rename_durably(partial, step);
  (void)remove_save(away);
}

bool has_0_1_files(const fs::path& directory) {
  std::error_code error;
  if (fs::is_regular_file(directory / "state.json", error)) {
    std::ifstream in(directory / "state.json");
    const nlohmann::json state = nlohmann::json::parse(in, nullptr, false);
    return state.is_object() && state.contains("format") && state["format"] == 1;
  }
  return has_weights(directory, "model");
}

void write_text(const fs::path& path, const std::string& text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace

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
  std::sort(scan.saves.begin(), scan.saves.end(), [](const Save& a, const Save& b) {
    return std::pair(a.state.sequence, a.state.step) > std::pair(b.state.sequence, b.state.step);
  });
  return scan;
}

SaveSelection select_saves(const fs::path& path) {
  SaveSelection selection;
  std::error_code error;
  const std::string name = fs::weakly_canonical(path, error).filename().string();
  const bool state = fs::exists(path / "state.json", error);
  // A step without state.json is a damaged one, and not of version 0.1.
  const bool stripped = is_step_name(name) && !state && has_weights(path, "model");
  if (stripped || (state && (is_step_name(name) || !has_0_1_files(path)))) {
    selection.one_step = true;
    try {
      selection.candidates.push_back({path, read_step(path, name)});
    } catch (const Error& damage) {
      selection.broken.emplace_back(damage.what());
    }
    return selection;
  }
  SaveScan scan = scan_saves(path);
  selection.candidates = std::move(scan.saves);
  selection.broken = std::move(scan.broken);
  selection.of_0_1 =
      selection.candidates.empty() && selection.broken.empty() && has_0_1_files(path);
  return selection;
}

fs::path newest_save(const fs::path& path) {
  const SaveSelection selection = select_saves(path);
  if (selection.of_0_1) return path;
  if (!selection.candidates.empty()) return selection.candidates.front().directory;
  std::error_code error;
  throw_error(ErrorCode::kWeights, "'{}' {}; what 'sluice train --save' wrote is needed",
              path.string(),
              !selection.broken.empty()
                  ? fmt::format("holds no sound save: {}", fmt::join(selection.broken, "; "))
              : fs::exists(path, error) ? "holds no save"
                                        : "does not exist");
}

std::vector<std::string> open_save_directory(const fs::path& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  require(error, "create directory", directory);
  std::vector<std::string> removed;
  for (const std::string& name : names_in(directory)) {
    if (is_unfinished_file(name)) {
      fs::remove(directory / name, error);
      require(error, "remove", directory / name);
      removed.push_back(name);
    }
    if (!is_leftover_name(name)) continue;
    if (remove_save(directory / name).empty()) removed.push_back(name);
  }
  return removed;
}

fs::path begin_save(const fs::path& directory, std::uint64_t step) {
  const fs::path partial = directory / fmt::format(".{}{}", step_directory_name(step), kPartial);
  std::error_code error;
  if (fs::exists(fs::symlink_status(partial, error))) {
    if (const std::string foreign = remove_save(partial); !foreign.empty()) {
      fail("write into", partial, fmt::format("it holds '{}'", foreign));
    }
  }
  fs::create_directory(partial, error);
  require(error, "create directory", partial);
  return partial;
}

void publish_save(const fs::path& directory, const fs::path& partial, const SaveState& state) {
  write_text(partial / "state.json", to_json_text(state));
  sync_directory(partial);
  const std::string name = step_directory_name(state.step);
  give_name(partial, directory / name);
  write_text(directory / "latest", name + "\n");
}

void abandon_save(const fs::path& partial) {
  std::error_code error;
  if (fs::exists(partial, error)) (void)remove_save(partial);
}

std::vector<std::string> prune_saves(const fs::path& directory, const Retention& retention) {
  std::vector<std::string> warnings;
  const auto retire = [&](const fs::path& step) {
    try {
      std::string warning = retire_save(step);
      if (!warning.empty()) warnings.push_back(std::move(warning));
    } catch (const Error& error) {
      warnings.emplace_back(error.what());
    }
  };
  int kept = 0;
  for (const Save& save : scan_saves(directory).saves) {
    const bool other = !retention.only_run.empty() && save.state.run != retention.only_run;
    const bool milestone = retention.keep_every > 0 && save.state.step % retention.keep_every == 0;
    if (!other && (kept < retention.keep || milestone)) {
      ++kept;
    } else {
      retire(save.directory);
    }
  }
  return warnings;
}

void require_space(const fs::path& directory, std::uint64_t bytes) {
  constexpr std::uint64_t kReserve = std::uint64_t{1} << 20;
  struct statvfs info = {};
  if (::statvfs(directory.c_str(), &info) != 0) {
    fail("look at the file system of", directory, std::generic_category().message(errno));
  }
  const std::uint64_t free = std::uint64_t{info.f_bavail} * info.f_frsize;
  if (free >= bytes + kReserve) return;
  throw_error(ErrorCode::kIo,
              "a save into '{}' takes {:.1f} MiB, but its file system has {:.1f} MiB free",
              directory.string(), static_cast<double>(bytes + kReserve) / (1 << 20),
              static_cast<double>(free) / (1 << 20));
}

}  // namespace sluice
