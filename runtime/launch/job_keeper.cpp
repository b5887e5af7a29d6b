#include "runtime/launch/job_keeper.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::seconds;

constexpr auto kTermTime = seconds(5);      // from SIGTERM to SIGKILL
constexpr auto kLeftoverTime = seconds(2);  // the same for what outlives the launcher
constexpr auto kKillTime = seconds(10);     // until a process that SIGKILL does not end is left
constexpr auto kKillAgain = std::chrono::milliseconds(20);

void answer(int fd, KeeperAnswer::Kind kind, int value) {
  const KeeperAnswer text{kind, value};
  (void)!::write(fd, &text, sizeof text);
}

void reset_signals() {
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  for (int signal = 1; signal < NSIG; ++signal) ::sigaction(signal, &action, nullptr);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

// In the child. `keeper`: its parent.
[[noreturn]] void become_launcher(const KeeperTask& task, pid_t keeper) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != keeper) ::_exit(1);  // it died before that
  reset_signals();
  const int null = ::open("/dev/null", O_RDONLY);
  if (null >= 0) ::dup2(null, STDIN_FILENO);
  ::dup2(task.errors, STDERR_FILENO);
  if (null > STDERR_FILENO) ::close(null);
  ::execvpe(task.words[0], const_cast<char* const*>(task.words),
            const_cast<char* const*>(task.environment));
  answer(task.answers, KeeperAnswer::Kind::kNotStarted, errno);
  ::_exit(127);
}

class Keeper {
 public:
  Keeper(const KeeperTask& task, pid_t launcher) : task_(task), launcher_(launcher) {}

  // Until the launcher and all else of the job are gone.
  void run() {
    while (true) {
      reap();
      if (launcher_ended_ && none_left_) return;
      act();
      if (given_up_) return;
      wait();
    }
  }
  [[nodiscard]] int status() const { return status_; }

 private:
  enum class Stage { kRunning, kStopping, kEnding, kKilling };

  void reap() {
    int status = 0;
    pid_t child = 0;
    while ((child = ::waitpid(-1, &status, WNOHANG)) > 0) {
      if (child != launcher_) continue;
      status_ = status;
      launcher_ended_ = true;
    }
    none_left_ = child < 0 && errno == ECHILD;
    if (launcher_ended_ && !after_launcher_ && !none_left_) {
      after_launcher_ = true;
      signal_children(SIGTERM);
      if (stage_ < Stage::kKilling) enter(Stage::kEnding, kLeftoverTime);
    }
  }

  // What is due by the clock.
  void act() {
    if (stage_ == Stage::kKilling) {
      signal_children(SIGKILL);
      // Processes that cannot be killed hang in the kernel.
      given_up_ = Clock::now() > deadline_;
      return;
    }
    if (stage_ == Stage::kRunning || Clock::now() < deadline_) return;
    if (stage_ == Stage::kStopping) {
      end();
    } else {
      enter(Stage::kKilling, kKillTime);
      signal_children(SIGKILL);
    }
  }

  void enter(Stage stage, Clock::duration time) {
    stage_ = stage;
    deadline_ = Clock::now() + time;
  }

