#include "runtime/pipeline/evaluation.hpp"

#include <algorithm>

namespace sluice {

Evaluation::Evaluation(const EvaluationPlan& plan, const DataSource& source,
                       const JobLayout& layout, const EngineFactory& make_engine, Device device)
    : plan_(plan),
      source_(source),
      wants_inputs_(layout.owns(0)),
      wants_targets_(layout.owns(layout.plans.num_stages() - 1)) {
  if (!plan.round.ranks.empty()) round_ = make_engine(plan.round);
  if (!plan.rest.ranks.empty()) rest_ = make_engine(plan.rest);
  if (round_ == nullptr) return;
  const auto micro_batches = static_cast<std::size_t>(plan.round.micro_batches);
  batch_.inputs.resize(micro_batches);
  batch_.targets.resize(micro_batches);
  memory_.resize(micro_batches);
  const auto allocate = [device](const std::vector<TensorSpec>& specs,
                                 std::vector<HostBuffer>& memory, std::vector<Tensor>& tensors) {
    for (const TensorSpec& spec : specs) {
      memory.emplace_back(device, spec.bytes());
      tensors.push_back({memory.back().data(), spec});
    }
  };
  // The first micro-batch is as large as any.
  const std::int64_t largest = plan.micro_batches.front().count;
  for (std::size_t m = 0; m < micro_batches; ++m) {
    if (wants_inputs_) allocate(source.input_specs(largest), memory_[m], batch_.inputs[m]);
    if (wants_targets_) allocate(source.target_specs(largest), memory_[m], batch_.targets[m]);
  }
}

void Evaluation::load(std::span<const SampleRange> ranges) {
  const auto shape = [](const std::vector<TensorSpec>& specs, std::vector<Tensor>& tensors) {
    for (std::size_t i = 0; i < specs.size(); ++i) tensors[i].spec = specs[i];
  };
  for (std::size_t m = 0; m < ranges.size(); ++m) {
    if (wants_inputs_) {
      shape(source_.input_specs(ranges[m].count), batch_.inputs[m]);
      source_.inputs(Phase::kEvaluate, 0, ranges[m], batch_.inputs[m]);
    }
    if (wants_targets_) {
      shape(source_.target_specs(ranges[m].count), batch_.targets[m]);
      source_.targets(Phase::kEvaluate, 0, ranges[m], batch_.targets[m]);
    }
  }
}

LossResult Evaluation::run(std::uint64_t seed) {
  LossResult total;
  const std::span<const SampleRange> all(plan_.micro_batches);
  for (std::size_t first = 0; first < all.size();) {
    const auto full = static_cast<std::size_t>(plan_.round.micro_batches);
    const std::span<const SampleRange> ranges =
        all.subspan(first, std::min(full, all.size() - first));
    first += ranges.size();
    load(ranges);
    Engine& engine = ranges.size() == full ? *round_ : *rest_;
    const StepRequest request{.phase = Phase::kEvaluate,
                              .step = 0,
                              .seed = seed,
                              .micro_batches = ranges,
                              .batch = &batch_};
    for (const LossResult& loss : engine.run(request, nullptr).losses) {
      total.sum += loss.sum;
      total.weight += loss.weight;
    }
  }
  return total;
}

}  // namespace sluice
