// Times of a schedule's actions as a run measured them.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "schedules/simulate.hpp"

namespace sluice {

struct MeasuredCosts {
  std::vector<StageTimes> stages;  // [stage of the run], milliseconds per action
  double message = 0;              // milliseconds
  std::string source;              // one line: the file, what was averaged, what was assumed
};

// Reads what `sluice train --trace FILE` writes. Of each stage and kind the mean over all steps and
// replicas; a backward that was not parted counts `input_share` (0 to 1) as its input half. A
// message takes what the quickest one took from the end of the action that made its tensor to its
// receive's end; 0 where the trace shows none. Throws Error(kData) naming the file and what is
// wrong with it or missing.
[[nodiscard]] MeasuredCosts read_measured_costs(const std::filesystem::path& path,
                                                double input_share);

}  // namespace sluice
