// Forward-only passes over any number of samples, in rounds that take the memory of one. Internal
// to the pipeline.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/device.hpp>

#include "runtime/engine/engine.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/programs.hpp"

namespace sluice {

class ForwardRounds {
 public:
  // The micro-batches of a round, in host memory; none are asked for in rounds after the last
  // sample.
  using Load = std::function<const BatchLoader::Batch&(std::span<const SampleRange>)>;
  // Makes the layout ready for micro-batches of this number of samples. Collective over the
  // pipeline.
  using NeedSize = std::function<void(std::int64_t samples)>;
  // All arguments outlive it.
  ForwardRounds(const JobLayout& layout, Programs& programs, NeedSize need_size)
      : layout_(layout), programs_(programs), need_size_(std::move(need_size)) {}

  // Collective over the pipeline: this replica's samples. Returns the sum of the losses, in the
  // order of the samples, on the last stage's rank; zero elsewhere, without samples, and for
  // Phase::kGenerate. `on_outputs`: as StepRequest's, with the micro-batch's samples. There are at
  // least `rounds`.
  using OnOutputs = std::function<void(SampleRange samples, std::span<const Tensor> outputs)>;
  [[nodiscard]] LossResult run(Phase phase, std::uint64_t seed, SampleRange samples,
                               const Load& load, const OnOutputs& on_outputs = {},
                               std::int64_t rounds = 0);
  // That so many samples take.
  [[nodiscard]] std::int64_t rounds_of(std::int64_t samples) const;

 private:
  const JobLayout& layout_;
  Programs& programs_;
  NeedSize need_size_;
  std::vector<SampleRange> ranges_;  // of a round
};

// Host memory for the micro-batches of a round, filled by a source.
class SourceRounds {
 public:
  SourceRounds(const JobLayout& layout, Device device);
  [[nodiscard]] const BatchLoader::Batch& load(const DataSource& source,
                                               std::span<const SampleRange> ranges);

 private:
  struct Memory {
    std::vector<HostBuffer> inputs, targets;  // [tensor]
  };
  void place(const std::vector<TensorSpec>& specs, std::vector<HostBuffer>& memory,
             std::vector<Tensor>& tensors) const;

  bool first_, last_;
  bool first_batch_ = true;  // none has been read
  Device device_;
  BatchLoader::Batch batch_;
  std::vector<Memory> memory_;  // [micro_batch] of batch_
};

}  // namespace sluice
