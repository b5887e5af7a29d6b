// A run of `sluice train`, from its options to its summary.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include <sluice/checkpoint.hpp>
#include <sluice/pipeline.hpp>

#include "runtime/job/guard.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/report/layer_table.hpp"
#include "runtime/train/last_steps.hpp"
#include "runtime/train/run_start.hpp"
#include "runtime/train/schedule_choice.hpp"
#include "runtime/train/step_reports.hpp"
#include "runtime/train/stop_request.hpp"
#include "runtime/train/train_data.hpp"
#include "runtime/train/train_options.hpp"

namespace sluice {

class Training {
 public:
  // `world`, `options` and `stop` outlive this.
  Training(Communicator& world, const TrainOptions& options, StopRequest& stop);
  ~Training();
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  void run();
  // Whether the run was asked to stop before its last step. The same on all ranks.
  [[nodiscard]] bool stopped() const { return stopped_; }

 private:
  [[nodiscard]] bool first() const { return world_.rank() == 0; }
  [[nodiscard]] int job_ranks() const;
  [[nodiscard]] int pipeline_depth() const;
  [[nodiscard]] bool keeps_replicas_together() const;
  [[nodiscard]] LayerTable layers() const;
  [[nodiscard]] StageFactory stages() const;
  void require_same_options(Collectives& job) const;
  bool prepare();
  void plan_pipeline();
  void dry_run(Communicator& comm, ControlChannel& control);
  void make_pipeline();
  void open_metrics();
  void open_saver();
  [[nodiscard]] std::string describe_ranks(Collectives& job, const JobLayout& layout) const;
  void describe(const JobLayout& layout, const std::string& ranks) const;
  void steps();
  void one_step();
  [[nodiscard]] std::filesystem::path last_resumable() const;
  [[nodiscard]] bool asked_anywhere();
  void validate(std::int64_t samples);

  Communicator& world_;
  const TrainOptions& options_;
  StopRequest& stop_;
  ScheduleChoice choice_;
  TrainData data_;
  PipelineOptions pipeline_options_;
  std::unique_ptr<Pipeline> pipeline_;
  RunStart start_;
  std::optional<StepReports> reports_;
  std::optional<LastSteps> last_steps_;
  std::optional<Checkpointer> saver_;
  bool stopped_ = false;
};

}  // namespace sluice
