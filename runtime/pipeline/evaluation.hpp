// Evaluation: forward-only rounds over this replica's share of an evaluation. Internal to the
// pipeline. It takes the memory of one round, for any number of samples.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/device.hpp>

#include "runtime/engine/engine.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

class Evaluation {
 public:
  using EngineFactory = std::function<std::unique_ptr<Engine>(const Plan& plan)>;
  // `source` and `layout` outlive this; `plan` is part of `layout`.
  Evaluation(const EvaluationPlan& plan, const DataSource& source, const JobLayout& layout,
             const EngineFactory& make_engine, Device device);

  [[nodiscard]] std::int64_t samples() const { return plan_.samples; }
  // Collective over the pipeline. On the last stage's rank, the sum of the losses in the order of
  // the samples; zero elsewhere and where this replica's share is empty.
  [[nodiscard]] LossResult run(std::uint64_t seed);

 private:
  void load(std::span<const SampleRange> ranges);

  const EvaluationPlan& plan_;
  const DataSource& source_;
  bool wants_inputs_, wants_targets_;
  std::unique_ptr<Engine> round_, rest_;  // null where there is none
  BatchLoader::Batch batch_;
  std::vector<std::vector<HostBuffer>> memory_;  // [micro_batch] of batch_
};

}  // namespace sluice
