// The reductions and the optimizer of a training plan: sums over replicas and tied uses, the norm,
// the check for values that are not finite, clipping, the update. Internal to the pipeline.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
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

// What happens at the end of a batch.
enum class BatchEnd {
  kAccumulate,  // gradients stay on each rank, for the step's next batch
  kGradients,   // they are summed and scaled; nothing is updated
  kUpdate,      // parameters are updated too
};

// The results of a step so far, the same on every rank.
struct StepTotals {
  double loss = 0, loss_sum = 0, targets = 0, grad_norm = 0;  // of all the step's batches
  double window_seconds = 0;          // longest time from step start to the norm, over all ranks
  double busy_seconds = 0;            // summed over all ranks
  double finite = 1;                  // 0: some loss or gradient is not; nothing was updated
  double first_nonfinite_index = -1;  // among the job's losses or parameters; -1: of their mean
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

  // Before each batch of `micro_batches`, the same number on all ranks. `started`: its start in
  // steady_seconds(). `outcome` is the engine's, filled while it runs.
  void begin(std::uint64_t step, double started, int micro_batches, BatchEnd end,
             const StepOutcome& outcome);
  // By what the loss of a batch with `targets` counted targets is divided while gradients are
  // computed: the targets of the step's first batch. The others' count when the step ends.
  [[nodiscard]] double divisor(double targets) const;
  FinalGradients* final_gradients(int stage) override;
  void reduce_grad(int stage) override;
  void reduce_tied(int group) override;
  void measure() override;
  // Collective over the job. Ends the batch. Where the step is refused, parameters and optimizer
  // state stay as they are.
  void optimizer() override;
  // Collective over the job. The update after a batch that ended with kGradients, from the
  // gradients as they are now.
  void update(double started);
  [[nodiscard]] const StepTotals& totals() const { return totals_; }
  // [rank of the job] Of the last batch; on rank 0 of the job, else empty.
  [[nodiscard]] std::span<const double> busy_seconds() const { return busy_; }
  // [pipeline rank] of replica 0; on rank 0 of the job.
  [[nodiscard]] const std::vector<int>& peaks() const { return peaks_; }

  // `mine` is called once a step when the record is packed; empty: no bits.
  void set_flags(std::function<std::uint32_t()> mine) { flags_ = std::move(mine); }

  // Whether the last batch ended a step that may not change anything.
  [[nodiscard]] bool refused() const {
    return totals_.other_rate_rank >= 0 || totals_.finite == 0 || totals_.targets <= 0;
  }
  // Why, the same on all ranks: Error(kMismatch) where learning rates differ, Error(kData) where no
  // target counts, else Error(kNumeric).
  [[nodiscard]] Error refusal() const;

  // Ends the step: forgets its batches and gradients. Those that their stage overwrites stay as
  // they are until it does; others are zeroed.
  void clear();
  [[nodiscard]] std::vector<OptimizerState> optimizer_state();

 private:
  struct OwnedParameter {
    int stage = 0;
    Parameter* parameter = nullptr;
  };
  // Exchanges the ranks' records; fills totals_.
  void exchange();
  void make_optimizers(std::span<const OwnedParameter> owners);
  void pack_record();
  void reduce_records();
  // Multiplies gradients by `factor`.
  void scale_gradients(double factor);
  void apply();
  // Refuses a step whose finite numbers have a sum or a quotient that is not.
  void check_means();

  JobContext& job_;
  const JobLayout& layout_;
  const PipelineOptions& options_;
  ComputeContext& compute_;
  TiedUses& ties_;
  std::vector<StageBinding> stages_;
  std::optional<BucketedSums> sums_;  // where NCCL sums over replicas
  // Parameters with equal settings.
  struct Updated {
    double rate_scale = 1;
    std::optional<float> weight_decay;  // in place of the configuration's
    int first_stage = 0, last_stage = 0;
    std::vector<Parameter*> parameters;
    std::unique_ptr<Optimizer> optimizer;
    // "the optimizer of stage 1 (2 parameters, the first 'w1')".
    [[nodiscard]] std::string name() const;
    [[nodiscard]] std::vector<OptimizerState> state() const;
  };
  std::vector<Updated> updated_;
  std::vector<bool> frozen_;                         // [owned parameter]
  std::vector<std::span<const float>> owned_grads_;  // of owned parameters, in global order
  HostMirror mirror_;                                // of gradients that MPI sums
  HostBuffer squares_;                               // [owned parameter], written by the device

  // Per rank: window, busy, peak, flags, learning rate, then (sum, weight) per micro-batch, then
  // squares per owned parameter.
  std::vector<double> record_, records_;
  std::vector<std::size_t> next_;  // [pipeline rank] index of its next square
  std::size_t loss_offset_ = 5, square_offset_ = 0;
  int micro_batches_ = 0;  // of the batch
  BatchEnd end_ = BatchEnd::kUpdate;
  // Of the step's earlier batches.
  struct Earlier {
    double loss_sum = 0, targets = 0;
    double divisor = 0;  // of all of them; 0: there are none
    double busy_seconds = 0, window_seconds = 0;
  };
  Earlier earlier_;
  double factor_ = 1;  // the gradients are still to be multiplied by it
  std::vector<int> peaks_;
  std::vector<double> busy_;
  StepTotals totals_;
  std::function<std::uint32_t()> flags_;
  const StepOutcome* outcome_ = nullptr;
  std::uint64_t step_ = 0;
  double started_ = 0;
};

}  // namespace sluice
