#include "runtime/train/validation.hpp"

#include <algorithm>

namespace sluice {
namespace {

// The samples of a source from `first` on.
class LaterSamples final : public DataSource {
 public:
  LaterSamples(const DataSource& source, std::int64_t first) : source_(source), first_(first) {}
  [[nodiscard]] std::vector<TensorSpec> input_specs(std::int64_t samples) const override {
    return source_.input_specs(samples);
  }
  [[nodiscard]] std::vector<TensorSpec> target_specs(std::int64_t samples) const override {
    return source_.target_specs(samples);
  }
  void inputs(Phase phase, std::uint64_t step, SampleRange range,
              std::span<const Tensor> into) const override {
    source_.inputs(phase, step, {first_ + range.first, range.count}, into);
  }
  void targets(Phase phase, std::uint64_t step, SampleRange range,
               std::span<const Tensor> into) const override {
    source_.targets(phase, step, {first_ + range.first, range.count}, into);
  }

 private:
  const DataSource& source_;
  std::int64_t first_;
};

}  // namespace

std::int64_t validation_part(std::int64_t micro_batch_size, int replicas) {
  constexpr std::int64_t kMicroBatches = 16;
  return kMicroBatches * micro_batch_size * replicas;
}

std::vector<std::int64_t> validation_sizes(std::int64_t samples, std::int64_t part) {
  std::vector<std::int64_t> sizes;
  if (samples >= part) sizes.push_back(part);
  if (samples % part > 0) sizes.push_back(samples % part);
  return sizes;
}

std::optional<double> validate(Pipeline& pipeline, const DataSource& source, std::int64_t samples,
                               std::int64_t part,
                               const std::function<bool(std::int64_t done)>& goes_on) {
  double sum = 0, targets = 0;
  for (std::int64_t done = 0; done < samples;) {
    if (!goes_on(done)) return std::nullopt;
    const std::int64_t count = std::min(part, samples - done);
    const EvaluationReport report = pipeline.evaluate(LaterSamples(source, done), count);
    sum += report.loss * report.targets;
    targets += report.targets;
    done += count;
  }
  (void)goes_on(samples);
  return sum / targets;
}

}  // namespace sluice
