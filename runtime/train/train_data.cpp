#include "runtime/train/train_data.hpp"

#include <algorithm>
#include <string>

#include "comm/base/throw_error.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/job/configuration.hpp"
#include "runtime/tokens/tokenizer_file.hpp"
#include "runtime/train/validation.hpp"

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

std::int64_t part_of_validation(const TrainOptions& options) {
  const PipelineOptions::Shape& shape = options.pipeline.shape;
  return validation_part(shape.micro_batch_size, shape.replicas);
}

std::vector<std::int64_t> evaluation_sizes(const TrainOptions& options, const TrainData& data) {
  std::vector<std::int64_t> sizes;
  for (const std::int64_t samples :
       {data.last_validation, options.validate_every > 0 ? data.between_validation : 0}) {
    for (const std::int64_t size : validation_sizes(samples, part_of_validation(options))) {
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

}  // namespace sluice
