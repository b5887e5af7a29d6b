#include "runtime/program/supervise/job_process.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <thread>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

constexpr double kTermTime = 5;      // from SIGTERM to SIGKILL
constexpr double kLeftoverTime = 2;  // the same for what outlives the launcher
constexpr double kKillTime = 10;     // until a process that SIGKILL does not end is left
constexpr double kKillAgain = 0.02;

struct Pipe {
  Pipe() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
      throw_error(ErrorCode::kInternal, "cannot make a pipe: {}", std::strerror(errno));
    }
    read = ends[0];
    write = ends[1];
  }
  ~Pipe() {
    if (read >= 0) ::close(read);
    if (write >= 0) ::close(write);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  int read = -1, write = -1;
};

std::vector<char*> pointers_to(const std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (const std::string& text : texts) pointers.push_back(const_cast<char*>(text.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

void reset_signals() {
  for (int number = 1; number < NSIG; ++number) ::signal(number, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

// In the child. Why it could not become the launcher goes to `answer`.
[[noreturn]] void become_launcher(char* const* words, char* const* environment, pid_t parent,
                                  int errors, int answer) {
  ::setsid();
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(1);  // it died before that
  reset_signals();
  const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (null >= 0) ::dup2(null, STDIN_FILENO);
  ::dup2(errors, STDERR_FILENO);
  ::execvpe(words[0], words, environment);
  (void)!::write(answer, &errno, sizeof errno);
  ::_exit(127);
}

// Sends the signal to every child of this process. One that ends meanwhile may hide another.
void signal_children(int signal) {
  std::ifstream children(fmt::format("/proc/self/task/{}/children", ::getpid()));
  for (pid_t child = 0; children >> child;) ::kill(child, signal);
}

JobEnd end_of(int status) {
  if (WIFSIGNALED(status)) return {128 + WTERMSIG(status), true};
  return {WEXITSTATUS(status), false};
}

}  // namespace

double clock_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

JobProcess::JobProcess(const std::vector<std::string>& words,
                       const std::vector<std::string>& environment, double grace)
    : grace_(grace) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  const std::vector<char*> arguments = pointers_to(words), variables = pointers_to(environment);
  Pipe errors, answer;
  const pid_t self = ::getpid();
  launcher_ = ::fork();
  if (launcher_ < 0) {
    throw_error(ErrorCode::kInternal, "cannot start a process: {}", std::strerror(errno));
  }
  if (launcher_ == 0) {
    become_launcher(arguments.data(), variables.data(), self, errors.write, answer.write);
  }
  ::close(std::exchange(answer.write, -1));
  int why = 0;
  if (::read(answer.read, &why, sizeof why) == static_cast<ssize_t>(sizeof why)) {
    ::waitpid(launcher_, nullptr, 0);
    throw_usage("cannot start '{}': {}", words.front(), std::strerror(why));
  }
  errors_ = std::exchange(errors.read, -1);
  ::fcntl(errors_, F_SETFL, O_NONBLOCK);
}

JobProcess::~JobProcess() {
  kill();
  while (!check()) std::this_thread::sleep_for(std::chrono::duration<double>(kKillAgain));
  ::close(errors_);
}

void JobProcess::enter(Stage stage, double seconds) {
  stage_ = stage;
  deadline_ = clock_seconds() + seconds;
}

void JobProcess::stop() {
  if (stage_ >= Stage::kStopping || end_) return;
  enter(Stage::kStopping, grace_);
  ::kill(launcher_, SIGUSR1);
}

void JobProcess::end() {
  if (stage_ >= Stage::kEnding || end_) return;
  enter(Stage::kEnding, kTermTime);
  ::kill(-launcher_, SIGTERM);
}

void JobProcess::kill() {
  if (stage_ < Stage::kKilling) enter(Stage::kKilling, kKillTime);
}

void JobProcess::tell() {
  if (!end_) ::kill(launcher_, SIGUSR2);
}

std::optional<JobEnd> JobProcess::check() {
  int status = 0;
  pid_t child = 0;
  const bool ran = !end_;
  while ((child = ::waitpid(-1, &status, WNOHANG)) > 0) {
    if (child == launcher_) end_ = end_of(status);
  }
  if (child < 0 && errno == ECHILD) return end_;
  if (end_ && ran) {
    signal_children(SIGTERM);
    if (stage_ < Stage::kKilling) enter(Stage::kEnding, kLeftoverTime);
  }
  const bool late = stage_ != Stage::kRunning && clock_seconds() >= deadline_;
  if (stage_ == Stage::kKilling) {
    if (!end_) ::kill(-launcher_, SIGKILL);
    signal_children(SIGKILL);
    // Processes that cannot be killed hang in the kernel.
    if (late) return end_.value_or(JobEnd{128 + SIGKILL, true});
  } else if (late) {
    stage_ == Stage::kStopping ? end() : kill();
  }
  return std::nullopt;
}

std::optional<double> JobProcess::wait() const {
  if (stage_ == Stage::kRunning) return std::nullopt;
  if (stage_ == Stage::kKilling) return kKillAgain;
  return std::max(0.0, deadline_ - clock_seconds());
}

}  // namespace sluice
