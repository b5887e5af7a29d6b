#include "runtime/engine/state_store.hpp"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "comm/base/byte_sums.hpp"
#include "comm/base/index.hpp"
#include "comm/base/threads.hpp"
#include "runtime/files/scratch_file.hpp"

namespace sluice {
namespace {

class HostStore final : public StateStore {
 public:
  HostStore(std::span<const Shelf> shelves, ComputeContext& compute)
      : StateStore(shelves),
        compute_(compute),
        memory_(compute.device(), bytes()),
        stream_(compute.device()),
        ready_(compute.device()) {
    for (Event& each : ends_) each = Event(compute.device());
  }

  Number start(const Move& move) override {
    ready_.record(compute_.stream());
    stream_.view().wait(ready_);
    const Room room = room_of(move);
    std::byte* const stored = memory_.data() + room.offset;
    std::byte* const state = move.state.data();
    copy_async(move.leaves ? stored : state, move.leaves ? state : stored, room.bytes,
               stream_.view());
    end_of(++started_).record(stream_.view());
    return started_;
  }

  bool done(Number move) override {
    compute_.stream().wait(end_of(move));
    return true;
  }

 private:
  // One that a later move has taken over ends later.
  Event& end_of(Number move) { return ends_[move % ends_.size()]; }

  ComputeContext& compute_;
  HostBuffer memory_;
  Stream stream_;
  Event ready_;
  std::array<Event, 64> ends_;
  Number started_ = 0;
};

class DiskStore final : public StateStore {
 public:
  DiskStore(std::span<const Shelf> shelves, ComputeContext& compute,
            const PipelineOptions::Offload& offload)
      : StateStore(shelves),
        compute_(compute),
        file_(offload.directory, offload.activations == PipelineOptions::Offload::To::kCachedDisk,
              bytes()) {
    if (on_gpu()) {
      stream_.emplace(compute.device());
      staged_ = HostBuffer(compute.device(), kStagedBytes);
    }
    thread_ = start_thread<std::jthread>("offloaded activations",
                                         [this](const std::stop_token& stop) { run(stop); });
  }

  Number start(const Move& move) override {
    const std::unique_lock lock(mutex_);
    if (free_.empty()) free_.emplace_back().ready = Event(compute_.device());
    Item& item = free_.front();
    item.move = move;
    item.ready.record(compute_.stream());
    items_.splice(items_.end(), free_, free_.begin());
    more_.notify_one();
    return ++started_;
  }

  bool done(Number move) override {
    const std::unique_lock lock(mutex_);
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    return ended_ >= move;
  }

  std::span<const Made> take_made() override {
    const std::unique_lock lock(mutex_);
    taken_.swap(made_);
    made_.clear();
    return taken_;
  }

 private:
  static constexpr std::size_t kStaged = kStagedBytes - ScratchFile::kAlignment;
  struct Item {
    Move move;
    Event ready;
  };

  [[nodiscard]] bool on_gpu() const { return compute_.device().kind != DeviceKind::kCpu; }

  void run(const std::stop_token& stop) {
    try {
      use_device(compute_.device());
      for (std::unique_lock lock(mutex_);;) {
        if (!more_.wait(lock, stop, [&] { return !items_.empty(); })) return;
        const Item& item = items_.front();  // stays where it is
        lock.unlock();
        while (!item.ready.done()) {
          if (stop.stop_requested()) return;  // after an error a GPU may never come to it
          std::this_thread::yield();
        }
        const double begin = steady_seconds();
        make(item);
        lock.lock();
        made_.push_back({item.move, {begin, steady_seconds()}});
        free_.splice(free_.end(), items_, items_.begin());
        ++ended_;
      }
    } catch (...) {
      const std::unique_lock lock(mutex_);
      failure_ = std::current_exception();
    }
  }

  void make(const Item& item) {
    const Room room = room_of(item.move);
    const std::span<std::byte> state = item.move.state.first(room.bytes);
    if (!on_gpu()) {
      if (item.move.leaves) return file_.write(room.offset, state);
      return file_.read(room.offset, state);
    }
    const auto address = reinterpret_cast<std::uintptr_t>(staged_.data());
    std::byte* const staged =
        staged_.data() + (round_up(address, ScratchFile::kAlignment) - address);
    for (std::size_t begin = 0; begin < room.bytes; begin += kStaged) {
      const std::span<std::byte> part(staged, std::min(kStaged, room.bytes - begin));
      const auto copy = [&](std::byte* to, const std::byte* from) {
        copy_async(to, from, part.size(), stream_->view());
        stream_->view().synchronize();
      };
      if (item.move.leaves) {
        copy(part.data(), state.data() + begin);
        file_.write(room.offset + begin, part);
      } else {
        file_.read(room.offset + begin, part);
        copy(state.data() + begin, part.data());
      }
    }
  }

  ComputeContext& compute_;
  ScratchFile file_;
  std::optional<Stream> stream_;  // of a GPU
  HostBuffer staged_;             // likewise
  std::mutex mutex_;
  std::condition_variable_any more_;
  std::list<Item> items_, free_;  // started and not ended; to be used again
  std::vector<Made> made_, taken_;
  Number started_ = 0, ended_ = 0;
  std::exception_ptr failure_;
  std::jthread thread_;  // last: it stops before what it uses goes
};

}  // namespace

StateStore::StateStore(std::span<const Shelf> shelves) {
  for (const Shelf& shelf : shelves) {
    shelves_[shelf.stage] = {bytes_, shelf.bytes};
    add_bytes(bytes_, multiply_bytes(shelf.bytes, at(shelf.places)));
  }
}

StateStore::Room StateStore::room_of(const Move& move) const {
  const Room& first = shelves_.at(move.stage);
  return {first.offset + at(move.place) * first.bytes, first.bytes};
}

std::size_t StateStore::alignment(const PipelineOptions::Offload& offload) {
  const bool file = offload.activations == PipelineOptions::Offload::To::kDisk ||
                    offload.activations == PipelineOptions::Offload::To::kCachedDisk;
  return file ? ScratchFile::kAlignment : kBufferAlignment;
}

std::unique_ptr<StateStore> StateStore::make(const PipelineOptions::Offload& offload,
                                             std::span<const Shelf> shelves,
                                             ComputeContext& compute) {
  const bool none =
      std::ranges::all_of(shelves, [](const Shelf& each) { return each.places == 0; });
  if (none) return nullptr;
  if (offload.activations == PipelineOptions::Offload::To::kHost) {
    return std::make_unique<HostStore>(shelves, compute);
  }
  return std::make_unique<DiskStore>(shelves, compute, offload);
}

}  // namespace sluice
