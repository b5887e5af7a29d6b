// What replicas keep equal besides gradients: buffers of stages (ParameterSet::add_buffer), and the
// comparison of all copies of parameters. Internal to the pipeline.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <sluice/device.hpp>

#include "runtime/engine/stage_binding.hpp"
#include "runtime/gradients/gradient_folds.hpp"
#include "runtime/gradients/tied_uses.hpp"
#include "runtime/group/host_mirror.hpp"
#include "runtime/group/job_context.hpp"

namespace sluice {

// Of this rank's stages: kept while a step may still be refused, equal over replicas after it.
class StageBuffers {
 public:
  // Everything outlives it. Takes the memory of a copy, and of a TreeSum over `job.place.shares`.
  StageBuffers(JobContext& job, ComputeContext& compute, HostMirror& mirror,
               std::span<const StageBinding> stages);

  // Both in stream order: keeps the present values, and brings them back.
  void keep();
  void restore();
  // The kept value of a buffer; `value` itself where it is no buffer's.
  [[nodiscard]] Tensor kept(const Tensor& value) const;
  // After all forwards of the stage's leaf, where there are several: the buffers get the kept
  // values, in stream order, or after the last leaf the mean over the leaves, through the host.
  void fold(int stage, int leaf);
  // Collective over this rank's replicas: what Parameter::across asks for. Passes through the host.
  void join();

 private:
  struct Kept {
    int stage = 0;
    ParameterSet* set = nullptr;
    Buffer copy;
    TreeSum sum;
  };
  JobContext& job_;
  ComputeContext& compute_;
  HostMirror& mirror_;
  std::vector<Kept> kept_;  // of stages that have buffers
};

// Collective over the job. Compares digests of what this rank has of every parameter at rest: of
// what all replicas have with replica 0's, of those that all ranks that share the stage have whole
// with tensor rank 0's, and of every tied copy with its owner's. `stages` are this rank's. Throws
// Error(kMismatch) that names the parameter and both holders.
void check_replicas(JobContext& job, const ParameterTable& table, const TiedUses& tied,
                    std::span<const StageBinding> stages, HostMirror& mirror, std::uint64_t step);

}  // namespace sluice
