// One start of a job, from its first process to its last: passes text and signals on, and ends a
// launcher that does not return.
#pragma once

#include <optional>

#include "runtime/program/supervise/job_output.hpp"
#include "runtime/program/supervise/job_process.hpp"
#include "runtime/program/supervise/restart_policy.hpp"

namespace sluice {

// Signals to a supervisor, taken one by one where it waits instead of in a handler.
//
// From here on SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and SIGCHLD are blocked and wait at fd(),
// and SIGPIPE is ignored. So it stays when this is gone: the process then ends with the job's exit
// code, which a late signal does not change. SIGINT or SIGHUP that were ignored before stay so, as
// nohup and a shell's '&' want it. For a process with one thread.
class StopRequests {
 public:
  StopRequests();  // Error(kInternal) where the kernel has no descriptor left
  ~StopRequests();
  StopRequests(const StopRequests&) = delete;
  StopRequests& operator=(const StopRequests&) = delete;

  // Become readable when a request waits, and when a child has ended.
  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] int children_fd() const { return children_fd_; }

  enum class Kind { kStop, kEndNow, kTell };
  // The next request that waits: the first stop, one after it, or SIGUSR2. None: nothing waits. A
  // request within 0.2 s of the first is the same one (`timeout` signals both a process and its
  // group), and SIGHUP is never the second (a terminal that closes may send it twice).
  [[nodiscard]] std::optional<Kind> take();
  [[nodiscard]] bool asked() const { return first_.has_value(); }

 private:
  int fd_ = -1, children_fd_ = -1;
  std::optional<double> first_;
};

struct WatchOptions {
  // From the report of a hang, and of a process that has ended, until the job is ended.
  double after_hang = 10, after_end = 30;
};

// Returns when nothing of the job is left on this host. Where the launcher had to be ended after a
// report, the exit code is 11.
Attempt watch_job(JobProcess& job, StopRequests& stops, JobOutput& out,
                  const WatchOptions& options = {});

// Waits for a signal, for `also` to become readable (none: -1), or for so many seconds, and
// meanwhile writes a piece of what `out` has.
void wait_for(const StopRequests& stops, JobOutput& out, int also, std::optional<double> seconds);

}  // namespace sluice
