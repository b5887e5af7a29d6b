#include "tests/emulated_cuda/block.hpp"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "tests/emulated_cuda/fiber.hpp"

namespace sluice::emulated {

constinit thread_local const Place* running_place = nullptr;

namespace {

constexpr unsigned kWarpLanes = 32;

enum class State : std::uint8_t { kNotStarted, kRunning, kAtBarrier, kInWarp, kEnded };

// Of copy_later().
struct LateCopy {
  unsigned char* to;
  const void* from;
  std::size_t bytes, existing;
};

// One thread of the running block.
struct Thread {
  State state = State::kNotStarted;
  struct Worker* worker = nullptr;
  std::source_location where;
  // Of a warp exchange.
  std::uint32_t mask = 0;
  WarpOperation operation{};
  std::uint64_t value = 0;
  std::uint64_t result = 0;
  int source = 0;
  WarpReduction reduce = nullptr;
  unsigned reductions = 0;  // calls of block_result()
  std::vector<LateCopy> copies;
};

// Of 32 threads of the running block, a bit for each lane.
struct Warp {
  std::uint32_t waiting = 0;  // lanes in State::kInWarp
  std::uint32_t ended = 0;
};

// A fiber with the thread it runs at the moment.
struct Worker {
  explicit Worker(std::function<void()> body) : fiber(std::move(body)) {}
  Fiber fiber;
  Place place;
  unsigned thread = 0;
};

const char* base_name(const char* path) {
  const std::string_view text = path;
  const auto slash = text.rfind('/');
  return slash == std::string_view::npos ? path : path + slash + 1;
}

class BlockRunner {
 public:
  BlockRunner() = default;
  BlockRunner(const BlockRunner&) = delete;
  BlockRunner& operator=(const BlockRunner&) = delete;
  ~BlockRunner() {
    stopping_ = true;
    for (Worker* worker : idle_) worker->fiber.resume();
  }

  void run(const Launch& launch, const std::function<void()>& run_thread) {
    launch_ = &launch;
    run_thread_ = &run_thread;
    count_ = launch.block.x * launch.block.y * launch.block.z;
    threads_.resize(count_);
    warps_.resize((count_ + kWarpLanes - 1) / kWarpLanes);
    slots_.resize(count_);
    // The exact size, so that the address sanitizer sees an access beyond it.
    shared_.reset(launch.shared_bytes == 0 ? nullptr : ::operator new(launch.shared_bytes, kAlign));
    for (block_.z = 0; block_.z < launch.grid.z; ++block_.z) {
      for (block_.y = 0; block_.y < launch.grid.y; ++block_.y) {
        for (block_.x = 0; block_.x < launch.grid.x; ++block_.x) run_block();
      }
    }
    shared_.reset();
  }

  void barrier(std::source_location where, void (*finish)(void*), void* argument) {
    Thread& self = current();
    self.where = where;
    if (ended_ > 0) {
      const Thread& other = *std::find_if(threads_.begin(), threads_.end(),
                                          [](const Thread& t) { return t.state == State::kEnded; });
      fail(describe(self) + " waits for the block at " + place_of(self) + ", but " +
           describe(other) + " has ended");
    }
    if (waiting_ == 0) {
      barrier_place_ = where;
    } else if (barrier_place_.line() != where.line() ||
               std::string_view(barrier_place_.file_name()) != where.file_name()) {
      const Thread& other = *std::find_if(threads_.begin(), threads_.end(), [](const Thread& t) {
        return t.state == State::kAtBarrier;
      });
      fail(describe(self) + " waits for the block at " + place_of(self) + ", but " +
           describe(other) + " at " + place_of(other));
    }
    ++waiting_;
    if (waiting_ < count_) {
      park(self, State::kAtBarrier);
      return;
    }
    if (finish != nullptr) finish(argument);
    waiting_ = 0;
    for (Thread& thread : threads_) {
      if (thread.state == State::kAtBarrier) make_ready(thread);
    }
  }

  std::uint64_t exchange(std::uint32_t mask, WarpOperation operation, std::uint64_t value,
                         int source, WarpReduction reduce, std::source_location where) {
    Thread& self = current();
    const unsigned index = index_of(self), first = index / kWarpLanes * kWarpLanes;
    const std::uint32_t mine = 1U << (index - first);
    Warp& warp = warps_[index / kWarpLanes];
    self.where = where;
    self.mask = mask;
    self.operation = operation;
    self.value = value;
    self.source = source;
    self.reduce = reduce;
    if ((mask & mine) == 0) {
      fail(describe(self) + " takes part in an exchange at " + place_of(self) +
           " whose mask does not name it");
    }
    if (const std::uint32_t ended = mask & warp.ended; ended != 0) {
      fail_ended_lane(self, threads_[first + static_cast<unsigned>(std::countr_zero(ended))]);
    }
    const unsigned lanes = std::min(count_ - first, kWarpLanes);
    const std::uint32_t named = mask & (~0U >> (kWarpLanes - lanes));
    if (!all_wait(named & ~mine, warp, first, mask)) {
      park(self, State::kInWarp);
      return self.result;
    }
    exchange_values(named, first, self);
    warp.waiting &= ~named;
    for (unsigned l = 0; l < lanes; ++l) {
      if ((named & ~mine) >> l & 1U) make_ready(threads_[first + l]);
    }
    return self.result;
  }

