#include "runtime/program/train/train_data.hpp"

#include <algorithm>
#include <string>

#include "comm/base/throw_error.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/group/configuration.hpp"
#include "runtime/models/tokenizer_file.hpp"

namespace sluice {
namespace {

// Windows of a validation at the end, unless --validation-samples is given: what share of those
// that are trained between two validations, at least and at most.
constexpr double kValidationShare = 0.05;
constexpr double kLeastValidation = 32, kMostValidation = 1024;
// The most of one between steps, likewise.
constexpr std::int64_t kQuickValidation = 64;

std::int64_t usual_validation(const TrainOptions& options, std::int64_t windows) {
  if (options.validation_samples == TrainOptions::kAllWindows) return windows;
  const std::uint64_t every = options.validate_every;
  const double steps =
      static_cast<double>(every > 0 ? std::min(every, options.steps) : options.steps);
  const double trained = steps * static_cast<double>(options.pipeline.shape.batch_size);
  return static_cast<std::int64_t>(
      std::clamp(kValidationShare * trained, kLeastValidation, kMostValidation));
}

void require_a_batch(const TrainOptions& options, const TokenFile& file) {
  const std::int64_t needed = options.pipeline.shape.batch_size * options.model.context + 1;
  if (file.train_size() >= needed) return;
  throw_error(ErrorCode::kData,
              "data file '{}' has {} tokens to train on, fewer than one batch: "
              "--batch-size {} of --context {} takes {}",
              options.data, file.train_size(), options.pipeline.shape.batch_size,
              options.model.context, needed);
}

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

TrainData open_data(const TrainOptions& options, Collectives& job) {
  TrainData data;
  if (options.data.empty()) {
    data.source = make_token_shapes(options.model.context);
    return data;
  }
  data.file = std::make_shared<TokenFile>(options.data, options.validation_share);
  require_same_configuration(job, data.file->identity("--data"));
  data.identity = data_identity(*data.file);
  if (options.resume.from) {
    require_same_tokenizer(*data.file, options.resume.from->directory);
  } else if (!options.weights.empty()) {
    require_same_tokenizer(*data.file, newest_save(options.weights));
  }
  if (options.resume.from) (void)data_changes_since(*options.resume.from, options, data.identity);
  const std::int64_t samples = options.validation_samples;
  const bool exactly =
      samples != TrainOptions::kSomeWindows && samples != TrainOptions::kAllWindows;
  if (data.file->train_size() == data.file->size() && (exactly || options.validate_every > 0)) {
    throw_usage(
        "option --validation-share: {} of {} tokens leaves nothing for "
        "--validation-samples or --validate-every; give a larger share or "
        "leave them out",
        options.validation_share, data.file->size());
  }
  data.source = make_token_source(data.file, options.model.context, options.model.vocabulary,
                                  options.pipeline.training.seed);
  require_a_batch(options, *data.file);
  data.windows = validation_samples(*data.file, options.model.context);
  data.last_validation =
      exactly ? samples : std::min(data.windows, usual_validation(options, data.windows));
  data.between_validation = exactly ? samples : std::min(data.last_validation, kQuickValidation);
  return data;
}

std::vector<std::int64_t> evaluation_sizes(const TrainOptions& options, const TrainData& data) {
  std::vector<std::int64_t> sizes;
  for (const std::int64_t samples :
       {data.last_validation, options.validate_every > 0 ? data.between_validation : 0}) {
    for (const std::int64_t size :
         validation_sizes(samples, validation_part(options.pipeline.shape))) {
      sizes.push_back(size);
    }
  }
  return sizes;
}

void require_same_data(const TrainOptions& options, const TrainData& data) {
  const std::string change = data_difference(data.identity, data_identity(*data.file));
  if (change.empty()) return;
  throw_error(ErrorCode::kData,
              "data file '{}' has changed since the start: {}; nothing is saved of the steps since "
              "the last save",
              options.data, change);
}

std::int64_t validation_part(const PipelineOptions::Shape& shape) {
  constexpr std::int64_t kMicroBatches = 16;
  return kMicroBatches * shape.micro_batch_size * std::max(shape.virtual_replicas, shape.replicas);
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
