// Signals to a supervisor, taken one by one where it waits instead of in a handler.
#pragma once

#include <csignal>
#include <cstdint>
#include <optional>

namespace sluice {

// From here on SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are blocked and wait at fd(). They stay
// blocked when this is gone: the process then ends with the job's exit code, which a late signal
// does not change. While this exists SIGPIPE is ignored. SIGINT or SIGHUP that were ignored before
// stay so, as nohup and a shell's '&' want it. For a process with one thread.
class StopRequests {
 public:
  StopRequests();  // Error(kInternal) where the kernel has no descriptor left
  ~StopRequests();
  StopRequests(const StopRequests&) = delete;
  StopRequests& operator=(const StopRequests&) = delete;

  // Becomes readable when a signal waits.
  [[nodiscard]] int fd() const { return fd_; }

  enum class Kind { kStop, kEndNow, kTell };
  // The next signal that waits: the first stop, one after it, or SIGUSR2. None: nothing waits. A
  // request within 0.2 s of the first is the same one (`timeout` signals both a process and its
  // group), and SIGHUP is never the second (a terminal that closes may send it twice). `now`:
  // seconds of a clock that does not go back.
  [[nodiscard]] std::optional<Kind> take(double now);
  [[nodiscard]] bool asked() const { return first_.has_value(); }

 private:
  int fd_ = -1;
  struct sigaction pipe_before_ {};
  std::optional<double> first_;
};

}  // namespace sluice
