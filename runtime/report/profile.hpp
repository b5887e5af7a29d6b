// Profile: measured seconds per action, gathered from all ranks, in the form simulate() takes.
#pragma once

#include <vector>

#include <sluice/pipeline.hpp>
#include <sluice/simulate.hpp>

#include "runtime/engine/engine_config.hpp"

namespace sluice {

struct StepOutcome;  // runtime/engine/engine.hpp

// The mean seconds of a stage's actions; what Profile::gather() says of I and W holds here.
[[nodiscard]] StageTimes mean_times(const ActionSeconds& sums);

// Adds up the outcomes of steps; one per rank.
class Profile {
 public:
  void add(const StepOutcome& outcome);
  // Collective: mean seconds per action of every global stage of replica 0, on every rank. Where no
  // backward was split, all of it counts as input half, and the weight half is 0. Where some were,
  // the mean weight half is subtracted from the others.
  [[nodiscard]] std::vector<StageTimes> gather(Pipeline& pipeline) const;

 private:
  std::vector<ActionSeconds> sums_;
};

}  // namespace sluice
