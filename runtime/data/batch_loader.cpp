#include "runtime/data/batch_loader.hpp"

// Two batches of host memory: the caller reads one, the worker fills the other. Only the slot index
// is shared between them, under the mutex. The state lives as long as either.
#include <array>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <sluice/device.hpp>

#include "comm/base/byte_sums.hpp"
#include "comm/base/threads.hpp"
#include "runtime/data/named_calls.hpp"

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

struct BatchLoader::State {
  State(const DataSource& data, Phase of_phase, std::vector<SampleRange> micro_batches,
        bool wants_inputs, bool wants_targets, Device device)
      : source(data),
        phase(of_phase),
        ranges(std::move(micro_batches)),
        reads(wants_inputs || wants_targets) {
    for (BatchSlot& slot : slots) allocate(slot, wants_inputs, wants_targets, device);
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
      if (stopping) break;
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
    ended = true;
    changed.notify_all();
  }

  // Makes no call of the source once the loader is being destroyed.
  std::exception_ptr fill(const BatchSlot& slot, std::uint64_t step) {
    try {
      for (std::size_t i = 0; i < ranges.size(); ++i) {
        if (!slot.batch.inputs[i].empty() && !stopping) {
          read_inputs(source, phase, step, ranges[i], slot.batch.inputs[i], first);
        }
        if (!slot.batch.targets[i].empty() && !stopping) {
          read_targets(source, phase, step, ranges[i], slot.batch.targets[i], first);
        }
      }
      first = false;
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  void wait_for_worker(std::unique_lock<std::mutex>& lock, Interrupt* interrupt) {
    constexpr auto kBetweenPolls = std::chrono::milliseconds(5);
    while (!changed.wait_for(lock, kBetweenPolls, [this] { return !wanted.has_value(); })) {
      if (interrupt != nullptr) interrupt->poll();
    }
  }

  const Batch& load(std::uint64_t step, Interrupt* interrupt) {
    if (!reads) return slots[0].batch;
    std::unique_lock lock(mutex);
    if (slots[reading].step == step) return slots[reading].batch;
    wait_for_worker(lock, interrupt);
    BatchSlot* slot = &slots[1 - reading];
    if (slot->step != step) {
      wanted = step;
      changed.notify_all();
      wait_for_worker(lock, interrupt);
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
  const bool reads;
  std::array<BatchSlot, 2> slots;

  std::mutex mutex;
  std::condition_variable changed;
  std::size_t reading = 0;              // the slot the caller reads; the other is the worker's
  std::optional<std::uint64_t> wanted;  // set: the worker is loading it
  std::atomic<bool> stopping = false;   // written under the mutex
  bool ended = false;                   // the worker
  bool first = true;                    // the worker's: no batch has been read
};

BatchLoader::BatchLoader(const DataSource& source, Phase phase,
                         std::vector<SampleRange> micro_batches, bool wants_inputs,
                         bool wants_targets, Device device, std::chrono::milliseconds patience)
    : state_(std::make_shared<State>(source, phase, std::move(micro_batches), wants_inputs,
                                     wants_targets, device)),
      patience_(patience) {
  if (!state_->reads) return;
  worker_ = start_thread("loader of batches", [state = state_] { state->work(); });
}

BatchLoader::~BatchLoader() {
  if (!worker_.joinable()) return;
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
  const bool ended = state_->changed.wait_for(lock, patience_, [this] { return state_->ended; });
  lock.unlock();
  ended ? worker_.join() : worker_.detach();
}

const BatchLoader::Batch& BatchLoader::load(std::uint64_t step, Interrupt* interrupt) {
  return state_->load(step, interrupt);
}

}  // namespace sluice
