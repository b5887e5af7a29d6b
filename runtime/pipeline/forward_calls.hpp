// The calls of a pipeline that only compute forward: evaluation and inference. Internal to the
// pipeline.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include <sluice/pipeline.hpp>

#include "runtime/pipeline/forward_rounds.hpp"
#include "runtime/pipeline/output_gather.hpp"
#include "runtime/pipeline/pipeline_calls.hpp"
#include "runtime/pipeline/pipeline_parts.hpp"

namespace sluice {

class ForwardCalls {
 public:
  ForwardCalls(PipelineParts& parts, PipelineCalls& calls);

  // As Pipeline's.
  EvaluationReport evaluate(const Batch& batch);
  EvaluationReport evaluate(const DataSource& other, std::int64_t samples);
  std::span<const Tensor> infer(const Batch& batch, const InferOptions& how);

 private:
  EvaluationReport run_evaluation(const std::string& who, SampleRange samples,
                                  std::int64_t least_rounds, const ForwardRounds::Load& load);
  // As PipelineParts::check_batch(), of this replica's share of the feed's batch.
  void check_share(bool targets);
  void require_loss() const;
  void require_answers(const InferOptions& how) const;

  PipelineParts& parts_;
  PipelineCalls& calls_;
  ForwardRounds rounds_;
  SourceRounds source_rounds_;
  OutputGather outputs_;
};

}  // namespace sluice
