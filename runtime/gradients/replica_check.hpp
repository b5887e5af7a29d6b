// The comparison of copies of parameters: replicas and tied uses. Internal to the pipeline.
#pragma once

#include <cstdint>
#include <span>

#include "runtime/engine/engine.hpp"
#include "runtime/gradients/tied_uses.hpp"
#include "runtime/job/host_mirror.hpp"
#include "runtime/job/job_context.hpp"

namespace sluice {

// Collective over the job. Compares digests of every parameter with replica 0's, and of every tied
// copy with its owner's. `stages` are this rank's. Throws Error(kMismatch) that names the parameter
// and both holders.
void check_replicas(JobContext& job, const TiedUses& tied, std::span<const StageBinding> stages,
                    HostMirror& mirror, std::uint64_t step);

}  // namespace sluice
