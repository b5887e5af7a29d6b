// What a run says of its steps while it runs: progress, metrics, slow ranks, the supervisor's
// events; what its summary needs of them; and what is measured of the last steps alone.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <sluice/pipeline.hpp>

#include "comm/group/communicator.hpp"
#include "runtime/process/supervisor_events.hpp"
#include "runtime/program/train/train_options.hpp"
#include "runtime/report/job_gpus.hpp"
#include "runtime/report/metrics.hpp"
#include "runtime/report/stragglers.hpp"
#include "runtime/report/timeline.hpp"

namespace sluice {

class StepReports {
 public:
  // All but `skipped`, steps of earlier runs, outlive this.
  StepReports(Pipeline& pipeline, Communicator& world, const TrainOptions& options,
              std::vector<std::uint64_t> skipped);

  // On rank 0. `run` becomes the first line of --metrics; `resumed`: the step that the run goes on
  // from.
  void open_metrics(const std::string& run, std::optional<std::uint64_t> resumed);
  // Collective. Before the first step, with the newest save that a run can go on from.
  void begin(const std::filesystem::path& save);
  // Collective. Throws Error(kNumeric) where more steps are skipped than --max-skips allows.
  void step(const StepReport& report);

  // On other ranks than 0 nothing happens.
  void steps_done();                              // no further step comes
  void saved(const std::filesystem::path& save);  // the newest save that a run can go on from
  void end();                                     // the last step is saved
  void note(const std::string& line);
  // `done` of `samples` windows of a validation; then its loss, or nothing where it was stopped.
  void validation(std::int64_t done, std::int64_t samples);
  void validated(std::optional<double> loss, std::int64_t samples);

  // Sums over the steps of this run, on rank 0.
  struct Sums {
    double seconds = 0, tokens = 0, bubble = 0;
    std::uint64_t steps = 0;
  };
  [[nodiscard]] const Sums& sums() const { return sums_; }
  [[nodiscard]] double train_loss() const { return train_loss_; }  // of the last step that counts
  [[nodiscard]] std::optional<double> validation_loss() const { return validation_loss_; }
  [[nodiscard]] const std::vector<std::uint64_t>& skipped() const { return skipped_; }
  // After begin().
  [[nodiscard]] std::optional<CardPeaks> card() const { return gpus_->card(); }

 private:
  [[nodiscard]] bool first() const { return world_.rank() == 0; }
  std::vector<int> work_of_ranks();
  void look_for_stragglers();
  void read_gpus(std::uint64_t step);
  void count_skip(std::uint64_t step);
  [[nodiscard]] StepRecord record_of(const StepReport& report) const;

  Pipeline& pipeline_;
  Communicator& world_;
  const TrainOptions& options_;
  std::optional<MetricsWriter> metrics_;
  std::optional<Progress> progress_;      // on rank 0, while there are steps or a validation
  std::optional<Stragglers> stragglers_;  // on rank 0
  std::optional<JobGpus> gpus_;
  std::vector<GpuState> gpu_states_;  // after the last step; empty: not read then
  RunEvents events_;                  // on rank 0
  Sums sums_;
  double train_loss_ = 0;
  std::optional<double> validation_loss_;
  std::vector<std::uint64_t> skipped_;  // steps, of earlier runs as well
};

// The timeline of the last steps, and the time of their operators.
class LastSteps {
 public:
  // Before the first step. Both outlive this.
  LastSteps(Pipeline& pipeline, const TrainOptions& options);

  // Collective.
  void before_step();
  void after_step(const StepReport& step);
  // Collective; after the last step.
  void sum_operators();
  void write_timeline(const LayerTable& layers);  // to --trace

  // Of the timeline's times, in seconds.
  [[nodiscard]] double clock_error() const { return clock_error_; }
  // A table of the operators of all ranks; empty where they were not measured.
  [[nodiscard]] std::string operators(std::optional<CardPeaks> card) const;

 private:
  Pipeline& pipeline_;
  const TrainOptions& options_;
  std::uint64_t first_;  // of these steps
  Timeline timeline_;
  double clock_error_ = 0;
  std::vector<OperatorTime> operators_;  // of all ranks
  int profiled_steps_ = 0;
  double profiled_seconds_ = 0;
};

}  // namespace sluice
