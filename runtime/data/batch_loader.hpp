// Loads a step's micro-batches into host memory, and prefetches the next step's in another thread,
// which never calls MPI.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/device.hpp>

#include "comm/group/waiter.hpp"

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
              bool wants_inputs, bool wants_targets, Device device = {},
              std::chrono::milliseconds patience = std::chrono::seconds(10));
  // Waits for the call of the source that is under way, for `patience`. A source that takes longer
  // may never return, as a stream without more data: then its thread goes on without this.
  ~BatchLoader();
  // Blocks until `step` is loaded; the batch stays valid until the next call. Rethrows the
  // source's exceptions, and what `interrupt` throws, which may be null. Any order of steps is
  // right; ascending steps profit from the prefetch.
  const Batch& load(std::uint64_t step, Interrupt* interrupt = nullptr);

 private:
  struct State;
  std::shared_ptr<State> state_;  // the thread's too
  std::chrono::milliseconds patience_;
  std::thread worker_;
};

// Host memory of micro-batches, and what a source writes there; page-locked for a GPU.
class BatchMemory {
 public:
  BatchMemory(bool wants_inputs, bool wants_targets, Device device)
      : inputs_(wants_inputs), targets_(wants_targets), device_(device) {}
  // Allocates only for more micro-batches, or larger ones, than before.
  void place(const DataSource& source, std::span<const SampleRange> ranges);
  // Requires place() of these. Where `watched`, numbers that the source leaves unwritten are
  // Error(kUsage). Makes no call of the source once `stopping`.
  void read(const DataSource& source, Phase phase, std::uint64_t step,
            std::span<const SampleRange> ranges, bool watched,
            const std::atomic<bool>* stopping = nullptr) const;
  [[nodiscard]] const BatchLoader::Batch& batch() const { return batch_; }

 private:
  struct Memory {
    std::vector<HostBuffer> inputs, targets;  // [tensor]
  };
  bool inputs_, targets_;
  Device device_;
  BatchLoader::Batch batch_;
  std::vector<Memory> memory_;  // [micro_batch] of batch_
};

}  // namespace sluice
