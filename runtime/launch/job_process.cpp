#include "runtime/launch/job_process.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <thread>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/launch/job_keeper.hpp"

namespace sluice {
namespace {

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

std::vector<const char*> pointers_to(const std::vector<std::string>& texts) {
  std::vector<const char*> pointers;
  for (const std::string& text : texts) pointers.push_back(text.c_str());
  pointers.push_back(nullptr);
  return pointers;
}

void do_not_block(int fd) { ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK); }

// Where the keeper was killed, its children are this process's own: they get SIGTERM, and SIGKILL
// after two seconds.
void end_orphans() {
  using Steady = std::chrono::steady_clock;
  const auto kill_from = Steady::now() + std::chrono::seconds(2);
  const auto give_up = Steady::now() + std::chrono::seconds(10);
  for (int signal = SIGTERM; signal_children(signal) && Steady::now() < give_up;) {
    signal = Steady::now() < kill_from ? 0 : SIGKILL;
    while (::waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

JobEnd end_of(int status) {
  if (WIFSIGNALED(status)) return {128 + WTERMSIG(status), true};
  return {WEXITSTATUS(status), false};
}

}  // namespace

JobProcess::JobProcess(const std::vector<std::string>& words,
                       const std::vector<std::string>& environment, double grace)
    : program_(words.front()) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  const std::vector<const char*> arguments = pointers_to(words);
  const std::vector<const char*> variables = pointers_to(environment);
  Pipe commands, answers, errors;
  const pid_t keeper = ::fork();
  if (keeper < 0) {
    throw_error(ErrorCode::kInternal, "cannot start a process: {}", std::strerror(errno));
  }
  if (keeper == 0) {
    ::close(commands.write);  // the end of file shows that the supervisor is gone
    ::close(answers.read);
    ::_exit(keep_job({arguments.data(), variables.data(), commands.read, answers.write,
                      errors.write, errors.read, grace}));
  }
  keeper_ = keeper;
  errors_ = std::exchange(errors.read, -1);
  answers_ = std::exchange(answers.read, -1);
  commands_ = std::exchange(commands.write, -1);
  do_not_block(errors_);
  do_not_block(answers_);
  do_not_block(commands_);
}

JobProcess::~JobProcess() {
  if (!end_) kill();
  ::close(commands_);
  ::waitpid(keeper_, nullptr, 0);
  ::close(errors_);
  ::close(answers_);
  end_orphans();
}

void JobProcess::command(char what) { (void)!::write(commands_, &what, 1); }
void JobProcess::stop() { command(kStopJob); }
void JobProcess::end() { command(kEndJob); }
void JobProcess::kill() { command(kKillJob); }
void JobProcess::tell() { command(kTellJob); }

std::optional<JobEnd> JobProcess::ended() {
  if (end_) return end_;
  KeeperAnswer answer;
  const ssize_t size = ::read(answers_, &answer, sizeof answer);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  if (size != static_cast<ssize_t>(sizeof answer)) {
    // The keeper was killed. The destructor ends what it kept.
    end_ = JobEnd{128 + SIGKILL, true};
  } else if (answer.kind == KeeperAnswer::Kind::kNotStarted) {
    end_ = JobEnd{127, false};
    throw_usage("cannot start '{}': {}", program_, std::strerror(answer.value));
  } else {
    end_ = end_of(answer.value);
  }
  return end_;
}

}  // namespace sluice
