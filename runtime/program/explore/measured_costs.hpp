// Times of a schedule's actions as a run measured them.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <sluice/simulate.hpp>

namespace sluice {

struct MeasuredCosts {
  std::vector<StageTimes> stages;  // [stage of the run], milliseconds per action
  // [layer of the model], embedding and head included, milliseconds; empty: the file does not say
  // the layers, as those of Sluice 0.2 do not.
  std::vector<StageTimes> layers;
  std::vector<int> first_layer;  // LayerTable::first_layer of runtime/report/timeline.hpp; so below
  int tensor_ranks = 1, tensor_shards = 1;
  std::vector<StageCollectives> collectives;
  double message = 0;  // milliseconds
  std::string source;  // one line: the file, averages, assumptions
};

// Reads what `sluice train` writes for --trace; `input_share` (0 to 1) of a backward that was not
// split counts as its input half. `source` names the assumptions.
//
// Each stage's times are means over all steps and replicas. The time of a message is that of the
// quickest one, from the end of the action that made its tensor to the end of its receive; 0 where
// the trace has none.
//
// Throws Error(kData) naming the file and the fault.
[[nodiscard]] MeasuredCosts read_measured_costs(const std::filesystem::path& path,
                                                double input_share);

}  // namespace sluice
