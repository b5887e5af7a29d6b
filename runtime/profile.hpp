// Profile: measured seconds per action, gathered from all ranks, in the form simulate() takes.
#pragma once

#include <vector>

#include "runtime/pipeline.hpp"
#include "schedules/simulate.hpp"

namespace sluice {

// Adds up the outcomes of steps; one per rank.
class Profile {
 public:
  void add(const StepOutcome& outcome);
  // Collective: mean seconds per action of every global stage of replica 0, on every rank. A whole
  // backward counts as input half with a weight half of 0.
  [[nodiscard]] std::vector<StageTimes> gather(Pipeline& pipeline) const;

 private:
  std::vector<ActionSeconds> sums_;
};

}  // namespace sluice
