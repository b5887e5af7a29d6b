// Outputs of the last stage over all micro-batches and replicas, where the caller wants them.
// Internal to the pipeline.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/tensor.hpp>

#include "runtime/group/job_context.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

class OutputGather {
 public:
  // Both outlive it. Reuses its memory from call to call.
  OutputGather(JobContext& job, const JobLayout& layout) : job_(job), layout_(layout) {}

  // Throws Error(kUsage), the same on all ranks, for outputs that have no dimension of samples.
  void require_samples() const;

  void begin();
  // On the last stage's rank: the outputs of the next micro-batch, in host memory.
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
  [[nodiscard]] std::span<const EdgeTensor> specs() const;
  static void append(Output& to, const TensorSpec& spec, std::span<const std::byte> bytes);
  void show();

  JobContext& job_;
  const JobLayout& layout_;
  std::vector<Output> mine_, all_;
  std::vector<Tensor> tensors_;
};

}  // namespace sluice
