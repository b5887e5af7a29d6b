#include "runtime/data/batch_loader.hpp"

// Two batches of host memory: the caller reads one, the worker fills the other. Only the slot index
// is shared between them, under the mutex.
#include <array>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <sluice/device.hpp>

#include "comm/base/byte_sums.hpp"
#include "comm/base/threads.hpp"

namespace sluice {
namespace {

// A batch and the memory its tensors point into.
struct BatchSlot {
  HostBuffer memory;
  BatchLoader::Batch batch;
  std::optional<std::uint64_t> step;  // loaded, or failed with `error`
  std::exception_ptr error;
};

std::size_t bytes_of(const std::vector<TensorSpec>& specs) {
  std::size_t bytes = 0;
  for (const TensorSpec& spec : specs) add_bytes(bytes, round_up(spec.bytes(), kBufferAlignment));
  return bytes;
}

std::vector<Tensor> place(const std::vector<TensorSpec>& specs, std::byte*& at) {
  std::vector<Tensor> tensors;
  for (const TensorSpec& spec : specs) {
    tensors.push_back({at, spec});
    at += round_up(spec.bytes(), kBufferAlignment);
  }
  return tensors;
}

}  // namespace

struct BatchLoader::Impl {
  Impl(const DataSource& data, Phase of_phase, std::vector<SampleRange> micro_batches,
       bool wants_inputs, bool wants_targets, Device device)
      : source(data), phase(of_phase), ranges(std::move(micro_batches)) {
    for (BatchSlot& slot : slots) allocate(slot, wants_inputs, wants_targets, device);
    if (wants_inputs || wants_targets)
      worker = start_thread("loader of batches", [this] { work(); });
  }

  ~Impl() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    if (worker.joinable()) worker.join();
  }

  void allocate(BatchSlot& slot, bool wants_inputs, bool wants_targets, Device device) {
    std::vector<std::vector<TensorSpec>> inputs, targets;
    std::size_t bytes = 0;
    for (const SampleRange& range : ranges) {
      if (wants_inputs)
        add_bytes(bytes, bytes_of(inputs.emplace_back(source.input_specs(range.count))));
      if (wants_targets)
        add_bytes(bytes, bytes_of(targets.emplace_back(source.target_specs(range.count))));
    }
    slot.memory = HostBuffer(device, bytes);
    std::byte* at = slot.memory.data();
    slot.batch.inputs.resize(ranges.size());
    slot.batch.targets.resize(ranges.size());
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      if (wants_inputs) slot.batch.inputs[i] = place(inputs[i], at);
      if (wants_targets) slot.batch.targets[i] = place(targets[i], at);
    }
  }

  // The worker: fills slots[filling] with the step it is asked for, one at a time.
  void work() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return stopping || wanted.has_value(); });
      if (stopping) return;
      const std::uint64_t step = *wanted;
      BatchSlot& slot = slots[1 - reading];
      lock.unlock();
      std::exception_ptr error = fill(slot, step);
      lock.lock();
      slot.step = step;
      slot.error = std::move(error);
      wanted.reset();
      changed.notify_all();
    }
  }

  std::exception_ptr fill(const BatchSlot& slot, std::uint64_t step) const {
    try {
      for (std::size_t i = 0; i < ranges.size(); ++i) {
        if (!slot.batch.inputs[i].empty()) {
          source.inputs(phase, step, ranges[i], slot.batch.inputs[i]);
        }
        if (!slot.batch.targets[i].empty()) {
          source.targets(phase, step, ranges[i], slot.batch.targets[i]);
        }
      }
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  const Batch& load(std::uint64_t step) {
    if (!worker.joinable()) return slots[0].batch;
    std::unique_lock lock(mutex);
    if (slots[reading].step == step) return slots[reading].batch;
    const auto idle = [this] { return !wanted.has_value(); };
    changed.wait(lock, idle);
    BatchSlot* slot = &slots[1 - reading];
    if (slot->step != step) {
      wanted = step;
      changed.notify_all();
      changed.wait(lock, idle);
    }
    if (slot->error) {
      slot->step.reset();  // another load of this step tries again
      std::rethrow_exception(std::exchange(slot->error, nullptr));
    }
    reading = 1 - reading;
    wanted = step + 1;
    changed.notify_all();
    return slot->batch;
  }

  const DataSource& source;
  const Phase phase;
  const std::vector<SampleRange> ranges;
  std::array<BatchSlot, 2> slots;

  std::mutex mutex;
  std::condition_variable changed;
  std::size_t reading = 0;              // the slot the caller reads; the other is the worker's
  std::optional<std::uint64_t> wanted;  // set: the worker is loading it
  bool stopping = false;
  std::thread worker;
};

BatchLoader::BatchLoader(const DataSource& source, Phase phase,
                         std::vector<SampleRange> micro_batches, bool wants_inputs,
                         bool wants_targets, Device device)
    : impl_(std::make_unique<Impl>(source, phase, std::move(micro_batches), wants_inputs,
                                   wants_targets, device)) {}

BatchLoader::~BatchLoader() = default;

const BatchLoader::Batch& BatchLoader::load(std::uint64_t step) { return impl_->load(step); }

}  // namespace sluice
