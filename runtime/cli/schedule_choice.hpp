// The order of a training and the layers of each stage: by name, from a file, or searched for.
#pragma once

#include <memory>
#include <string>

#include <sluice/schedule.hpp>
#include <sluice/stage.hpp>

#include "comm/group/collectives.hpp"
#include "runtime/cli/train_options.hpp"

namespace sluice {

struct ScheduleChoice {
  std::shared_ptr<const Schedule> order;  // null: PipelineOptions::Order names it
  Partition partition;
  std::string remark;  // one line on the origin of a searched order; empty: by name or file
};

// For a pipeline of `ranks` ranks. Collective over all ranks of the job. For --schedule auto rank 0
// searches and broadcasts the result. The costs of the search are the layers' products, messages
// take no time, and at most as many micro-batches are in flight as 1f1b holds. Throws Error(kUsage)
// where layers or stages cannot be placed.
[[nodiscard]] ScheduleChoice choose_schedule(const TrainOptions& options, int ranks,
                                             Collectives& world);

}  // namespace sluice
