// Which order a training follows and which layers sit on which stage: by name, from a file, or
// searched for.
#pragma once

#include <memory>
#include <string>

#include <sluice/schedule.hpp>
#include <sluice/stage.hpp>

#include "comm/group/collectives.hpp"
#include "runtime/cli/train_options.hpp"

namespace sluice {

struct ScheduleChoice {
  std::shared_ptr<const Schedule> order;  // null: TrainOptions::schedule and chunks say it
  Partition partition;
  std::string remark;  // one line on where a searched order comes from; empty: by name or file
};

// For a pipeline of `ranks` ranks. Collective over all ranks of the job: of --schedule auto rank 0
// searches, with the layers' products as costs, messages that take no time and no more
// micro-batches in flight than 1f1b holds, and tells the others. Throws Error(kUsage) for what
// cannot be placed.
[[nodiscard]] ScheduleChoice choose_schedule(const TrainOptions& options, int ranks,
                                             Collectives& world);

}  // namespace sluice