  [[nodiscard]] void* shared() {
    if (shared_ == nullptr) {
      fail(describe(current()) + " uses dynamic shared memory, the launch asked for none");
    }
    return shared_.get();
  }
  [[nodiscard]] std::uint64_t* slots() { return slots_.data(); }
  [[nodiscard]] std::uint64_t* result() { return &results_[current().reductions++ % 2]; }
  void copy_later(const LateCopy& copy) { current().copies.push_back(copy); }
  void finish_copies() {
    for (const LateCopy& copy : current().copies) {
      if (copy.existing > 0) std::memcpy(copy.to, copy.from, copy.existing);
      std::memset(copy.to + copy.existing, 0, copy.bytes - copy.existing);
    }
    current().copies.clear();
  }
  [[nodiscard]] int lane() const { return static_cast<int>(running_->thread % kWarpLanes); }

 private:
  static constexpr std::align_val_t kAlign{128};
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, kAlign); }
  };

  void run_block() {
    std::fill(threads_.begin(), threads_.end(), Thread{});
    std::fill(warps_.begin(), warps_.end(), Warp{});
    if (shared_ != nullptr) {
      std::fill_n(static_cast<unsigned char*>(shared_.get()), launch_->shared_bytes,
                  static_cast<unsigned char>(0xFF));
    }
    next_ = ended_ = waiting_ = 0;
    while (ended_ < count_) {
      Worker* worker = nullptr;
      if (!ready_.empty()) {
        worker = ready_.front();
        ready_.pop_front();
      } else if (next_ < count_) {
        worker = take_idle();
      } else {
        fail_stalled();
      }
      running_ = worker;
      running_place = &worker->place;
      worker->fiber.resume();
    }
    running_place = nullptr;
  }

  // The body of a fiber: threads of this block as long as there are any, then those of the next.
  void run_threads(Worker& worker) {
    while (!stopping_) {
      const dim3& shape = launch_->block;
      worker.place.block = block_;
      worker.place.block_shape = shape;
      worker.place.grid_shape = launch_->grid;
      while (next_ < count_) {
        const unsigned index = next_++;
        worker.thread = index;
        worker.place.thread =
            uint3{index % shape.x, index / shape.x % shape.y, index / (shape.x * shape.y)};
        threads_[index].worker = &worker;
        threads_[index].state = State::kRunning;
        (*run_thread_)();
        threads_[index].state = State::kEnded;
        ++ended_;
        warps_[index / kWarpLanes].ended |= 1U << index % kWarpLanes;
        check_nobody_waits_for(threads_[index]);
      }
      idle_.push_back(&worker);
      worker.fiber.suspend();
    }
  }

  Worker* take_idle() {
    if (idle_.empty()) {
      // The body runs only once resumed, when the pointer is set.
      auto self = std::make_shared<Worker*>(nullptr);
      workers_.push_back(std::make_unique<Worker>([this, self] { run_threads(**self); }));
      *self = workers_.back().get();
      return workers_.back().get();
    }
    Worker* worker = idle_.back();
    idle_.pop_back();
    return worker;
  }

  // Whether these lanes of the warp that starts at thread `first` wait for an exchange of `mask`.
  [[nodiscard]] bool all_wait(std::uint32_t lanes, const Warp& warp, unsigned first,
                              std::uint32_t mask) const {
    if ((lanes & ~warp.waiting) != 0) return false;
    for (unsigned l = 0; l < kWarpLanes; ++l) {
      if ((lanes >> l & 1U) != 0 && threads_[first + l].mask != mask) return false;
    }
    return true;
  }

  // Sets the results of the lanes in `named`, of which `last` came last.
  void exchange_values(std::uint32_t named, unsigned first, const Thread& last) {
    std::uint64_t values[kWarpLanes];
    std::uint64_t ballot = 0;
    for (unsigned l = 0; l < kWarpLanes; ++l) {
      values[l] = ~std::uint64_t{0};
      if ((named >> l & 1U) == 0) continue;
      const Thread& thread = threads_[first + l];
      if (thread.operation != last.operation || thread.reduce != last.reduce) {
        fail(describe(last) + " at " + place_of(last) + " and " + describe(thread) + " at " +
             place_of(thread) + " exchange by different operations");
      }
      values[l] = thread.value;
      if (thread.value != 0) ballot |= std::uint64_t{1} << l;
    }
    if (last.operation == WarpOperation::kReduce) last.reduce(values);
    for (unsigned l = 0; l < kWarpLanes; ++l) {
      if ((named >> l & 1U) == 0) continue;
      Thread& thread = threads_[first + l];
      const auto from = static_cast<unsigned>(thread.source);
      switch (last.operation) {
        case WarpOperation::kBarrier:
          thread.result = 0;
          break;
        case WarpOperation::kShuffle:
          thread.result = from < kWarpLanes ? values[from] : ~std::uint64_t{0};
          break;
        case WarpOperation::kBallot:
          thread.result = ballot;
          break;
        case WarpOperation::kReduce:
          thread.result = values[l];
          break;
      }
    }
  }

  void park(Thread& thread, State state) {
    Worker* worker = thread.worker;
    thread.state = state;
    if (state == State::kInWarp) {
      const unsigned index = index_of(thread);
      warps_[index / kWarpLanes].waiting |= 1U << index % kWarpLanes;
    }
    worker->fiber.suspend();
  }

  void make_ready(Thread& thread) {
    thread.state = State::kRunning;
    ready_.push_back(thread.worker);
  }

  void check_nobody_waits_for(const Thread& ended) {
    if (waiting_ > 0) {
      const Thread& other = *std::find_if(threads_.begin(), threads_.end(), [](const Thread& t) {
        return t.state == State::kAtBarrier;
      });
      fail(describe(other) + " waits for the block at " + place_of(other) + ", but " +
           describe(ended) + " has ended");
    }
    const unsigned first = index_of(ended) / kWarpLanes * kWarpLanes;
    for (std::uint32_t waiting = warps_[first / kWarpLanes].waiting; waiting != 0;
         waiting &= waiting - 1) {
      const Thread& other = threads_[first + static_cast<unsigned>(std::countr_zero(waiting))];
      if ((other.mask >> (index_of(ended) - first) & 1U) != 0) fail_ended_lane(other, ended);
    }
  }

  [[nodiscard]] Thread& current() { return threads_[running_->thread]; }
  [[nodiscard]] unsigned index_of(const Thread& thread) const {
    return static_cast<unsigned>(&thread - threads_.data());
  }
  [[nodiscard]] std::string describe(const Thread& thread) const {
    return "thread " + std::to_string(index_of(thread));
  }
  [[nodiscard]] static std::string place_of(const Thread& thread) {
    return std::string(base_name(thread.where.file_name())) + ":" +
           std::to_string(thread.where.line());
  }

  [[noreturn]] void fail_ended_lane(const Thread& waiting, const Thread& ended) const {
    fail(describe(waiting) + " waits for its warp at " + place_of(waiting) + ", but " +
         describe(ended) + ", which the mask names, has ended");
  }

  [[noreturn]] void fail_stalled() const {
    std::string text = "no thread can go on";
    for (const Thread& thread : threads_) {
      if (text.size() > 400) {
        text += "; ...";
        break;
      }
      if (thread.state != State::kInWarp && thread.state != State::kAtBarrier) continue;
      text += "; " + describe(thread) + " waits for its " +
              (thread.state == State::kInWarp ? "warp" : "block") + " at " + place_of(thread);
    }
    fail(text);
  }

  [[noreturn]] void fail(const std::string& what) const {
    std::fprintf(stderr, "emulated cuda: kernel '%s', block (%u, %u, %u): %s\n", launch_->name,
                 block_.x, block_.y, block_.z, what.c_str());
    std::abort();
  }

  const Launch* launch_ = nullptr;
  const std::function<void()>* run_thread_ = nullptr;
  uint3 block_{};
  unsigned count_ = 0;    // threads of a block
  unsigned next_ = 0;     // first thread that has not started
  unsigned ended_ = 0;    // threads
  unsigned waiting_ = 0;  // threads at the barrier of the block
  bool stopping_ = false;
  std::source_location barrier_place_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<std::uint64_t> slots_;
  std::uint64_t results_[2] = {};
  std::unique_ptr<void, Free> shared_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<Worker*> idle_;
  std::deque<Worker*> ready_;
  Worker* running_ = nullptr;
};

