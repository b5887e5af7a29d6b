// Whether a job that has ended is started again, after which pause, and without which hosts. Pure:
// it knows neither clocks nor processes.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/supervise/attempt.hpp"

namespace sluice {

// What an exit code means for another start. runtime/README.md has the table.
enum class ExitKind {
  kDone,      // 0
  kStopped,   // 12: as asked, and saved
  kRetried,   // 1, 9, 10, 11, 134 to 139
  kHopeless,  // all others: another start ends in the same way
};
[[nodiscard]] ExitKind kind_of_exit(int code);

// The same of an attempt: a report of a hang or a lost host is retried where the launcher's own
// code says nothing about the job.
[[nodiscard]] ExitKind kind_of(const Attempt& attempt);

// "exit code 11: a rank died or stopped answering", "killed by SIGKILL (exit code 137)"
[[nodiscard]] std::string describe_exit(const JobEnd& end);
// What happened, in one line: the hang, the host that is lost, the rank that was killed, the job's
// own error, or the exit code alone.
[[nodiscard]] std::string describe(const Attempt& attempt);

// The pause before a restart: `first` seconds, doubled (up to a minute, or `first` where that is
// longer) each time that the attempt before lasted less than a minute, `first` again after another.
class Pauses {
 public:
  explicit Pauses(double first) : first_(first), next_(first) {}
  [[nodiscard]] double after(double attempt_seconds);

 private:
  double first_, next_;
};

struct RestartDecision {
  bool again = false;
  double pause = 0;                   // seconds
  std::vector<std::string> left_out;  // hosts of those in use, from now on
  std::string reason;                 // why not again
};

// A restart makes progress if it adds a save to those that it started from: it said so, or the next
// start goes on from a save that is newer than all known ones. A job that sends no events makes
// progress if it runs for a minute. Two restarts in a row without progress end the run.
//
// A host is left out when it is lost the second time, or when the third attempt in a row ends by a
// signal to a rank there; but never the last one. After that restarts count anew.
class RestartPolicy {
 public:
  RestartPolicy(int restarts, double first_pause) : most_(restarts), pauses_(first_pause) {}

  // After an attempt of kind kRetried on these hosts; none where the supervisor does not choose
  // them.
  RestartDecision after(const Attempt& attempt, std::span<const std::string> hosts);
  [[nodiscard]] int restarts() const { return restarts_; }

 private:
  // Forgets restarts without progress where the attempt shows that the one before made some.
  [[nodiscard]] bool makes_progress(const Attempt& attempt);
  [[nodiscard]] std::vector<std::string> hosts_to_leave_out(const Attempt& attempt,
                                                            std::span<const std::string> hosts);

  int most_;
  Pauses pauses_;
  int restarts_ = 0, without_progress_ = 0;
  bool first_ = true, speaks_ = false;
  std::uint64_t newest_save_ = 0;  // that is known, by its step
  std::map<std::string, int> times_lost_;
  std::string killed_host_;
  int killed_in_a_row_ = 0;
};

}  // namespace sluice
