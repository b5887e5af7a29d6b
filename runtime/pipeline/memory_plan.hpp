// What each rank of a pipeline holds of its device, added up before anything is allocated, from
// what stages describe and what plans have slots for. Internal to the layout.
#pragma once

#include <cstddef>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/options.hpp>

#include "runtime/job/job_context.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

struct MemoryPlan {
  RankMemory memory;
  std::size_t operator_bytes = 0;  // JobLayout::operator_bytes
};

// Of a layout that is complete but for its memory.
[[nodiscard]] MemoryPlan plan_memory(const JobLayout& layout, const PipelineOptions& options,
                                     const DataSource& source, int rank);

// A GPU that cannot hold what its ranks will ask for is refused here, on every rank alike, instead
// of in the middle of the start: Error(kDevice) with the tables of its ranks. So is a host with
// less memory than its ranks on CPUs will ask for, which would give out more than it has and end
// them later. `devices` of all ranks of the job.
void require_memory(const std::vector<RankDevice>& devices, const JobLayout& layout);

}  // namespace sluice
