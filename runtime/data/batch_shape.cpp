#include "runtime/data/batch_shape.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include <sluice/error.hpp>

namespace sluice {
namespace {

// Shares differ by at most one sample, larger ones first.
SampleRange share_of(std::int64_t batch_size, int replicas, int replica) {
  const std::int64_t small = batch_size / replicas;
  const std::int64_t larger = batch_size % replicas;
  return {replica * small + std::min<std::int64_t>(replica, larger),
          small + (replica < larger ? 1 : 0)};
}

// Every micro-batch of every replica has at least one sample, none more than micro_batch_size.
bool fits(std::int64_t batch_size, std::int64_t replicas, std::int64_t full, std::int64_t size) {
  const std::int64_t smallest = batch_size / replicas;
  const std::int64_t largest = smallest + (batch_size % replicas != 0 ? 1 : 0);
  return smallest > full - size && largest <= full;
}

void require_positive(const char* option, std::int64_t value) {
  if (value < 1) {
    throw Error(ErrorCode::kUsage, fmt::format("{} is {}; it must be at least 1", option, value));
  }
}

[[noreturn]] void refuse(const BatchShape& shape, std::int64_t full) {
  const std::int64_t lowest = shape.replicas * (full - shape.micro_batch_size + 1);
  const std::int64_t highest = shape.replicas * full;
  std::string message = fmt::format(
      "--batch-size {} cannot be cut into {} micro-batches of at most {} samples, none empty, on "
      "each of {} replicas: the nearest legal --batch-size is {}",
      shape.batch_size, shape.micro_batches, shape.micro_batch_size, shape.replicas,
      std::clamp(shape.batch_size, lowest, highest));
  const std::int64_t largest = (shape.batch_size + shape.replicas - 1) / shape.replicas;
  const std::int64_t count = (largest + shape.micro_batch_size - 1) / shape.micro_batch_size;
  if (fits(shape.batch_size, shape.replicas, count * shape.micro_batch_size,
           shape.micro_batch_size)) {
    message += fmt::format(", or --micro-batches {} with this batch size", count);
  }
  throw Error(ErrorCode::kUsage, message);
}

}  // namespace

std::vector<SampleRange> micro_batches_of(const BatchShape& shape, int replica) {
  require_positive("--batch-size", shape.batch_size);
  require_positive("--micro-batch-size", shape.micro_batch_size);
  require_positive("--micro-batches", shape.micro_batches);
  require_positive("--replicas", shape.replicas);
  if (replica < 0 || replica >= shape.replicas) {
    throw Error(ErrorCode::kUsage, fmt::format("replica {} does not exist; there are {}, from 0",
                                               replica, shape.replicas));
  }
  // Within these bounds nothing below can overflow.
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  std::int64_t full = 0, all = 0;
  if (__builtin_mul_overflow(shape.micro_batch_size, shape.micro_batches, &full) ||
      __builtin_mul_overflow(full, shape.replicas, &all) || all > kMost ||
      shape.batch_size > kMost) {
    throw Error(
        ErrorCode::kUsage,
        fmt::format("--batch-size {} or {} replicas x {} micro-batches x {} samples is more than "
                    "{} samples a step, the most there can be",
                    shape.batch_size, shape.replicas, shape.micro_batches, shape.micro_batch_size,
                    kMost));
  }
  if (!fits(shape.batch_size, shape.replicas, full, shape.micro_batch_size)) refuse(shape, full);

  const SampleRange share = share_of(shape.batch_size, shape.replicas, replica);
  std::vector<SampleRange> ranges;
  ranges.reserve(static_cast<std::size_t>(shape.micro_batches));
  for (std::int64_t done = 0; done < share.count; done += shape.micro_batch_size) {
    ranges.push_back({share.first + done, std::min(shape.micro_batch_size, share.count - done)});
  }
  return ranges;
}

}  // namespace sluice
