#include "runtime/data/batch_shape.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <string>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

constexpr std::int64_t kDefaultBatch = 4;
constexpr std::int64_t kMostSamples = std::int64_t{1} << 40;  // of a step

// a * b for factors >= 0, or the largest number there is.
std::int64_t times(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max()
                                                : product;
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b == 0 ? 0 : 1); }

std::int64_t largest_share(const BatchShape& batch) {
  return ceil_div(batch.batch_size, batch.replicas);
}

std::int64_t smallest_share(const BatchShape& batch) { return batch.batch_size / batch.replicas; }

// Every replica's share fills all but the last micro-batch, and the last one partly.
bool fits(const BatchShape& batch) {
  return largest_share(batch) <= times(batch.micro_batches, batch.micro_batch_size) &&
         smallest_share(batch) > times(batch.micro_batches - 1, batch.micro_batch_size);
}

std::string over_replicas(const BatchShape& batch) {
  return batch.replicas == 1 ? "" : fmt::format(" over {} {}", batch.replicas, batch.name);
}

// Within this bound no product of sizes overflows.
void require_small_enough(const BatchShape& batch) {
  const std::int64_t row = times(batch.micro_batches, batch.micro_batch_size);
  if (std::max(batch.batch_size, times(row, batch.replicas)) <= kMostSamples) return;
  throw_usage(
      "batch size {}, or {} micro-batches of {} samples{}; at most {} samples a step are legal",
      batch.batch_size, batch.micro_batches, batch.micro_batch_size, over_replicas(batch),
      kMostSamples);
}

void require_fit(const BatchShape& batch) {
  require_small_enough(batch);
  if (fits(batch)) return;
  const std::int64_t full = batch.micro_batches * batch.micro_batch_size;
  const std::int64_t lowest = batch.replicas * (full - batch.micro_batch_size + 1);
  BatchShape other = batch;
  other.micro_batches = ceil_div(largest_share(batch), batch.micro_batch_size);
  throw_usage(
      "batch size {} does not fit {} micro-batches of {} samples{}: the last micro-batch may be "
      "smaller, none may be empty; the nearest legal batch size is {}{}",
      batch.batch_size, batch.micro_batches, batch.micro_batch_size, over_replicas(batch),
      std::clamp(batch.batch_size, lowest, batch.replicas * full),
      fits(other) ? fmt::format(", or {} micro-batches with this batch size", other.micro_batches)
                  : "");
}

// Sets the micro-batch size for the batch size and the number of micro-batches; false where there
// is none.
bool set_size(BatchShape& batch) {
  if (batch.micro_batches < 1 || batch.micro_batches > smallest_share(batch)) return false;
  batch.micro_batch_size = ceil_div(largest_share(batch), batch.micro_batches);
  return fits(batch);
}

void derive_size(BatchShape& batch) {
  if (set_size(batch)) return;
  const std::int64_t most = smallest_share(batch);
  const auto has_size = [&batch](std::int64_t micro_batches) {
    BatchShape other = batch;
    other.micro_batches = micro_batches;
    return set_size(other);
  };
  // One micro-batch always has a size, because the shares are not empty.
  std::int64_t below = std::min(batch.micro_batches - 1, most);
  while (!has_size(below)) --below;
  std::int64_t above = batch.micro_batches + 1;
  while (above <= most && !has_size(above)) ++above;
  throw_usage(
      "{} micro-batches of equal size (the last may be smaller, not empty) do not divide batch "
      "size {}{}; nearest legal: {}{} micro-batches, or batch size {}",
      batch.micro_batches, batch.batch_size, over_replicas(batch), below,
      above <= most ? fmt::format(" or {}", above) : "",
      batch.replicas * batch.micro_batches * std::max<std::int64_t>(1, most / batch.micro_batches));
}

void derive_count(BatchShape& batch) {
  batch.micro_batches = ceil_div(largest_share(batch), batch.micro_batch_size);
  if (fits(batch)) return;
  // The shares straddle a multiple of the size: the smaller one would leave a micro-batch empty.
  const std::int64_t whole = (batch.micro_batches - 1) * batch.micro_batch_size * batch.replicas;
  throw_usage(
      "batch size {}{} in micro-batches of {} leaves some {} {} micro-batches and others {}; "
      "nearest legal: batch size {} or {}",
      batch.batch_size, over_replicas(batch), batch.micro_batch_size, batch.name,
      batch.micro_batches, batch.micro_batches - 1, whole, whole + batch.replicas);
}

void require_positive(const char* number, std::int64_t value) {
  if (value < 1) throw_usage("the {} is {}; it must be at least 1", number, value);
}

}  // namespace

SampleRange share_of(std::int64_t samples, std::int64_t replicas, std::int64_t replica,
                     std::int64_t count) {
  const auto begin = [small = samples / replicas, larger = samples % replicas](std::int64_t r) {
    return r * small + std::min(r, larger);
  };
  return {begin(replica), begin(replica + count) - begin(replica)};
}

void cut_samples(SampleRange samples, std::int64_t size, std::int64_t pieces,
                 std::vector<SampleRange>& into) {
  for (std::int64_t left = samples.count; pieces > 0; left -= into.back().count) {
    into.push_back({samples.first + samples.count - left, std::min(size, left - --pieces)});
  }
}

BatchShape complete_batch_shape(BatchShape batch, std::int64_t max_micro_batches) {
  if (batch.batch_size > 0 && batch.batch_size < batch.replicas) {
    throw_usage("batch size {0} cannot serve {1} {2}; nearest legal: batch size {1} or {0} {2}",
                batch.batch_size, batch.replicas, batch.name);
  }
  if (batch.batch_size > 0 && batch.micro_batches > 0) {
    if (batch.micro_batch_size == 0) derive_size(batch);
  } else {
    batch.micro_batch_size = std::max<std::int64_t>(batch.micro_batch_size, 1);
    if (batch.batch_size == 0) {
      const std::int64_t row = times(batch.replicas, batch.micro_batch_size);
      batch.batch_size =
          times(row, batch.micro_batches > 0 ? batch.micro_batches : ceil_div(kDefaultBatch, row));
    }
    require_small_enough(batch);
    if (batch.micro_batches == 0) derive_count(batch);
  }
  require_fit(batch);
  if (batch.micro_batches > max_micro_batches) {
    throw_usage(
        "micro-batch size {} cuts batch size {}{} into {} micro-batches, at most {} are legal; "
        "nearest legal: micro-batch size {}",
        batch.micro_batch_size, batch.batch_size, over_replicas(batch), batch.micro_batches,
        max_micro_batches, ceil_div(largest_share(batch), max_micro_batches));
  }
  return batch;
}

std::vector<SampleRange> micro_batches_of(const BatchShape& shape, int replica) {
  // The batch size may be the product of the others.
  require_positive("micro-batch size", shape.micro_batch_size);
  require_positive("number of micro-batches", shape.micro_batches);
  require_positive("number of replicas", shape.replicas);
  require_positive("batch size", shape.batch_size);
  if (replica < 0 || replica >= shape.replicas) {
    throw_usage("replica {} does not exist; there are {}, from 0", replica, shape.replicas);
  }
  require_fit(shape);
  std::vector<SampleRange> ranges;
  ranges.reserve(static_cast<std::size_t>(shape.micro_batches));
  cut_samples(share_of(shape.batch_size, shape.replicas, replica), shape.micro_batch_size,
              shape.micro_batches, ranges);
  return ranges;
}

}  // namespace sluice
