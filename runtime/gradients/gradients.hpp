// What a training plan's reductions and optimizer do: sums over replicas and tied uses, norm,
// guard, clip, update. Internal to the pipeline.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <sluice/options.hpp>

#include "runtime/engine/engine.hpp"
#include "runtime/gradients/bucketed_sums.hpp"
#include "runtime/gradients/tied_uses.hpp"
#include "runtime/job/host_mirror.hpp"
#include "runtime/job/job_context.hpp"
#include "runtime/job/nccl_routes.hpp"
#include "runtime/layout/job_layout.hpp"
#include "stages/operators/optimizer.hpp"

namespace sluice {

// What a step came to, the same on every rank.
struct StepTotals {
  double loss = 0, targets = 0, grad_norm = 0;
  double window_seconds = 0;  // longest time from step start to the norm, over all ranks
  double busy_seconds = 0;    // summed over all ranks
  double finite = 1;          // 0: the step was refused; `culprit` says where
  double culprit = -1;        // index into the job's losses or parameters
  double culprit_is_loss = 0;
};

class GradientSync : public StepActions {
 public:
  // All that is named outlives this object; `nccl` may be null. `stages` are this rank's,
  // ascending.
  GradientSync(JobContext& job, const JobLayout& layout, const PipelineOptions& options,
               ComputeContext& compute, NcclRoutes* nccl, TiedUses& ties,
               std::vector<StageBinding> stages);

  // Before each step. `outcome` is the engine's, filled while it runs.
  void begin(std::uint64_t step, double started, const StepOutcome& outcome);
  FinalGradients* final_gradients(int stage) override;
  void reduce_grad(int stage) override;
  void reduce_tied(int group) override;
  void measure() override;
  // Throws Error(kNumeric) on every rank, before any parameter moved.
  void optimizer() override;
  [[nodiscard]] const StepTotals& totals() const { return totals_; }
  // [pipeline rank] of replica 0; on rank 0 of the job.
  [[nodiscard]] const std::vector<int>& peaks() const { return peaks_; }

  void zero_grads();
  [[nodiscard]] Optimizer& optimizer_state() { return *optimizer_; }
  [[nodiscard]] std::vector<std::pair<int, Parameter*>> owned() const { return owned_; }

 private:
  void pack_record();
  void reduce_records();
  [[noreturn]] void refuse() const;

  JobContext& job_;
  const JobLayout& layout_;
  const PipelineOptions& options_;
  ComputeContext& compute_;
  TiedUses& ties_;
  std::vector<StageBinding> stages_;
  std::optional<BucketedSums> sums_;  // where they go over NCCL
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<std::pair<int, Parameter*>> owned_;    // (stage, parameter) in global order
  std::vector<std::span<const float>> owned_grads_;  // theirs
  HostMirror mirror_;                                // of gradients on their way over MPI
  HostBuffer workspace_;
  std::span<float> floats_;  // of workspace_
  HostBuffer squares_;       // [owned parameter], written by the device

  // Per rank: window, busy, peak, then (sum, weight) per micro-batch, then squares per owned
  // parameter.
  std::vector<double> record_, records_;
  std::vector<std::size_t> next_;  // [pipeline rank] where its next square stands
  std::size_t loss_offset_ = 3, square_offset_ = 0;
  std::vector<int> peaks_;
  StepTotals totals_;
  const StepOutcome* outcome_ = nullptr;
  std::uint64_t step_ = 0;
  double started_ = 0;
};

}  // namespace sluice
