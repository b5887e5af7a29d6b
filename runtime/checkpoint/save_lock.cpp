#include "runtime/checkpoint/save_lock.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <thread>

#include <sluice/error.hpp>

#include "comm/base/host.hpp"
#include "comm/base/threads.hpp"
#include "comm/base/throw_error.hpp"

namespace sluice {
namespace fs = std::filesystem;
namespace {

using Clock = std::chrono::steady_clock;

struct Holder {
  std::string host, boot, pid_namespace, job, restart;
  std::int64_t process = 0;
  std::uint64_t started = 0;  // of the process, in the kernel's ticks
  std::int64_t since = 0;     // Unix time
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Holder, host, boot, pid_namespace, job, restart, process,
                                   started, since)

std::string read_text(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  constexpr std::size_t kMost = 4096;
  std::string text(kMost, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(in.gcount()));
  return text;
}

// Field 22 of /proc/PID/stat; the name before it may hold anything but ends with the last ')'. 0
// for a process that is gone, also one that its parent has not waited for (state Z or X).
std::uint64_t start_of(std::int64_t process) {
  std::string stat = read_text(fmt::format("/proc/{}/stat", process));
  stat.erase(0, std::min(stat.size(), stat.rfind(')') + 2));
  if (stat.starts_with('Z') || stat.starts_with('X')) return 0;
  std::size_t at = 0;
  constexpr int kFieldsBefore = 19;  // from field 3 on
  for (int field = 0; field < kFieldsBefore && at != std::string::npos; ++field) {
    at = stat.find(' ', at);
    if (at != std::string::npos) ++at;
  }
  return at == std::string::npos ? 0 : std::strtoull(stat.c_str() + at, nullptr, 10);
}

std::string variable(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const char* value = std::getenv(name);
    if (value != nullptr && *value != '\0') return value;
  }
  return "";
}

Holder this_process() {
  Holder me;
  me.host = host_name();
  me.boot = machine_id();
  std::error_code error;
  me.pid_namespace = fs::read_symlink("/proc/self/ns/pid", error).string();
  me.job = variable({"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "SLUICE_JOB_ID"});
  me.restart = variable({"SLURM_RESTART_COUNT"});
  me.process = ::getpid();
  me.started = start_of(me.process);
  me.since = std::time(nullptr);
  return me;
}

std::optional<Holder> read_holder(const fs::path& path) {
  try {
    return nlohmann::json::parse(read_text(path)).get<Holder>();
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

std::string describe(const std::optional<Holder>& holder) {
  if (!holder) return "a process that left no name";
  const auto age = static_cast<double>(std::time(nullptr) - holder->since);
  return fmt::format("process {} on host '{}'{}, since {:.0f} s", holder->process, holder->host,
                     holder->job.empty() ? "" : fmt::format(", job {}", holder->job), age);
}

enum class Life { kAlive, kGone, kUnknown };

Life life_of(const std::optional<Holder>& holder, const Holder& me) {
  if (!holder) return Life::kUnknown;
  if (!me.job.empty() && holder->job == me.job && holder->restart != me.restart) {
    return Life::kGone;
  }
  if (holder->boot != me.boot || holder->pid_namespace != me.pid_namespace) return Life::kUnknown;
  if (::kill(static_cast<pid_t>(holder->process), 0) != 0 && errno == ESRCH) return Life::kGone;
  return start_of(holder->process) == holder->started ? Life::kAlive : Life::kGone;
}

std::int64_t modified(const fs::path& path) {
  struct stat info = {};
  if (::stat(path.c_str(), &info) != 0) return -1;
  return std::int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec;
}

// Whether the process can be seen to live, or whether the lock is renewed within `watch`.
bool is_alive(const fs::path& path, const Holder& me, std::chrono::milliseconds watch,
              const std::function<void(const std::string&)>& note) {
  const std::optional<Holder> holder = read_holder(path);
  const Life life = life_of(holder, me);
  if (life != Life::kUnknown) return life == Life::kAlive;
  if (note) {
    note(fmt::format("'{}' is held by {}; waiting {} s to see whether it is still there",
                     path.string(), describe(holder),
                     std::chrono::duration_cast<std::chrono::seconds>(watch).count()));
  }
  const std::int64_t before = modified(path);
  const auto deadline = Clock::now() + watch;
  while (Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const std::int64_t now = modified(path);
    if (now != before) return now != -1;  // -1: released meanwhile
  }
  return false;
}

// Makes the lock of `text`, which appears whole. False where there is one; else Error(kIo).
bool create(const fs::path& path, const std::string& text, const Holder& me) {
  const auto fail = [&](int error) {
    throw_error(ErrorCode::kIo, "cannot write '{}': {}", path.string(),
                std::generic_category().message(error));
  };
  const auto write = [&](const fs::path& file, int flags) {
    const int fd = ::open(file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0666);
    if (fd < 0 && errno == EEXIST) return false;
    if (fd < 0) fail(errno);
    const bool whole = ::write(fd, text.data(), text.size()) == static_cast<::ssize_t>(text.size());
    const int error = whole ? 0 : errno;
    ::close(fd);
    if (whole) return true;
    ::unlink(file.c_str());
    fail(error == 0 ? ENOSPC : error);
    return false;
  };
  const fs::path draft =
      path.parent_path() / fmt::format(".lock.{}.{}.partial", me.host, me.process);
  for (;;) {
    write(draft, O_TRUNC);
    const int error = ::link(draft.c_str(), path.c_str()) == 0 ? 0 : errno;
    ::unlink(draft.c_str());
    if (error == 0 || error == EEXIST) return error == 0;
    if (error == ENOENT) continue;  // the lock's new holder removed the draft
    // A file system without links.
    if (error == EPERM || error == ENOTSUP || error == ENOSYS) return write(path, O_EXCL);
    fail(error);
  }
}

// A pipe would block who reads it.
void require_file(const fs::path& path) {
  struct stat info = {};
  if (::lstat(path.c_str(), &info) != 0 || S_ISREG(info.st_mode)) return;
  throw_error(ErrorCode::kIo, "'{}' is no file; a directory of saves needs that name for its lock",
              path.string());
}

// Whether another process holds the file by flock(2) for two seconds; else this one does, where
// the file system can.
bool held_by_another(int fd) {
  constexpr int kTries = 40;
  for (int i = 0; i < kTries; ++i) {
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return true;
}

// Removes the lock that was looked at. Jobs that find it stale take turns by flock(2), and look at
// the name again: another may have taken it over. Error(kIo) where it cannot be removed.
void remove_stale(const fs::path& path, const std::string& theirs) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  int error = fd < 0 ? errno : 0;
  if (fd >= 0) {
    struct stat open = {}, named = {};
    // File systems without flock() let both go on: then only the text protects the new lock.
    if (held_by_another(fd)) {
      error = EBUSY;
    } else if (::fstat(fd, &open) == 0 && ::lstat(path.c_str(), &named) == 0 &&
               open.st_ino == named.st_ino && read_text(path) == theirs) {
      error = ::unlink(path.c_str()) == 0 ? 0 : errno;
    }
    ::close(fd);
  }
  if (error == 0 || error == ENOENT) return;
  throw_error(
      ErrorCode::kIo, "cannot remove the stale lock '{}': {}", path.string(),
      error == EBUSY ? "a process holds it by flock" : std::generic_category().message(error));
}

}  // namespace

struct SaveLock::Impl {
  void renew() {
    std::unique_lock lock(mutex);
    while (!ended.wait_for(lock, kRenew, [this] { return end; })) {
      (void)::utimensat(AT_FDCWD, path.c_str(), nullptr, 0);
    }
  }
  [[nodiscard]] bool mine() const { return read_text(path) == text; }

  fs::path path;
  std::string text;
  std::int64_t process = ::getpid();
  std::mutex mutex;
  std::condition_variable ended;
  bool end = false;
  std::thread thread;
};

SaveLock::SaveLock(const fs::path& directory, std::chrono::milliseconds watch,
                   const std::function<void(const std::string&)>& note)
    : impl_(std::make_unique<Impl>()) {
  impl_->path = directory / "lock";
  const fs::path& path = impl_->path;
  const Holder me = this_process();
  impl_->text =
      nlohmann::json(me).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  while (!create(path, impl_->text, me)) {
    require_file(path);
    const std::string theirs = read_text(path);
    if (is_alive(path, me, watch, note)) {
      throw_error(ErrorCode::kIo,
                  "directory '{}' is in use by {}; two jobs cannot save into one directory",
                  directory.string(), describe(read_holder(path)));
    }
    remove_stale(path, theirs);
  }
  impl_->thread = start_thread("lock of the saves", [this] { impl_->renew(); });
}

SaveLock::~SaveLock() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->end = true;
  }
  impl_->ended.notify_all();
  if (impl_->thread.joinable()) impl_->thread.join();
  if (::getpid() == impl_->process && impl_->mine()) ::unlink(impl_->path.c_str());
}

void SaveLock::require_held() const {
  if (impl_->mine()) return;
  throw_error(
      ErrorCode::kIo, "'{}' is {}; this job no longer saves there", impl_->path.string(),
      modified(impl_->path) == -1 ? "gone" : "held by " + describe(read_holder(impl_->path)));
}

}  // namespace sluice
