// The calls of a pipeline that only compute forward: evaluation and inference, over any number of
// samples, in rounds that take the memory of one. Internal to the pipeline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <sluice/pipeline.hpp>

#include "runtime/pipeline/pipeline_calls.hpp"
#include "runtime/pipeline/pipeline_parts.hpp"

namespace sluice {

// Outputs of the last stage over all micro-batches and replicas, where the caller wants them.
class OutputGather {
 public:
  // Both outlive it; the layout has micro-batches of the largest number of samples for all
  // positions that come. Reuses its memory from call to call.
  OutputGather(JobContext& job, const JobLayout& layout) : job_(job), layout_(layout) {}

  // Throws Error(kUsage), the same on all ranks, for outputs that have no dimension of samples.
  void require_samples() const;

  // `positions` of each sample, as UnitShape has them.
  void begin(std::int64_t positions);
  // On the last stage's rank, the first of those that share it: the outputs of the next
  // micro-batch, in host memory.
  void add(std::span<const Tensor> outputs);
  // Collective over the job. All replicas' outputs one after the other, on rank `rank`, or on all.
  void gather_to(int rank);
  void gather_to_all();
  // What this rank has; empty where it has nothing. Valid until begin().
  [[nodiscard]] std::span<const Tensor> tensors() const { return tensors_; }

 private:
  struct Output {
    TensorSpec spec;  // dimension 0 grows
    std::vector<std::byte> bytes;
  };
  [[nodiscard]] std::vector<TensorSpec> specs(std::int64_t positions) const;
  static void append(Output& to, const TensorSpec& spec, std::span<const std::byte> bytes);
  void show();

  JobContext& job_;
  const JobLayout& layout_;
  std::int64_t positions_ = 0;
  std::vector<Output> mine_, all_;
  std::vector<Tensor> tensors_;
};

class ForwardCalls {
 public:
  ForwardCalls(PipelineParts& parts, PipelineCalls& calls);

  // As Pipeline's.
  EvaluationReport evaluate(const Batch& batch);
  EvaluationReport evaluate(const DataSource& other, std::int64_t samples);
  std::span<const Tensor> infer(const Batch& batch, const InferOptions& how);

 private:
  // The micro-batches of a round, in host memory; none are asked for in rounds after the last
  // sample.
  using Load = std::function<const BatchLoader::Batch&(std::span<const SampleRange>)>;
  using OnOutputs = std::function<void(SampleRange samples, std::span<const Tensor> outputs)>;
  // Collective over the pipeline: samples of this replica; `most`: of the one that has most. Where
  // replicas have parts of the parameters, also over the replicas. Returns the sum of the losses,
  // in the order of the samples, on the last stage's rank; zero elsewhere, without samples, and for
  // Phase::kGenerate. `on_outputs`: as StepRequest's, with the micro-batch's samples.
  // `positions`: of each sample, as UnitShape has them.
  LossResult run_rounds(Phase phase, SampleRange samples, std::int64_t most, std::int64_t positions,
                        const Load& load, const OnOutputs& on_outputs);
  // The same of a round that has been read. `micro_batches`: of the replica that has most.
  void run_round(Phase phase, int micro_batches, std::int64_t positions,
                 const BatchLoader::Batch& batch,
                 const std::function<void(int, std::span<const Tensor>)>* on_outputs,
                 LossResult& total);
  [[nodiscard]] std::int64_t round_samples() const;
  // `share_of`: the samples of each virtual replica.
  EvaluationReport run_evaluation(const std::string& who,
                                  const std::function<SampleRange(int number)>& share_of,
                                  const Load& load);
  // As PipelineParts::check_batch(), of this replica's share of the feed's batch.
  void check_share(bool targets);
  void require_loss() const;
  void require_answers(const InferOptions& how) const;

  PipelineParts& parts_;
  PipelineCalls& calls_;
  std::vector<SampleRange> ranges_;  // of a round
  BatchMemory read_;                 // of a round, from a source
  bool first_read_ = true;           // none has been read
  OutputGather outputs_;
};

}  // namespace sluice
