// The reductions and the update of a training plan: sums over replicas and tied uses, the norm,
// clipping. Internal to the pipeline.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include <sluice/options.hpp>

#include "runtime/engine/engine.hpp"
#include "runtime/gradients/gradient_folds.hpp"
#include "runtime/gradients/gradient_sums.hpp"
#include "runtime/gradients/micro_batch_sums.hpp"
#include "runtime/gradients/replica_state.hpp"
#include "runtime/gradients/share_sums.hpp"
#include "runtime/gradients/stage_optimizers.hpp"
#include "runtime/gradients/step_record.hpp"
#include "runtime/gradients/tied_uses.hpp"
#include "runtime/group/host_mirror.hpp"
#include "runtime/group/job_context.hpp"
#include "runtime/group/nccl_routes.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

class GradientSync : public StepActions {
 public:
  // Everything named outlives this; `nccl` may be null. `stages` are this rank's, ascending. `step`
  // is the one that runs.
  GradientSync(JobContext& job, const JobLayout& layout, const PipelineOptions& options,
               ComputeContext& compute, NcclRoutes* nccl, HostMirror& mirror, TiedUses& ties,
               StageBuffers& buffers, std::vector<StageBinding> stages, StepState& step);

  // Of the engine that runs the next batch, filled while it runs.
  void expect(const StepOutcome& outcome) { outcome_ = &outcome; }
  FinalGradients* final_gradients(int stage) override;
  void end_gradients(int stage) override;
  void fold_forward(int stage, int leaf) override;
  void fold_backward(int stage, int leaf) override;
  void reduce_grad(int stage) override;
  std::optional<TimeSpan> end_sums(int stage) override;
  void reduce_tied(int group) override;
  void measure() override;
  // Collective over the job. Ends the batch. Where the step is refused, parameters and optimizer
  // state stay as they are.
  void optimizer() override;
  // Collective over the job. The update after a batch that ended with kGradients, from the
  // gradients as they are now.
  void update(double started);
  // Ends the step: forgets its batches and gradients. Those that their stage overwrites stay as
  // they are until it does; others are zeroed.
  void clear();
  [[nodiscard]] RecordExchange& record() { return record_; }
  [[nodiscard]] const RecordExchange& record() const { return record_; }
  [[nodiscard]] std::vector<OptimizerState> optimizer_state() const { return optimizers_->state(); }
  [[nodiscard]] OffloadedState* offloaded_state() const { return optimizers_->offloaded(); }

 private:
  // Puts the sums of squares on the stream.
  void square_gradients();
  // Of the blocks of owned parameters, once the device has them; 0 of those that are frozen.
  [[nodiscard]] std::span<const double> squares();
  // Multiplies gradients by `factor`.
  void scale_gradients(double factor);
  void apply();
  // Refuses a step whose finite numbers have a sum or a quotient that is not.
  void check_means();

  const JobLayout& layout_;
  const PipelineOptions& options_;
  ComputeContext& compute_;
  TiedUses& ties_;
  StageBuffers& buffers_;
  std::vector<StageBinding> stages_;  // those that have parameters
  StepState& step_;
  RecordExchange record_;
  HostMirror& mirror_;
  std::optional<ShareSums> shares_;
  std::optional<GradientFolds> folds_;
  std::optional<GradientSums> sums_;
  std::optional<MicroBatchSums> micro_batches_;
  std::optional<StageOptimizers> optimizers_;
  // Of shards of owned parameters, in global order: what RecordExchange::squared_parts() says.
  std::vector<std::span<const float>> owned_grads_;
  std::vector<bool> frozen_;  // likewise
  HostBuffer squares_;        // doubles, of their blocks; written by the device
  const StepOutcome* outcome_ = nullptr;
};

}  // namespace sluice
