// Loads a step's micro-batches into host memory and prefetches the next step's in a thread of its
// own. Prefetch threads never touch MPI.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <sluice/data.hpp>

namespace sluice {

class BatchLoader {
 public:
  struct Batch {
    // [micro_batch][tensor]; a micro-batch's list is empty where its tensors are not wanted.
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
  // Blocks until `step` is loaded; the batch stays valid until the next call. Rethrows what the
  // source threw. Steps in ascending order profit from the prefetch, any order is right.
  const Batch& load(std::uint64_t step);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
