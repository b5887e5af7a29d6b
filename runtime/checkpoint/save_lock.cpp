#include "runtime/checkpoint/save_lock.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>

#include <sluice/error.hpp>

#include "comm/base/host.hpp"
#include "comm/base/threads.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/files/sha256.hpp"
#include "runtime/files/utc_text.hpp"

namespace sluice {
namespace fs = std::filesystem;
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::time_t kLatest = 253402300799;  // the last second of the year 9999

struct Holder {
  std::string host;
  std::string place;  // what its process id is one of: a machine since its start, and a namespace
  std::int64_t process = 0;
  std::uint64_t started = 0;  // of the process, in the kernel's ticks
  std::int64_t since = 0;     // Unix time
  std::string id;             // of the lock
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Holder, host, place, process, started, since, id)

// Empty where there is no such file.
std::string text_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Fields 3 and 22 of /proc/PID/stat; a name before them may hold anything but ends with the last
// ')'. 0 for a process that is gone, also one that its parent has not waited for (state Z or X).
std::uint64_t start_of(std::int64_t process) {
  const std::string stat = text_of(fmt::format("/proc/{}/stat", process));
  char state = 'X';
  unsigned long long ticks = 0;
  std::sscanf(stat.c_str() + std::min(stat.size(), stat.rfind(')')),
              ") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
              &state, &ticks);
  return state == 'Z' || state == 'X' ? 0 : ticks;
}

Holder this_process() {
  std::error_code error;
  const std::string space = fs::read_symlink("/proc/self/ns/pid", error).string();
  const std::int64_t me = ::getpid();
  return {host_name(),  machine_id() + " " + space, me,
          start_of(me), std::time(nullptr),         random_id()};
}

Holder holder_in(const std::string& text) {
  const nlohmann::json json = parse_json(text, NoJson::kDiscard);
  try {
    return json.get<Holder>();
  } catch (const nlohmann::json::exception&) {
    return {};
  }
}

std::string describe(const Holder& holder) {
  if (holder.host.empty()) return "a process that left no name";
  return fmt::format(
      "process {} on host '{}' since {} UTC", holder.process, holder.host,
      utc_text(std::clamp<std::time_t>(holder.since, 0, kLatest), "%Y-%m-%d %H:%M:%S"));
}

// Whether the process can be seen to live, or else the lock is renewed within `watch`.
bool is_alive(const fs::path& path, const Holder& holder, const Holder& me,
              std::chrono::milliseconds watch,
              const std::function<void(const std::string&)>& note) {
  if (holder.place == me.place) return start_of(holder.process) == holder.started;
  if (note) {
    note(fmt::format("'{}' is held by {}; waiting {} s to see whether it is still there",
                     path.string(), describe(holder),
                     std::chrono::duration_cast<std::chrono::seconds>(watch).count()));
  }
  std::error_code error;
  const fs::file_time_type before = fs::last_write_time(path, error);
  const auto deadline = Clock::now() + watch;
  while (Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const fs::file_time_type now = fs::last_write_time(path, error);
    if (error || now != before) return !error;  // released or renewed meanwhile
  }
  return false;
}

// Makes the lock. False where there is one; else throws Error(kIo).
bool create(const fs::path& path, const std::string& text) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0 && errno == EEXIST) return false;
  const ::ssize_t written = fd < 0 ? -1 : ::write(fd, text.data(), text.size());
  const bool whole = written == static_cast<::ssize_t>(text.size());
  const int error = written < 0 ? errno : ENOSPC;
  if (fd >= 0) ::close(fd);
  if (whole) return true;
  if (fd >= 0) ::unlink(path.c_str());
  throw_error(ErrorCode::kIo, "cannot write '{}': {}", path.string(),
              std::generic_category().message(error));
}

// Removes the lock if it still has this text. The kernel's lock on the file keeps two that do so
// from removing what another job has made in between.
void remove(const fs::path& path, const std::string& text) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) return;
  if (fd >= 0) ::flock(fd, LOCK_EX);  // where the file system has no such locks, the check remains
  struct stat opened = {}, named = {};
  bool removed = fd >= 0;
  if (removed && ::fstat(fd, &opened) == 0 && ::stat(path.c_str(), &named) == 0 &&
      opened.st_ino == named.st_ino && text_of(path) == text) {
    removed = ::unlink(path.c_str()) == 0;
  }
  const int error = errno;
  if (fd >= 0) ::close(fd);
  if (removed) return;
  throw_error(ErrorCode::kIo, "cannot remove the stale lock '{}': {}", path.string(),
              std::generic_category().message(error));
}

}  // namespace

SaveLock::SaveLock(const fs::path& directory, std::chrono::milliseconds watch,
                   const std::function<void(const std::string&)>& note)
    : path_(directory / "lock") {
  const Holder me = this_process();
  text_ = dump_json(nlohmann::json(me), -1, InvalidUtf8::replace) + "\n";
  while (!create(path_, text_)) {
    std::error_code error;
    const fs::file_status there = fs::symlink_status(path_, error);
    if (!fs::exists(there)) continue;   // released meanwhile
    if (!fs::is_regular_file(there)) {  // a pipe would block who reads it
      throw_error(ErrorCode::kIo,
                  "'{}' is no file; a directory of saves needs that name for its lock",
                  path_.string());
    }
    const std::string theirs = text_of(path_);
    if (is_alive(path_, holder_in(theirs), me, watch, note)) {
      throw_error(ErrorCode::kIo,
                  "directory '{}' is in use by {}; two jobs cannot save into one directory",
                  directory.string(), describe(holder_in(text_of(path_))));
    }
    remove(path_, theirs);
  }
  thread_ = start_thread<std::jthread>("lock of the saves",
                                       [this](const std::stop_token& stop) { renew(stop); });
}

SaveLock::~SaveLock() {
  thread_.request_stop();
  thread_.join();
  try {
    remove(path_, text_);
  } catch (const Error&) {  // stale soon
  }
}

void SaveLock::renew(const std::stop_token& stop) const {
  while (!stopped_within(stop, kRenew)) {
    std::error_code ignored;
    fs::last_write_time(path_, fs::file_time_type::clock::now(), ignored);
  }
}

void SaveLock::require_held() const {
  const std::string text = text_of(path_);
  if (text == text_) return;
  throw_error(ErrorCode::kIo, "'{}' is {}; this job no longer saves there", path_.string(),
              text.empty() ? "gone" : "held by " + describe(holder_in(text)));
}

}  // namespace sluice
