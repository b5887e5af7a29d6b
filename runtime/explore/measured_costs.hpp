// Times of a schedule's actions as a run measured them.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <sluice/simulate.hpp>

namespace sluice {

struct MeasuredCosts {
  std::vector<StageTimes> stages;  // [stage of the run], milliseconds per action
  double message = 0;              // milliseconds
  std::string source;              // one line: the file, what was averaged, what was assumed
};

// Reads what `sluice train` writes for --trace or --metrics; `input_share` (0 to 1) of a backward
// that was not parted counts as its input half. `source` says what was assumed.
//
// A trace gives each stage's mean over all steps and replicas. A message takes what the quickest
// one took from the end of the action that made its tensor to its receive's end; 0 where the trace
// shows none. Metrics give only how long ranks were busy: all stages alike, a third of it forward.
//
// Throws Error(kData) naming the file and what is wrong with it or missing.
[[nodiscard]] MeasuredCosts read_measured_costs(const std::filesystem::path& path,
                                                double input_share);

}  // namespace sluice
