// What is measured of the last steps of a run alone: their timeline, and the time of operators.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sluice/pipeline.hpp>

#include "runtime/report/job_gpus.hpp"
#include "runtime/report/layer_table.hpp"
#include "runtime/report/timeline.hpp"
#include "runtime/train/train_options.hpp"

namespace sluice {

// Operands of the model's products.
[[nodiscard]] ProductPrecision products_of(const TrainOptions& options);

class LastSteps {
 public:
  // Before the first step. Both outlive this.
  LastSteps(Pipeline& pipeline, const TrainOptions& options);

  // Collective.
  void before_step();
  void after_step(const StepReport& step);
  // Collective; after the last step.
  void sum_operators();
  void write_timeline(const LayerTable& layers);

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
