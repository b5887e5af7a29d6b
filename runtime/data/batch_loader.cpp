#include "runtime/data/batch_loader.hpp"

// Two batches of host memory: the caller reads one, the worker fills the other. Only the slot index
// is shared between them, under the mutex. The state lives as long as either.
#include <algorithm>
#include <array>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "comm/base/threads.hpp"
#include "runtime/data/named_calls.hpp"

namespace sluice {
namespace {

struct BatchSlot {
  BatchMemory memory;
  std::optional<std::uint64_t> step;  // loaded, or failed with `error`
  std::exception_ptr error;
};

}  // namespace

void BatchMemory::place(const DataSource& source, std::span<const SampleRange> ranges) {
  if (memory_.size() < ranges.size()) {
    memory_.resize(ranges.size());
    batch_.inputs.resize(ranges.size());
    batch_.targets.resize(ranges.size());
  }
  const auto place_one = [&](const std::vector<TensorSpec>& specs, std::vector<HostBuffer>& memory,
                             std::vector<Tensor>& tensors) {
    tensors.resize(specs.size());
    memory.resize(std::max(memory.size(), specs.size()));
    for (std::size_t i = 0; i < specs.size(); ++i) {
      if (memory[i].size() < specs[i].bytes()) memory[i] = HostBuffer(device_, specs[i].bytes());
      tensors[i] = {memory[i].data(), specs[i]};
    }
  };
  for (std::size_t m = 0; m < ranges.size(); ++m) {
    const std::int64_t samples = ranges[m].count;
    if (inputs_) place_one(source.input_specs(samples), memory_[m].inputs, batch_.inputs[m]);
    if (targets_) place_one(source.target_specs(samples), memory_[m].targets, batch_.targets[m]);
  }
}

void BatchMemory::read(const DataSource& source, Phase phase, std::uint64_t step,
                       std::span<const SampleRange> ranges, bool watched,
                       const std::atomic<bool>* stopping) const {
  for (std::size_t m = 0; m < ranges.size(); ++m) {
    for (const bool targets : {false, true}) {
      const std::vector<Tensor>& into = targets ? batch_.targets[m] : batch_.inputs[m];
      if (into.empty() || (stopping != nullptr && *stopping)) continue;
      read_batch(source, phase, step, ranges[m], targets, into, watched);
    }
  }
}

struct BatchLoader::State {
  State(const DataSource& data, Phase of_phase, std::vector<SampleRange> micro_batches,
        bool wants_inputs, bool wants_targets, Device device)
      : source(data),
        phase(of_phase),
        ranges(std::move(micro_batches)),
        reads(wants_inputs || wants_targets),
        slots{{{{wants_inputs, wants_targets, device}, {}, {}},
               {{wants_inputs, wants_targets, device}, {}, {}}}} {
    for (BatchSlot& slot : slots) slot.memory.place(source, ranges);
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
      slot.memory.read(source, phase, step, ranges, first, &stopping);
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
    if (!reads) return slots[0].memory.batch();
    std::unique_lock lock(mutex);
    if (slots[reading].step == step) return slots[reading].memory.batch();
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
    return slot->memory.batch();
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
