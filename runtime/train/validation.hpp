// A validation in parts, so that a long one shows how far it is.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/pipeline.hpp>

namespace sluice {

// Samples of one part, over all replicas. It does not depend on the depth or the schedule, so that
// sums do not either.
[[nodiscard]] std::int64_t validation_part(std::int64_t micro_batch_size, int replicas);
// The sizes of the parts of a validation of `samples`, for PipelineOptions::Training::evaluations.
[[nodiscard]] std::vector<std::int64_t> validation_sizes(std::int64_t samples, std::int64_t part);

// Collective. The mean loss of the first `samples` samples of `source`, in parts; nothing where
// `goes_on` says so. It gets how many are done: first 0, then the number after each part. It
// returns the same on all ranks, as this does.
[[nodiscard]] std::optional<double> validate(Pipeline& pipeline, const DataSource& source,
                                             std::int64_t samples, std::int64_t part,
                                             const std::function<bool(std::int64_t done)>& goes_on);

}  // namespace sluice
