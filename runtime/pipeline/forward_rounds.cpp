#include "runtime/pipeline/forward_rounds.hpp"

#include <algorithm>

#include "comm/base/index.hpp"
#include "runtime/data/batch_shape.hpp"
#include "runtime/data/named_calls.hpp"

namespace sluice {

namespace {

// Samples of a round.
std::int64_t round_of(const JobLayout& layout) {
  return layout.wires.edges.largest() * static_cast<std::int64_t>(StepPlans::kRoundMicroBatches);
}

}  // namespace

std::int64_t ForwardRounds::rounds_of(std::int64_t samples) const {
  return (samples + round_of(layout_) - 1) / round_of(layout_);
}

LossResult ForwardRounds::run(Phase phase, std::uint64_t seed, SampleRange samples,
                              const Load& load, const OnOutputs& on_outputs, std::int64_t rounds) {
  LossResult total;
  const std::int64_t size = layout_.wires.edges.largest();
  std::function<void(int, std::span<const Tensor>)> hand_on;
  if (on_outputs) {
    hand_on = [&](int micro_batch, std::span<const Tensor> outputs) {
      on_outputs(ranges_[at(micro_batch)], outputs);
    };
  }
  if (samples.count >= size) need_size_(size);
  if (samples.count % size > 0) need_size_(samples.count % size);
  for (std::int64_t i = 0, done = 0; done < samples.count || i < rounds; ++i) {
    const std::int64_t count = std::min(round_of(layout_), samples.count - done);
    cut_samples({samples.first + done, count}, size, (count + size - 1) / size, ranges_);
    done += count;
    const BatchLoader::Batch& batch = load(ranges_);
    if (count == 0) continue;
    programs_.plan(static_cast<int>(ranges_.size()));
    Engine& engine = programs_.engine(static_cast<int>(ranges_.size()));
    const StepRequest request{.phase = phase,
                              .step = 0,
                              .seed = seed,
                              .micro_batches = ranges_,
                              .batch = &batch,
                              .on_outputs = hand_on ? &hand_on : nullptr};
    const StepOutcome& outcome = engine.run(request, nullptr);
    if (phase == Phase::kGenerate) continue;
    for (const LossResult& loss : outcome.losses) {
      total.sum += loss.sum;
      total.weight += loss.weight;
    }
  }
  return total;
}

SourceRounds::SourceRounds(const JobLayout& layout, Device device)
    : first_(layout.owns(0)), last_(layout.owns(layout.plans.num_stages() - 1)), device_(device) {}

void SourceRounds::place(const std::vector<TensorSpec>& specs, std::vector<HostBuffer>& memory,
                         std::vector<Tensor>& tensors) const {
  tensors.resize(specs.size());
  memory.resize(specs.size());
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (memory[i].size() < specs[i].bytes()) memory[i] = HostBuffer(device_, specs[i].bytes());
    tensors[i] = {memory[i].data(), specs[i]};
  }
}

const BatchLoader::Batch& SourceRounds::load(const DataSource& source,
                                             std::span<const SampleRange> ranges) {
  if (memory_.size() < ranges.size()) {
    memory_.resize(ranges.size());
    batch_.inputs.resize(ranges.size());
    batch_.targets.resize(ranges.size());
  }
  for (std::size_t m = 0; m < ranges.size(); ++m) {
    if (first_) {
      place(source.input_specs(ranges[m].count), memory_[m].inputs, batch_.inputs[m]);
      read_inputs(source, Phase::kEvaluate, 0, ranges[m], batch_.inputs[m], first_batch_);
    }
    if (last_) {
      place(source.target_specs(ranges[m].count), memory_[m].targets, batch_.targets[m]);
      read_targets(source, Phase::kEvaluate, 0, ranges[m], batch_.targets[m], first_batch_);
    }
  }
  first_batch_ = false;
  return batch_;
}

}  // namespace sluice
