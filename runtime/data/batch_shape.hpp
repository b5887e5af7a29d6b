// How a global batch falls into micro-batches.
#pragma once

#include <cstdint>
#include <vector>

#include <sluice/data.hpp>

namespace sluice {

// How a global batch of `batch_size` samples falls into micro-batches: replica r takes a contiguous
// share (sizes differ by at most one, larger first), cut into `micro_batches` pieces of
// `micro_batch_size`, the last one smaller where it does not divide. Throws Error(kUsage) with the
// nearest legal numbers where a micro-batch would be empty.
struct BatchShape {
  std::int64_t batch_size = 1, micro_batch_size = 1;
  int micro_batches = 1, replicas = 1;
};
[[nodiscard]] std::vector<SampleRange> micro_batches_of(const BatchShape& shape, int replica);

}  // namespace sluice
