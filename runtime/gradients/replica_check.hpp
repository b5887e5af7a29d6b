// Copies of parameters, tied uses and replicas, compared. Internal to the pipeline.
#pragma once

#include <cstdint>
#include <span>

#include "runtime/engine/engine.hpp"
#include "runtime/gradients/tied_uses.hpp"
#include "runtime/job/host_mirror.hpp"
#include "runtime/job/job_context.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

// Collective over the job: digests of every parameter against replica 0's, and of every tied copy
// against its owner's. Throws Error(kMismatch) naming the parameter and both holders.
void check_replicas(JobContext& job, const JobLayout& layout, const TiedUses& tied,
                    std::span<const StageBinding> stages, HostMirror& mirror, std::uint64_t step);

}  // namespace sluice
