// The calls of a pipeline that train. Internal to the pipeline.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include <sluice/pipeline.hpp>

#include "runtime/gradients/gradients.hpp"
#include "runtime/gradients/replica_state.hpp"
#include "runtime/pipeline/pipeline_calls.hpp"
#include "runtime/pipeline/pipeline_parts.hpp"

namespace sluice {

class TrainingSteps {
 public:
  // Collective over the job. Makes the optimizer, but for inference.
  TrainingSteps(PipelineParts& parts, PipelineCalls& calls);

  // As Pipeline's.
  StepReport train_step();
  StepReport train_on(Call call, const Batch& batch);
  StepReport optimizer_step();
  void drop_gradients();
  void set_learning_rate(const LearningRate& rate);
  // Null: it does not train.
  [[nodiscard]] GradientSync* gradients() const { return gradients_.get(); }
  // As StageBuffers'.
  [[nodiscard]] Tensor kept(const Tensor& value) const { return stage_buffers_->kept(value); }

 private:
  void prepare();
  void require_training() const;
  void require_no_gradients() const;
  void require_accumulable() const;
  // Of the next step.
  void require_rate() const;
  // Divides the shares of a step's batch into micro-batches. All ranks throw the same.
  void cut_step();
  // As PipelineParts::check_batch(), of this rank's part of the step's batch.
  [[nodiscard]] double count_targets(const BatchLoader::Batch& batch);
  // Runs this rank's part of a batch, of step.ranges.
  StepReport run_batch(const BatchLoader::Batch& batch, BatchEnd end);
  StepReport end_batch(BatchEnd end, double started);
  [[nodiscard]] StepReport report_of(double seconds) const;

  PipelineParts& parts_;
  PipelineCalls& calls_;
  StepState& step_;
  std::unique_ptr<BatchLoader> loader_;  // null: batches are handed in
  std::unique_ptr<GradientSync> gradients_;
  std::unique_ptr<StageBuffers> stage_buffers_;
};

}  // namespace sluice
