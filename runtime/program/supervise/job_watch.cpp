#include "runtime/program/supervise/job_watch.hpp"

#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

constexpr double kSameSeconds = 0.2;
constexpr std::size_t kReadAtOnce = 64U << 10;

bool is_ignored(int signal) {
  struct sigaction action {};
  ::sigaction(signal, nullptr, &action);
  return action.sa_handler == SIG_IGN;
}

class JobWatch {
 public:
  JobWatch(JobProcess& job, StopRequests& stops, JobOutput& out, const WatchOptions& options)
      : job_(job), stops_(stops), out_(out), options_(options), buffer_(kReadAtOnce) {}

  Attempt run() {
    const double start = clock_seconds();
    while (true) {
      heed_signals();
      read_text();
      if (const auto end = job_.check()) {
        attempt_.end = ended_ ? JobEnd{exit_code(ErrorCode::kPeer), false} : *end;
        break;
      }
      keep_limits();
      wait();
    }
    read_rest();
    attempt_.seconds = clock_seconds() - start;
    return std::move(attempt_);
  }

 private:
  void wait() {
    std::optional<double> seconds = job_.wait();
    if (deadline_ && !ended_) {
      const double left = std::max(0.0, *deadline_ - clock_seconds());
      seconds = std::min(left, seconds.value_or(left));
    }
    wait_for(stops_, out_, closed_ || out_.full() ? -1 : job_.errors_fd(), seconds);
  }

  void heed_signals() {
    while (const auto request = stops_.take()) {
      switch (*request) {
        case StopRequests::Kind::kStop:
          out_.say("stopping after this step; a second signal (Ctrl-C) ends the job at once");
          job_.stop();
          break;
        case StopRequests::Kind::kEndNow:
          out_.say("ending the job");
          asked_to_end_ ? job_.kill() : job_.end();
          asked_to_end_ = true;
          break;
        case StopRequests::Kind::kTell:
          job_.tell();
          break;
      }
    }
  }

  // One piece; false where nothing waits.
  bool read_text() {
    if (closed_ || out_.full()) return false;
    const ssize_t size = ::read(job_.errors_fd(), buffer_.data(), buffer_.size());
    if (size < 0) return errno == EINTR;
    closed_ = size == 0;
    take(out_.feed({buffer_.data(), static_cast<std::size_t>(size)}));
    return !closed_;
  }

  // What the job wrote before its end; a signal ends the waiting for a slow reader.
  void read_rest() {
    do {
      if (out_.full()) out_.flush(stops_.fd());
    } while (read_text());
    take(out_.finish());
  }

  void take(const std::vector<JobEvent>& events) {
    for (const JobEvent& event : events) {
      attempt_.add(event);
      if (event.kind != JobEvent::Kind::kHang) continue;
      const bool over = event.hang == JobEvent::Hang::kEnded;
      const double due = clock_seconds() + (over ? options_.after_end : options_.after_hang);
      deadline_ = std::min(due, deadline_.value_or(due));
    }
  }

  void keep_limits() {
    if (!deadline_ || clock_seconds() < *deadline_ || ended_) return;
    ended_ = true;
    out_.say("the launcher does not return; ending it");
    job_.end();
  }

  JobProcess& job_;
  StopRequests& stops_;
  JobOutput& out_;
  const WatchOptions& options_;
  Attempt attempt_;
  std::vector<char> buffer_;
  bool closed_ = false;        // standard error of the job
  bool asked_to_end_ = false;  // by a second signal
  bool ended_ = false;         // the launcher did not return by itself
  std::optional<double> deadline_;
};

}  // namespace

StopRequests::StopRequests() {
  sigset_t signals, children;
  sigemptyset(&signals);
  sigemptyset(&children);
  sigaddset(&children, SIGCHLD);
  for (const int signal : {SIGTERM, SIGUSR1, SIGUSR2}) sigaddset(&signals, signal);
  for (const int signal : {SIGINT, SIGHUP}) {
    if (!is_ignored(signal)) sigaddset(&signals, signal);
  }
  fd_ = ::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
  children_fd_ = ::signalfd(-1, &children, SFD_CLOEXEC | SFD_NONBLOCK);
  if (fd_ < 0 || children_fd_ < 0) {
    throw_error(ErrorCode::kInternal, "cannot wait for signals: {}", std::strerror(errno));
  }
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  ::sigprocmask(SIG_BLOCK, &children, nullptr);
  ::signal(SIGCHLD, SIG_DFL);  // where it is ignored, nobody learns how a child ended
  ::signal(SIGPIPE, SIG_IGN);
}

StopRequests::~StopRequests() {
  ::close(fd_);
  ::close(children_fd_);
}

std::optional<StopRequests::Kind> StopRequests::take() {
  signalfd_siginfo info{};
  while (::read(children_fd_, &info, sizeof info) > 0) {
  }
  while (::read(fd_, &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGUSR2) return Kind::kTell;
    if (!first_) {
      first_ = clock_seconds();
      return Kind::kStop;
    }
    if (signal != SIGHUP && clock_seconds() - *first_ >= kSameSeconds) return Kind::kEndNow;
  }
  return std::nullopt;
}

Attempt watch_job(JobProcess& job, StopRequests& stops, JobOutput& out,
                  const WatchOptions& options) {
  return JobWatch(job, stops, out, options).run();
}

void wait_for(const StopRequests& stops, JobOutput& out, int also, std::optional<double> seconds) {
  std::array<pollfd, 4> fds = {{{.fd = stops.fd(), .events = POLLIN, .revents = 0},
                                {.fd = stops.children_fd(), .events = POLLIN, .revents = 0},
                                {.fd = also, .events = POLLIN, .revents = 0},
                                {.fd = out.fd(), .events = POLLOUT, .revents = 0}}};
  // An hour: a longer wait may not fit poll()'s milliseconds.
  const int most = seconds ? static_cast<int>(std::ceil(1000 * std::min(*seconds, 3600.0))) : -1;
  if (::poll(fds.data(), fds.size(), most) > 0 && fds[3].revents != 0) out.write_some();
}

}  // namespace sluice
