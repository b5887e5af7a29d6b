// What ranks tell each other at the end of a batch: losses, squares of gradients, times. Internal
// to the pipeline.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include <sluice/options.hpp>

#include "runtime/engine/engine.hpp"
#include "runtime/gradients/step_state.hpp"
#include "runtime/job/job_context.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

class RecordExchange {
 public:
  // Everything named outlives this.
  RecordExchange(JobContext& job, const JobLayout& layout, const PipelineOptions& options);

  // Collective over the job: fills step.totals. `squares`: of this rank's owned parameters; empty
  // where gradients are not complete.
  void exchange(StepState& step, const StepOutcome& outcome, std::span<const double> squares);
  // Of this rank in the last exchange.
  [[nodiscard]] double learning_rate() const { return mine_[4]; }
  // [rank of the job] Of the last batch; on rank 0 of the job, else empty.
  [[nodiscard]] std::span<const double> busy_seconds() const { return busy_; }
  // [pipeline rank] of replica 0; on rank 0 of the job.
  [[nodiscard]] const std::vector<int>& peaks() const { return peaks_; }
  // `mine` is called once an exchange; empty: no bits.
  void set_flags(std::function<std::uint32_t()> mine) { flags_ = std::move(mine); }

 private:
  void pack(const StepState& step, const StepOutcome& outcome, std::span<const double> squares);
  void reduce(StepState& step);
  void reduce_losses(StepState& step) const;
  void reduce_squares(StepTotals& totals);
  void reduce_ranks(StepTotals& totals);
  [[nodiscard]] const double* record(int replica, int rank) const;

  JobContext& job_;
  const JobLayout& layout_;
  const LearningRate& rate_;
  std::size_t first_loss_ = 5, first_square_ = 0;
  // Per rank: window, busy, peak, flags, learning rate, then (sum, weight) per micro-batch, then
  // squares per owned parameter.
  std::vector<double> mine_, all_;
  std::vector<std::size_t> next_;  // [pipeline rank] index of its next square
  std::vector<int> peaks_;
  std::vector<double> busy_;
  std::function<std::uint32_t()> flags_;
};

}  // namespace sluice
