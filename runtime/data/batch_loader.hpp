// Loads a step's micro-batches into host memory, and prefetches the next step's in another thread,
// which never calls MPI.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <sluice/data.hpp>

namespace sluice {

class BatchLoader {
 public:
  struct Batch {
    // [micro_batch][tensor]; a micro-batch's list is empty where its tensors are not needed.
    std::vector<std::vector<Tensor>> inputs;
    std::vector<std::vector<Tensor>> targets;
  };
  // `source` outlives the loader. All memory is allocated here, page-locked where batches go to a
  // GPU; load() allocates none.
  BatchLoader(const DataSource& source, Phase phase, std::vector<SampleRange> micro_batches,
              bool wants_inputs, bool wants_targets, Device device = {});
  ~BatchLoader();
  BatchLoader(const BatchLoader&) = delete;
  BatchLoader& operator=(const BatchLoader&) = delete;
  // Blocks until `step` is loaded; the batch stays valid until the next call. Rethrows the
  // source's exceptions. Any order of steps is right; ascending steps profit from the prefetch.
  const Batch& load(std::uint64_t step);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
