// Copies of parameters: tied uses and replicas, kept equal and compared. Internal to the pipeline.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/engine.hpp"
#include "runtime/host_mirror.hpp"
#include "runtime/job_groups.hpp"
#include "runtime/layout.hpp"

namespace sluice {

// [group][use]: this rank's parameter of every tied use, null where the use is on another rank.
using TiedUses = std::vector<std::vector<Parameter*>>;
[[nodiscard]] TiedUses find_tied_parameters(const PipelineLayout& layout,
                                            std::span<const StageBinding> stages);

// Collective over the pipeline: owners' values to every further use; all stages are told that
// values changed.
void spread_tied_values(JobGroups& groups, const PipelineLayout& layout, const TiedUses& tied,
                        std::span<const StageBinding> stages, HostMirror& mirror);

// Collective over the job: digests of every parameter against replica 0's, and of every tied copy
// against its owner's. Throws Error(kMismatch) naming the parameter and both holders.
void check_replicas(JobGroups& groups, const PipelineLayout& layout, const TiedUses& tied,
                    std::span<const StageBinding> stages, HostMirror& mirror, std::uint64_t step);

}  // namespace sluice
