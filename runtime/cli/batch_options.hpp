// How batch size, micro-batch size and number of micro-batches follow from each other.
#pragma once

#include <cstdint>

namespace sluice {

// Samples. Each replica gets floor or ceil(batch_size / replicas) of them, cut into micro_batches
// pieces of micro_batch_size, of which the last may be smaller but never empty.
struct BatchNumbers {
  std::int64_t batch_size = 0;  // over all replicas; 0 in any of these three: to be derived
  std::int64_t micro_batch_size = 0;
  std::int64_t micro_batches = 0;
  std::int64_t replicas = 1;
};

// Fills in what is 0. With nothing given: micro-batches of one sample, and the smallest batch of at
// least 4 that gives every replica the same. Throws Error(kUsage) naming the options and the
// nearest legal values where a micro-batch would be empty or the three disagree.
[[nodiscard]] BatchNumbers resolve_batch(BatchNumbers given, std::int64_t max_micro_batches);

}  // namespace sluice
