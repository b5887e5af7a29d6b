// The memory that each rank needs, known before anything is allocated: the sum of
// what stages describe and of what the plans' slots take. Internal to the layout.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/options.hpp>

#include "runtime/layout/job_layout.hpp"

namespace sluice {

// Of the ranks of this pipeline alone. Requires a layout that is complete except for its memory.
// kTooManyBytes where no std::size_t holds a sum, which require_memory() refuses.
[[nodiscard]] MemoryTable plan_memory(const JobLayout& layout, const PipelineOptions& options,
                                      const DataSource& source);

// What the ranks that share memory need of it: of a GPU what is free, of a host and of a control
// group what they have, which ranks on GPUs take too. `devices`: [rank of the job]; `memory`: of
// all places.
[[nodiscard]] std::vector<SharedMemory> shared_memory(const std::vector<RankDevice>& devices,
                                                      const Topology& topology,
                                                      const MemoryTable& memory);

// Refuses, on every rank alike, MemoryTable::shared that is not enough, before anything is
// allocated: Error(kDevice) with the tables of its ranks. The system would end them later.
void require_memory(const std::vector<RankDevice>& devices, const Topology& topology,
                    const MemoryTable& memory);

// Refuses a plan of which a rank needs more than `limit` bytes on its device, 0 being no limit:
// Error(kUsage) with the rank that needs most, the largest part of that, and `advice`.
void require_within(std::size_t limit, const MemoryTable& memory, std::string_view advice);

}  // namespace sluice
