#include "runtime/supervise/job_watch.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <optional>
#include <string_view>
#include <vector>

#include <sluice/error.hpp>

#include "runtime/launch/job_text.hpp"

namespace sluice {
namespace {

constexpr std::size_t kReadAtOnce = 64U << 10;

class JobWatch {
 public:
  JobWatch(JobProcess& job, StopRequests& stops, ErrorOutput& out, const WatchOptions& options)
      : job_(job),
        stops_(stops),
        out_(out),
        options_(options),
        text_(
            options.verbose, [this](std::string_view text) { out_.add(text); },
            [this](const JobEvent& event) { attempt_.add(event); }),
        buffer_(kReadAtOnce) {}

  Attempt run() {
    const double start = steady_seconds();
    if (stops_.asked()) job_.stop();
    while (true) {
      wait();
      const double now = steady_seconds();
      heed_signals(now);
      read_text(now);
      text_.tick(now);
      if (const auto end = job_.ended()) {
        attempt_.end = *end;
        break;
      }
      keep_limits(now);
    }
    read_rest();
    text_.finish();
    attempt_.seconds = steady_seconds() - start;
    attempt_.findings = text_.findings();
    attempt_.launcher_text = text_.explanation();
    correct_code();
    return std::move(attempt_);
  }

 private:
  void wait() {
    const double now = steady_seconds();
    std::optional<double> time = text_.wait(now);
    if (deadline_) {
      const double left = std::max(0.0, *deadline_ - now);
      time = time ? std::min(*time, left) : left;
    }
    std::array<pollfd, 4> fds = {
        {{.fd = stops_.fd(), .events = POLLIN, .revents = 0},
         {.fd = job_.end_fd(), .events = POLLIN, .revents = 0},
         {.fd = out_.full() || closed_ ? -1 : job_.errors_fd(), .events = POLLIN, .revents = 0},
         {.fd = out_.fd(), .events = POLLOUT, .revents = 0}}};
    // An hour: a longer wait may not fit poll()'s milliseconds.
    const int most = time ? static_cast<int>(std::ceil(1000 * std::min(*time, 3600.0))) : -1;
    if (::poll(fds.data(), fds.size(), most) <= 0) return;
    if (fds[3].revents != 0) out_.write_some();
  }

  void heed_signals(double now) {
    while (const auto request = stops_.take(now)) {
      switch (*request) {
        case StopRequests::Kind::kStop:
          out_.say("stopping after this step; a second signal (Ctrl-C) ends the job at once");
          job_.stop();
          break;
        case StopRequests::Kind::kEndNow:
          out_.say("ending the job");
          times_ended_ == 0 ? job_.end() : job_.kill();
          ++times_ended_;
          break;
        case StopRequests::Kind::kTell:
          job_.tell();
          break;
      }
    }
  }

  // One piece; false where nothing waits.
  bool read_text(double now) {
    if (closed_ || out_.full()) return false;
    const ssize_t size = ::read(job_.errors_fd(), buffer_.data(), buffer_.size());
    if (size < 0) return errno == EINTR;
    closed_ = size == 0;
    text_.feed({buffer_.data(), static_cast<std::size_t>(size)}, now);
    return !closed_;
  }

  // What the job wrote before its end; a signal ends the waiting for a slow reader.
  void read_rest() {
    do {
      if (out_.full()) out_.flush(stops_.fd());
    } while (read_text(steady_seconds()));
  }

  void keep_limits(double now) {
    const auto due_in = [&](double seconds) {
      if (!deadline_ || now + seconds < *deadline_) deadline_ = now + seconds;
    };
    if (attempt_.hang && !reported_) {
      reported_ = true;
      due_in(options_.after_report);
    }
    if (text_.findings().launcher_ends && !said_) {
      said_ = true;
      due_in(options_.after_word);
    }
    if (!deadline_ || now < *deadline_ || ended_) return;
    ended_ = true;
    deadline_.reset();
    out_.say("the launcher does not return; ending it");
    job_.end();
  }

  void correct_code() {
    if (!ended_) return;
    const auto& killed = attempt_.findings.killed;
    const bool by_rank = killed && !attempt_.hang;
    attempt_.end = {by_rank ? kSignalBase + killed->signal : exit_code(ErrorCode::kPeer), false};
  }

  JobProcess& job_;
  StopRequests& stops_;
  ErrorOutput& out_;
  const WatchOptions& options_;
  Attempt attempt_;
  JobText text_;
  std::vector<char> buffer_;
  bool closed_ = false;  // standard error of the job
  bool reported_ = false, said_ = false;
  bool ended_ = false;   // the launcher did not return by itself
  int times_ended_ = 0;  // by a second signal
  std::optional<double> deadline_;
};

}  // namespace

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Attempt watch_job(JobProcess& job, StopRequests& stops, ErrorOutput& out,
                  const WatchOptions& options) {
  return JobWatch(job, stops, out, options).run();
}

}  // namespace sluice
