// The reductions and the optimizer of a training plan: sums over replicas and tied uses, the norm,
// the check for values that are not finite, clipping, the update. Internal to the pipeline.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
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

// The results of a step, the same on every rank.
struct StepTotals {
  double loss = 0, targets = 0, grad_norm = 0;
  double window_seconds = 0;          // longest time from step start to the norm, over all ranks
  double busy_seconds = 0;            // summed over all ranks
  double finite = 1;                  // 0: some loss or gradient is not; nothing was updated
  double first_nonfinite_index = -1;  // among the job's losses or parameters
  double nonfinite_is_loss = 0;       // 1: the index is a loss
  double flags = 0;                   // bits that any rank had set, as a number below 2^32
  // The first rank of the job whose learning rate is another than rank 0's, and both; -1: none.
  // Then nothing was updated.
  double other_rate_rank = -1, rate = 0, other_rate = 0;
};

class GradientSync : public StepActions {
 public:
  // Everything named outlives this; `nccl` may be null. `stages` are this rank's, ascending.
  GradientSync(JobContext& job, const JobLayout& layout, const PipelineOptions& options,
               ComputeContext& compute, NcclRoutes* nccl, TiedUses& ties,
               std::vector<StageBinding> stages);

  // Before each step. `started`: its start in steady_seconds(). `outcome` is the engine's, filled
  // while it runs.
  void begin(std::uint64_t step, double started, const StepOutcome& outcome);
  FinalGradients* final_gradients(int stage) override;
  void reduce_grad(int stage) override;
  void reduce_tied(int group) override;
  void measure() override;
  // Collective over the job. Where totals().finite is 0 or learning rates differ, parameters and
  // optimizer state stay as they are.
  void optimizer() override;
  [[nodiscard]] const StepTotals& totals() const { return totals_; }
  // [pipeline rank] of replica 0; on rank 0 of the job.
  [[nodiscard]] const std::vector<int>& peaks() const { return peaks_; }

  // `mine` is called once a step when the record is packed; empty: no bits.
  void set_flags(std::function<std::uint32_t()> mine) { flags_ = std::move(mine); }

  // Why the last step changed nothing, the same on all ranks: Error(kMismatch) where learning rates
  // differ, else Error(kNumeric).
  [[nodiscard]] Error refusal() const;

  void zero_grads();
  [[nodiscard]] Optimizer& optimizer_state() { return *optimizer_; }

 private:
  void pack_record();
  void reduce_records();

  JobContext& job_;
  const JobLayout& layout_;
  const PipelineOptions& options_;
  ComputeContext& compute_;
  TiedUses& ties_;
  std::vector<StageBinding> stages_;
  std::optional<BucketedSums> sums_;  // where NCCL sums over replicas
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<std::span<const float>> owned_grads_;  // of owned parameters, in global order
  HostMirror mirror_;                                // of gradients that MPI sums
  HostBuffer workspace_;
  std::span<float> floats_;  // of workspace_
  HostBuffer squares_;       // [owned parameter], written by the device

  // Per rank: window, busy, peak, flags, learning rate, then (sum, weight) per micro-batch, then
  // squares per owned parameter.
  std::vector<double> record_, records_;
  std::vector<std::size_t> next_;  // [pipeline rank] index of its next square
  std::size_t loss_offset_ = 5, square_offset_ = 0;
  std::vector<int> peaks_;
  StepTotals totals_;
  std::function<std::uint32_t()> flags_;
  const StepOutcome* outcome_ = nullptr;
  std::uint64_t step_ = 0;
  double started_ = 0;
};

}  // namespace sluice
