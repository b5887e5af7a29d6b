#include "runtime/cli/batch_options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string>

#include <sluice/error.hpp>

namespace sluice {
namespace {

constexpr std::int64_t kDefaultBatch = 4;
constexpr std::int64_t kMaxBatch = std::int64_t{1} << 40;

// a * b for factors >= 0, or the largest number there is.
std::int64_t times(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max()
                                                : product;
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b == 0 ? 0 : 1); }

std::int64_t largest_share(const BatchNumbers& batch) {
  return ceil_div(batch.batch_size, batch.replicas);
}

std::int64_t smallest_share(const BatchNumbers& batch) { return batch.batch_size / batch.replicas; }

// Every replica's share fills all but the last micro-batch, and the last one partly.
bool fits(const BatchNumbers& batch) {
  return largest_share(batch) <= times(batch.micro_batches, batch.micro_batch_size) &&
         smallest_share(batch) > times(batch.micro_batches - 1, batch.micro_batch_size);
}

std::string over_replicas(const BatchNumbers& batch) {
  return batch.replicas == 1 ? "" : fmt::format(" over --replicas {}", batch.replicas);
}

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorCode::kUsage, message); }

// batch_size and micro_batches are given: is there a micro-batch size?
bool has_size(BatchNumbers batch) {
  if (batch.micro_batches < 1 || batch.micro_batches > smallest_share(batch)) return false;
  batch.micro_batch_size = ceil_div(largest_share(batch), batch.micro_batches);
  return fits(batch);
}

void derive_size(BatchNumbers& batch) {
  if (has_size(batch)) {
    batch.micro_batch_size = ceil_div(largest_share(batch), batch.micro_batches);
    return;
  }
  // One micro-batch always has a size (the replicas' shares are not empty).
  std::int64_t below = std::min(batch.micro_batches - 1, smallest_share(batch));
  const auto with = [&](std::int64_t micro_batches) {
    BatchNumbers other = batch;
    other.micro_batches = micro_batches;
    return other;
  };
  while (!has_size(with(below))) --below;
  std::int64_t above = batch.micro_batches + 1;
  while (above <= smallest_share(batch) && !has_size(with(above))) ++above;
  const std::int64_t samples =
      batch.replicas * batch.micro_batches *
      std::max<std::int64_t>(1, smallest_share(batch) / batch.micro_batches);
  refuse(fmt::format(
      "option --micro-batches: {} micro-batches of equal size (the last may be smaller, not empty) "
      "do not cut --batch-size {}{}; nearest legal: --micro-batches {}{}, or --batch-size {}",
      batch.micro_batches, batch.batch_size, over_replicas(batch), below,
      above <= smallest_share(batch) ? fmt::format(" or {}", above) : "", samples));
}

void derive_count(BatchNumbers& batch) {
  batch.micro_batches = ceil_div(largest_share(batch), batch.micro_batch_size);
  if (fits(batch)) return;
  // The shares straddle a multiple of the size: the smaller one would leave a micro-batch empty.
  const std::int64_t whole = (batch.micro_batches - 1) * batch.micro_batch_size * batch.replicas;
  refuse(fmt::format(
      "option --batch-size: {}{} in micro-batches of {} leaves some replicas {} micro-batches and "
      "others {}; nearest legal: --batch-size {} or {}",
      batch.batch_size, over_replicas(batch), batch.micro_batch_size, batch.micro_batches,
      batch.micro_batches - 1, whole, whole + batch.replicas));
}

void require_agreement(const BatchNumbers& batch) {
  if (fits(batch)) return;
  const std::int64_t low =
      times(batch.replicas, times(batch.micro_batches - 1, batch.micro_batch_size) + 1);
  const std::int64_t high =
      times(batch.replicas, times(batch.micro_batches, batch.micro_batch_size));
  refuse(fmt::format(
      "option --batch-size: {} does not fit --micro-batches {} of --micro-batch-size {}{}; legal "
      "is --batch-size {}",
      batch.batch_size, batch.micro_batches, batch.micro_batch_size, over_replicas(batch),
      low == high ? fmt::format("{}", low) : fmt::format("from {} to {}", low, high)));
}

void require_small_enough(const BatchNumbers& batch) {
  if (batch.batch_size <= kMaxBatch) return;
  refuse(fmt::format(
      "option --micro-batches: {} of --micro-batch-size {}{} make a batch of more than {} samples, "
      "the most that is legal",
      batch.micro_batches, batch.micro_batch_size, over_replicas(batch), kMaxBatch));
}

void require_all_replicas_served(const BatchNumbers& batch) {
  if (batch.batch_size >= batch.replicas) return;
  refuse(fmt::format(
      "option --batch-size: {} samples cannot serve --replicas {}; nearest legal: --batch-size {} "
      "or --replicas {}",
      batch.batch_size, batch.replicas, batch.replicas, batch.batch_size));
}

}  // namespace

BatchNumbers resolve_batch(BatchNumbers given, std::int64_t max_micro_batches) {
  BatchNumbers batch = given;
  if (batch.batch_size > 0) require_all_replicas_served(batch);
  if (batch.batch_size > 0 && batch.micro_batches > 0 && batch.micro_batch_size > 0) {
    require_agreement(batch);
  } else if (batch.batch_size > 0 && batch.micro_batches > 0) {
    derive_size(batch);
  } else {
    if (batch.micro_batch_size == 0) batch.micro_batch_size = 1;
    const std::int64_t row = times(batch.replicas, batch.micro_batch_size);
    if (batch.micro_batches > 0) {
      batch.batch_size = times(row, batch.micro_batches);
      require_small_enough(batch);
    } else {
      if (batch.batch_size == 0) batch.batch_size = times(ceil_div(kDefaultBatch, row), row);
      require_small_enough(batch);
      derive_count(batch);
    }
  }
  if (batch.micro_batches > max_micro_batches) {
    refuse(fmt::format(
        "option --micro-batch-size: {} cuts --batch-size {}{} into {} micro-batches, at most {} "
        "are "
        "legal; nearest legal: --micro-batch-size {}",
        batch.micro_batch_size, batch.batch_size, over_replicas(batch), batch.micro_batches,
        max_micro_batches, ceil_div(largest_share(batch), max_micro_batches)));
  }
  return batch;
}

}  // namespace sluice
