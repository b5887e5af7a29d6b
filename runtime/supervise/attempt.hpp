// One start of a job under a supervisor: what is known of it once it has ended.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/launch/job_events.hpp"
#include "runtime/launch/job_process.hpp"
#include "runtime/launch/job_text.hpp"

namespace sluice {

// Steps of a start, by the job's events.
struct AttemptSteps {
  std::uint64_t start = 0;  // done before it
  std::uint64_t last = 0;   // the last one that is known to be done
  std::uint64_t saved = 0;  // newest save; `start` where none was added
  double seconds = 0;       // in its steps, up to `last`
  bool complete = false;    // it said that it reached its end
};

// Exit codes of a job: stopped as asked and saved; ended by a signal, this and its number.
constexpr int kStoppedCode = 12, kSignalBase = 128;

struct Attempt {
  JobEnd end;
  double seconds = 0;                 // from its start to its end
  std::optional<AttemptSteps> steps;  // none: no event of steps came
  std::optional<JobEvent> hang;       // the first report
  JobFindings findings;
  std::string launcher_text;  // that was not shown

  void add(const JobEvent& event);
};

}  // namespace sluice
