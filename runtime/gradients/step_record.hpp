// The state of a training step: its batches, and its results so far, with what ranks tell each
// other at the end of a batch: losses, squares of gradients, times. Internal to the pipeline.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/options.hpp>

#include "runtime/engine/engine.hpp"
#include "runtime/group/job_context.hpp"
#include "runtime/layout/job_layout.hpp"

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

struct StepState {
  std::uint64_t done = 0;  // steps
  // Of the present batch.
  std::uint64_t number = 0;         // of its step, from 1 on
  std::vector<SampleRange> ranges;  // micro-batches
  double targets_here = 0;          // on the last stage's ranks
  double started = 0;               // in steady_seconds()
  int micro_batches = 0;
  BatchEnd end = BatchEnd::kUpdate;
  StepTotals totals;
  // Of the step's earlier batches.
  struct Earlier {
    std::int64_t samples = 0;  // over all replicas
    double loss_sum = 0, targets = 0;
    double divisor = 0;  // of all of them; 0: there are none
    double busy_seconds = 0, window_seconds = 0;
  };
  Earlier earlier;
  bool gradients_ready = false;  // the last batch ended with kGradients
  double factor = 1;             // the gradients are still to be multiplied by it

  // Whether it has batches, but is not complete.
  [[nodiscard]] bool open() const { return gradients_ready || earlier.samples > 0; }
  // By what the loss of a batch with `counted` counted targets is divided while gradients are
  // computed: the targets of the step's first batch. The others' count when the step ends.
  [[nodiscard]] double divisor(double counted) const {
    if (earlier.divisor > 0) return earlier.divisor;
    return counted > 0 ? counted : 1;
  }
  // Whether the last batch ended a step that may not change anything.
  [[nodiscard]] bool refused() const {
    return totals.other_rate_rank >= 0 || totals.finite == 0 || totals.targets <= 0;
  }
  // Why, the same on all ranks: Error(kMismatch) where learning rates differ, Error(kData) where no
  // target counts, else Error(kNumeric).
  [[nodiscard]] Error refusal(const JobLayout& layout) const;

  void begin_batch(double started_at, int micro_batches_of_all, BatchEnd ends) {
    number = done + 1;
    started = started_at;
    micro_batches = micro_batches_of_all;
    end = ends;
    totals = {};
  }
  // The step's batches are complete, or dropped.
  void forget_batches() {
    gradients_ready = false;
    earlier = {};
  }
};

class RecordExchange {
 public:
  // Everything named outlives this.
  RecordExchange(JobContext& job, const JobLayout& layout, const PipelineOptions& options);

  // Of a parameter that a rank of this replica owns, the elements whose squares its record has,
  // [shard] of ParameterEntry::shards(): where replicas hold the same sums, the first of them has
  // them.
  [[nodiscard]] static std::vector<ElementRange> squared_parts(const ParameterEntry& entry,
                                                               int replica);

  // Collective over the job: fills step.totals. `squares`: sums over the blocks of squared_parts()
  // of this rank's owned parameters (sums_of_squares()); empty where gradients are not complete.
  void exchange(StepState& step, const StepOutcome& outcome, std::span<const double> squares);
  // Of this rank in the last exchange.
  [[nodiscard]] double learning_rate() const { return mine_[4]; }
  // [rank of the job] Of the last batch; on rank 0 of the job, else empty.
  [[nodiscard]] std::span<const double> busy_seconds() const { return busy_; }
  // [pipeline rank] of the pipeline of replica 0 and tensor rank 0; on rank 0 of the job.
  [[nodiscard]] const std::vector<int>& peaks() const { return peaks_; }
  // `mine` is called once an exchange; empty: no bits.
  void set_flags(std::function<std::uint32_t()> mine) { flags_ = std::move(mine); }

 private:
  void pack(const StepState& step, const StepOutcome& outcome, std::span<const double> squares);
  void pack_squares(const double* from);
  void reduce(StepState& step);
  void reduce_losses(StepState& step) const;
  void reduce_squares(StepTotals& totals);
  void list_squares();
  void reduce_ranks(StepTotals& totals);
  [[nodiscard]] const double* record(int rank) const;
  // Of the pipeline of this replica and tensor rank 0.
  [[nodiscard]] const double* record(int replica, int pipeline_rank) const;
  // Index in a record.
  [[nodiscard]] std::size_t first_square(int pipeline_rank) const;

  JobContext& job_;
  const JobLayout& layout_;
  const LearningRate& rate_;
  std::size_t losses_;  // of a record of the last stage's ranks
  // Records. Of each rank: window, busy, peak, flags, learning rate; then, of the last stage's
  // ranks, (sum, weight) per micro-batch; then squares of shards of owned parameters: one of each
  // that is here whole, else one per block.
  std::vector<double> mine_, all_;
  std::vector<std::size_t> ends_;    // [rank of the job] bytes of all_ up to the end of its record
  std::vector<const double*> next_;  // [rank of the job] its next square, in all_
  // Of shards of this rank's owned parameters: blocks here, and whether they are all.
  struct Packed {
    std::ptrdiff_t blocks = 0;
    bool whole = false;
  };
  std::vector<Packed> packed_;
  // In order of the norm.
  struct ShardSquares {
    Place place;                         // of replica 0
    double parameter = 0;                // its number
    bool counts = false, last = false;   // in the norm; of its parameter
    std::vector<std::size_t> doubles{};  // [replica]
  };
  std::vector<ShardSquares> shards_;
  std::vector<int> peaks_;
  std::vector<double> busy_;
  std::function<std::uint32_t()> flags_;
};

}  // namespace sluice