// Its fibers hold stacks, so it stays with the thread.
BlockRunner& runner() {
  static thread_local BlockRunner instance;
  return instance;
}

}  // namespace

void run_blocks(const Launch& launch, const std::function<void()>& run_thread) {
  runner().run(launch, run_thread);
}

void* dynamic_shared_memory() { return runner().shared(); }

void block_barrier(std::source_location where, void (*finish)(void*), void* argument) {
  runner().barrier(where, finish, argument);
}

std::uint64_t* block_slots() { return runner().slots(); }

std::uint64_t* block_result() { return runner().result(); }

std::uint64_t warp_exchange(std::uint32_t mask, WarpOperation operation, std::uint64_t value,
                            int source, std::source_location where) {
  return runner().exchange(mask, operation, value, source, nullptr, where);
}

std::uint64_t warp_reduction(std::uint64_t value, WarpReduction reduce,
                             std::source_location where) {
  return runner().exchange(~0U, WarpOperation::kReduce, value, 0, reduce, where);
}

int lane() { return runner().lane(); }

void copy_later(void* to, const void* from, std::size_t bytes, std::size_t existing) {
  runner().copy_later({static_cast<unsigned char*>(to), from, bytes, existing});
}

void finish_copies() { runner().finish_copies(); }

}  // namespace sluice::emulated
