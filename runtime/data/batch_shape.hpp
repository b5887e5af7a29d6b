// How a step's batch falls into micro-batches.
#pragma once

#include <cstdint>
#include <vector>

#include <sluice/data.hpp>

namespace sluice {

// In samples. Each (virtual) replica takes a contiguous share of `batch_size` (sizes differ by at
// most one, larger first), cut into `micro_batches` pieces of `micro_batch_size`. The last piece
// may be smaller but is never empty.
struct BatchShape {
  std::int64_t batch_size = 1, micro_batch_size = 1, micro_batches = 1, replicas = 1;
  const char* name = "replicas";  // for people
};

// Fills in those of the first three that are 0. With nothing given: micro-batches of one sample,
// and the smallest batch of at least 4 that gives every replica the same. Throws Error(kUsage)
// naming the options and the nearest legal values where a micro-batch would be empty, the three
// disagree, or more than `max_micro_batches` result.
[[nodiscard]] BatchShape complete_batch_shape(BatchShape given, std::int64_t max_micro_batches);

// The contiguous share of `samples` that `count` of the replicas from `replica` on have: shares of
// one differ by at most one sample, larger ones first. So the parts of a joint share, cut by
// `count` in the same way, are those of its replicas.
[[nodiscard]] SampleRange share_of(std::int64_t samples, std::int64_t replicas,
                                   std::int64_t replica, std::int64_t count = 1);
// Cuts `samples` into `pieces` micro-batches, in order, and appends them: each has `size` samples,
// or as many as leave one for each later piece. Requires pieces <= samples.count <= pieces * size.
void cut_samples(SampleRange samples, std::int64_t size, std::int64_t pieces,
                 std::vector<SampleRange>& into);

// The micro-batches of one replica. Throws Error(kUsage) with the nearest legal numbers where one
// would be empty.
[[nodiscard]] std::vector<SampleRange> micro_batches_of(const BatchShape& shape, int replica);

}  // namespace sluice
