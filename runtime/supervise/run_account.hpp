// What became of the time and the steps of a supervised run.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/supervise/attempt.hpp"

namespace sluice {

struct RunTotals {
  double step_seconds = 0;       // in steps whose result is in the last state
  std::uint64_t steps_lost = 0;  // that were done and had to be done again, or are missing
};

// Steps between two reports of a job (a second) are not known: time and steps that were lost are a
// little more.
class RunAccount {
 public:
  void add(const AttemptSteps& steps) { attempts_.push_back(steps); }
  [[nodiscard]] bool empty() const { return attempts_.empty(); }
  [[nodiscard]] RunTotals totals() const;

 private:
  std::vector<AttemptSteps> attempts_;
};

}  // namespace sluice
