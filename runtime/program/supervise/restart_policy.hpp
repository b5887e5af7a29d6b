// What is known of a start of a job that has ended, and whether it is started again: after which
// pause, and without which hosts. Pure: it knows neither clocks nor processes.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/program/supervise/job_output.hpp"
#include "runtime/program/supervise/job_process.hpp"

namespace sluice {

// Steps of a start, by the job's events.
struct AttemptSteps {
  std::uint64_t start = 0;  // done before it
  std::uint64_t last = 0;   // the last one that is known to be done
  std::uint64_t saved = 0;  // newest save; `start` where none was added
  double seconds = 0;       // in its steps, up to `last`
  bool complete = false;    // it said that it reached its end
};

// One start of a job: what is known of it once it has ended.
struct Attempt {
  JobEnd end;
  double seconds = 0;                 // from its start to its end
  std::optional<AttemptSteps> steps;  // none: no event of steps came
  std::optional<JobEvent> hang;       // the first report that is not of kind kEnded
  std::optional<JobEvent> ended;      // the first one that is

  void add(const JobEvent& event);
};

struct RunTotals {
  double step_seconds = 0;       // in steps whose result is in the last state
  std::uint64_t steps_lost = 0;  // that were done and had to be done again, or are missing
};

// Of all starts of a run. Steps between two reports of a job (a second) are not known: time and
// steps that were lost are a little more.
[[nodiscard]] RunTotals totals_of(std::span<const AttemptSteps> attempts);

// Exit codes of a job that ended as it should: done; stopped as asked, and saved.
constexpr int kDoneCode = 0, kStoppedCode = 12;

// What happened, in one line: the hang, the rank whose process ended, or the exit code alone.
[[nodiscard]] std::string describe(const Attempt& attempt);

struct RestartDecision {
  bool again = false;
  double pause = 0;                   // seconds
  std::vector<std::string> left_out;  // hosts of those in use, from now on
  std::string reason;                 // why not again
};

// Exit codes 1, 9, 10, 11, 134 to 139, 205 (Open MPI lost a host) and 255 (Open MPI or ssh did not
// reach one) are retried; runtime/README.md has the table. So is any code that is not Sluice's,
// where a hang was reported, or a host in the start before. All others end in the same way again.
//
// A restart makes progress if it adds a save to those that it started from: it said so, or the next
// start goes on from a save that is newer than all known ones. A job that sends no events makes
// progress if it runs for a minute. Two restarts in a row without progress end the run.
//
// A host is left out when it is reported as lost the second time, or when the start after the first
// time does not begin its steps (or ends within a minute, where the job sends no events): that host
// is still down. So it is when the third attempt in a row ends with a process of a rank there. The
// last host stays. After that restarts count anew.
//
// The pause is `first_pause` seconds, doubled (up to a minute, or `first_pause` where that is
// longer) each time that the attempt before lasted less than a minute, `first_pause` again after
// another.
class RestartPolicy {
 public:
  RestartPolicy(int restarts, double first_pause)
      : most_(restarts), first_pause_(first_pause), next_pause_(first_pause) {}

  // After an attempt on these hosts; none where the supervisor does not choose them.
  RestartDecision after(const Attempt& attempt, std::span<const std::string> hosts);
  [[nodiscard]] int restarts() const { return restarts_; }

 private:
  [[nodiscard]] bool is_retried(const Attempt& attempt) const;
  // Forgets restarts without progress where the attempt shows that the one before made some.
  [[nodiscard]] bool makes_progress(const Attempt& attempt);
  [[nodiscard]] std::vector<std::string> hosts_to_leave_out(const Attempt& attempt,
                                                            std::span<const std::string> hosts);
  [[nodiscard]] double pause_after(double attempt_seconds);

  int most_;
  double first_pause_, next_pause_;
  int restarts_ = 0, without_progress_ = 0;
  bool first_ = true, speaks_ = false;
  std::uint64_t newest_save_ = 0;    // that is known, by its step
  std::vector<std::string> missed_;  // lost in the attempt before
  std::map<std::string, int> times_lost_;
  std::string ended_host_;
  int ended_in_a_row_ = 0;
};

}  // namespace sluice
