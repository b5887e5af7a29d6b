// One start of a job, from its first process to its last: passes text and signals on, and ends a
// launcher that does not return.
#pragma once

#include "runtime/launch/job_process.hpp"
#include "runtime/supervise/attempt.hpp"
#include "runtime/supervise/error_output.hpp"
#include "runtime/supervise/stop_requests.hpp"

namespace sluice {

struct WatchOptions {
  bool verbose = false;  // shows what the launcher says
  // From a report of a hang, and from the launcher's word that the job ends, until it is ended.
  double after_report = 10, after_word = 30;
};

// Seconds of the steady clock.
[[nodiscard]] double steady_seconds();

// Returns when nothing of the job is left on this host. Where a launcher had to be ended after a
// report, the exit code is 11, or that of the signal that killed a rank.
Attempt watch_job(JobProcess& job, StopRequests& stops, ErrorOutput& out,
                  const WatchOptions& options);

}  // namespace sluice
