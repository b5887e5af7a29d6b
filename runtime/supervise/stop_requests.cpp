#include "runtime/supervise/stop_requests.hpp"

#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

constexpr double kSameSeconds = 0.2;

bool is_ignored(int signal) {
  struct sigaction action {};
  ::sigaction(signal, nullptr, &action);
  return action.sa_handler == SIG_IGN;
}

}  // namespace

StopRequests::StopRequests() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGUSR1, SIGUSR2}) sigaddset(&signals, signal);
  for (const int signal : {SIGINT, SIGHUP}) {
    if (!is_ignored(signal)) sigaddset(&signals, signal);
  }
  fd_ = ::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
  if (fd_ < 0)
    throw_error(ErrorCode::kInternal, "cannot wait for signals: {}", std::strerror(errno));
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &ignore, &pipe_before_);
}

StopRequests::~StopRequests() {
  signalfd_siginfo ignored{};
  while (::read(fd_, &ignored, sizeof ignored) > 0) {  // those that wait are late
  }
  ::sigaction(SIGPIPE, &pipe_before_, nullptr);
  ::close(fd_);
}

std::optional<StopRequests::Kind> StopRequests::take(double now) {
  signalfd_siginfo info{};
  while (::read(fd_, &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGUSR2) return Kind::kTell;
    if (!first_) {
      first_ = now;
      return Kind::kStop;
    }
    if (signal != SIGHUP && now - *first_ >= kSameSeconds) return Kind::kEndNow;
  }
  return std::nullopt;
}

}  // namespace sluice
