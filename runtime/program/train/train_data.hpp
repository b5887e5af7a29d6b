// What a run trains and validates on, and a validation in parts, so that a long one shows how far
// it is.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/pipeline.hpp>

#include "comm/group/collectives.hpp"
#include "runtime/program/options/option_table.hpp"
#include "runtime/program/train/train_options.hpp"

namespace sluice {

struct TrainData {
  std::shared_ptr<TokenFile> file;  // null without --data, in a dry run
  std::unique_ptr<DataSource> source;
  OptionValues identity;                // data_identity() at the start; empty without --data
  std::int64_t windows = 0;             // of the validation share
  std::int64_t last_validation = 0;     // windows of the validation at the end; 0: none
  std::int64_t between_validation = 0;  // of one between steps, which --validate-every asks for
};

// Collective. Throws Error where ranks read other data, where it is not the model's or the save's,
// or where it is too short for the options.
[[nodiscard]] TrainData open_data(const TrainOptions& options, Collectives& job);

// For PipelineOptions::Expert::evaluations.
[[nodiscard]] std::vector<std::int64_t> evaluation_sizes(const TrainOptions& options,
                                                         const TrainData& data);

// A save says what it was trained on: Error(kData) where the file has changed since the start.
void require_same_data(const TrainOptions& options, const TrainData& data);

// Samples of one part, over all virtual replicas. It does not depend on the depth, the schedule or
// the replicas, so that sums do not either.
[[nodiscard]] std::int64_t validation_part(const PipelineOptions::Shape& shape);
// The sizes of the parts of a validation of `samples`, for PipelineOptions::Expert::evaluations.
[[nodiscard]] std::vector<std::int64_t> validation_sizes(std::int64_t samples, std::int64_t part);

// Collective. The mean loss of the first `samples` samples of `source`, in parts; nothing where
// `goes_on` says so. It gets how many are done: first 0, then the number after each part. It
// returns the same on all ranks, as this does.
[[nodiscard]] std::optional<double> validate(Pipeline& pipeline, const DataSource& source,
                                             std::int64_t samples, std::int64_t part,
                                             const std::function<bool(std::int64_t done)>& goes_on);

}  // namespace sluice