  void stop() {
    if (stage_ >= Stage::kStopping || launcher_ended_) return;
    enter(Stage::kStopping,
          std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(task_.grace)));
    ::kill(launcher_, SIGUSR1);
  }
  void end() {
    if (stage_ >= Stage::kEnding || launcher_ended_) return;
    enter(Stage::kEnding, kTermTime);
    ::kill(-launcher_, SIGTERM);
  }

  void wait() {
    sigset_t child_ends;
    sigemptyset(&child_ends);
    sigaddset(&child_ends, SIGCHLD);
    // Without a supervisor nobody else reads what the job says, and a job that cannot write ends.
    std::array<pollfd, 1> fds = {
        {{.fd = supervised_ ? task_.commands : task_.unread, .events = POLLIN, .revents = 0}}};
    // SIGCHLD is blocked but for this wait: none is missed between reap() and here.
    sigset_t others;
    sigfillset(&others);
    sigdelset(&others, SIGCHLD);
    const timespec time = time_left();
    const int ready =
        ::ppoll(fds.data(), fds.size(), stage_ == Stage::kRunning ? nullptr : &time, &others);
    if (ready <= 0) return;
    if (supervised_) {
      read_commands();
    } else {
      drop_text();
    }
  }

  void drop_text() {
    std::array<char, 4096> text{};
    if (::read(task_.unread, text.data(), text.size()) == 0) task_.unread = -1;
  }

  [[nodiscard]] timespec time_left() const {
    Clock::duration left = std::max(deadline_ - Clock::now(), Clock::duration::zero());
    if (stage_ == Stage::kKilling) left = kKillAgain;
    const auto whole = std::chrono::duration_cast<seconds>(left);
    return {.tv_sec = whole.count(),
            .tv_nsec = std::chrono::duration_cast<std::chrono::nanoseconds>(left - whole).count()};
  }

  void read_commands() {
    std::array<char, 16> commands{};
    const ssize_t size = ::read(task_.commands, commands.data(), commands.size());
    if (size < 0) return;
    if (size == 0) {  // the supervisor is gone
      supervised_ = false;
      return stop();
    }
    for (const char each : std::string_view(commands.data(), static_cast<std::size_t>(size))) {
      if (each == kStopJob) stop();
      if (each == kEndJob) end();
      if (each == kTellJob && !launcher_ended_) ::kill(launcher_, SIGUSR2);
      if (each == kKillJob && stage_ != Stage::kKilling) enter(Stage::kKilling, kKillTime);
    }
  }

  KeeperTask task_;
  pid_t launcher_;
  int status_ = SIGKILL;  // of the launcher, once it has ended; it cannot be killed otherwise
  bool launcher_ended_ = false, none_left_ = false, after_launcher_ = false, given_up_ = false,
       supervised_ = true;
  Stage stage_ = Stage::kRunning;
  Clock::time_point deadline_;
};

void on_child(int) {}

}  // namespace

int keep_job(const KeeperTask& task) noexcept {
  ::setsid();
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  ::prctl(PR_SET_NAME, "sluice-keeper");
  // The supervisor speaks through the pipe alone.
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGPIPE}) {
    ::sigaction(signal, &ignore, nullptr);
  }
  struct sigaction wake {};
  wake.sa_handler = on_child;
  ::sigaction(SIGCHLD, &wake, nullptr);
  sigset_t blocked;
  sigfillset(&blocked);
  ::sigprocmask(SIG_SETMASK, &blocked, nullptr);
  const pid_t self = ::getpid();
  const pid_t launcher = ::fork();
  if (launcher == 0) become_launcher(task, self);
  if (launcher < 0) {
    answer(task.answers, KeeperAnswer::Kind::kNotStarted, errno);
    return 1;
  }
  ::setpgid(launcher, launcher);  // here too: a signal to the group may be due before it runs
  ::close(task.errors);
  Keeper keeper(task, launcher);
  keeper.run();
  answer(task.answers, KeeperAnswer::Kind::kEnded, keeper.status());
  return 0;
}

bool signal_children(int signal) noexcept {
  bool any = false;
  DIR* const all = ::opendir("/proc");
  if (all == nullptr) return false;
  const pid_t self = ::getpid();
  while (const dirent* const entry = ::readdir(all)) {
    const pid_t process = std::atoi(entry->d_name);
    if (process <= 0) continue;
    std::array<char, 64> path{};
    std::snprintf(path.data(), path.size(), "/proc/%d/stat", process);
    const int fd = ::open(path.data(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    std::array<char, 256> text{};
    const ssize_t size = ::read(fd, text.data(), text.size() - 1);
    ::close(fd);
    // "1234 (name) S parent ...": a name may hold ')' itself.
    const std::string_view line(text.data(), static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
    const std::size_t close = line.rfind(") ");
    if (close == std::string_view::npos || close + 4 >= line.size()) continue;
    if (std::atoi(text.data() + close + 4) != self) continue;
    any = true;
    ::kill(process, signal);
  }
  ::closedir(all);
  return any;
}

}  // namespace sluice
