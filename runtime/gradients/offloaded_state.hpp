// The state of a rank's optimizers in files: pieces of it are in memory while they are updated.
// Internal to the pipeline.
//
// Each vector of state is a file without a name. An update goes through the pieces of the vectors
// in order. Beside it threads write those that are updated and read those that come next; after the
// last one they read the first ones for the next update. What was never written is zeros, and is
// not read. Saves and loads reach any bytes by Access.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <stop_token>
#include <thread>
#include <vector>

#include <sluice/options.hpp>

#include "comm/base/byte_sums.hpp"
#include "comm/device/host_pages.hpp"
#include "comm/group/waiter.hpp"
#include "runtime/files/scratch_file.hpp"
#include "stages/operators/optimizer.hpp"

namespace sluice {

class ActivityBoard;  // runtime/group/activity.hpp

class OffloadedState final : public StatePieces {
 public:
  struct Sizes {
    std::size_t kinds = 0, bytes = 0;  // vectors, and of each: a multiple of kBufferAlignment
    std::size_t pool = 0;              // of memory, at most: PipelineOptions::Offload::pool

    // Of an optimizer that would take so many bytes in memory.
    [[nodiscard]] static Sizes of(const OptimizerConfig& config, std::size_t bytes,
                                  std::size_t pool);
    [[nodiscard]] std::size_t piece() const;   // bytes of each vector that come together
    [[nodiscard]] std::size_t unit() const;    // with one checksum; a piece has whole ones
    [[nodiscard]] std::size_t pieces() const;  // of a vector
    [[nodiscard]] std::size_t slots() const;   // pieces in memory at once
    [[nodiscard]] std::size_t vector() const;  // bytes of a vector on the disk
    [[nodiscard]] std::size_t memory() const { return kinds * slots() * piece(); }
    [[nodiscard]] std::size_t disk() const { return multiply_bytes(vector(), kinds); }
    // What one Access takes.
    [[nodiscard]] std::size_t access() const { return kinds * unit(); }
  };

  // Takes the room of `sizes`, which is not 0, on the disk. `interrupt` is polled by waits; `board`
  // knows the newest save; both may be null, else they outlive this. Throws what ScratchFile and
  // memory throw.
  OffloadedState(const Sizes& sizes, const PipelineOptions::Offload& offload, Interrupt* interrupt,
                 const ActivityBoard* board);

  [[nodiscard]] std::size_t take(std::size_t bytes) override;
  [[nodiscard]] std::byte* address(std::size_t kind, std::size_t begin) const override {
    return addresses_.data() + kind * sizes_.vector() + begin;
  }
  // Waits until no Access is left.
  void visit(std::size_t begin, std::size_t end, const Visit& each) override;
  [[nodiscard]] bool has(const void* address) const { return addresses_.has(address); }

  // Bytes by their addresses, a unit of each vector in memory at a time: ascending addresses read
  // and write each once. While one exists no update starts. One thread uses it, which need not
  // be the pipeline's.
  class Access {
   public:
    // kWrites: waits until no other one is left, and forgets what is read ahead.
    enum class Use { kReads, kWrites };
    Access(OffloadedState& state, Use use);
    ~Access();
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;
    void read(const std::byte* address, std::span<std::byte> into);
    void write(const std::byte* address, std::span<const std::byte> from);
    // Writes what is left.
    void flush();

   private:
    struct Unit {
      std::size_t number = SIZE_MAX;
      bool changed = false;
      std::byte* memory = nullptr;
    };
    // Calls each(memory, done, count) for the parts of `bytes` bytes in different units.
    template <typename Each>
    void in_units(const std::byte* address, std::size_t bytes, const Each& each);
    void bring(std::size_t kind, std::size_t number);
    void flush(std::size_t kind);

    OffloadedState& state_;
    Buffer memory_;
    std::vector<Unit> units_;  // [kind]
  };

 private:
  static constexpr std::size_t kNone = SIZE_MAX;
  static constexpr std::size_t kMostKinds = 2;
  struct Vector {
    Vector(const Sizes& sizes, const PipelineOptions::Offload& offload);
    ScratchFile file;
    std::vector<std::uint8_t> written;  // [unit]
  };
  // Memory of a piece of each vector. A thread writes one from it, then reads another one to it.
  struct Slot {
    enum class State : std::uint8_t { kIdle, kAsked, kMoves };
    State state = State::kIdle;
    std::uint64_t order = 0;  // of asking
    std::size_t writes = kNone, reads = kNone;
    std::array<std::byte*, kMostKinds> memory = {};
  };

  // The piece in memory, which comes next.
  Slot& bring(std::size_t piece);
  void ask(Slot& slot, std::size_t writes, std::size_t reads);
  void run(const std::stop_token& stop);
  void make(const Slot& slot);
  void move_unit(std::size_t kind, std::size_t number, std::byte* memory, bool writes);
  void wait_until_written();  // and read ahead
  void wait_for_accesses();
  template <typename Done>
  void wait(const Done& done);  // done() with the lock; throws what a thread has thrown
  [[noreturn]] void fail() const;

  Sizes sizes_;
  Interrupt* interrupt_;
  const ActivityBoard* board_;
  Waiter waiter_;
  AbsentMemory addresses_;
  Buffer memory_;
  std::deque<Vector> vectors_;  // [kind]
  std::size_t taken_ = 0;
  bool ahead_ = false;    // whether slots have what comes next
  std::size_t next_ = 0;  // pieces that were updated since then
  std::atomic<int> accesses_ = 0;
  std::atomic<std::uint64_t> moved_ = 0;  // units, by accesses
  std::mutex mutex_;
  std::condition_variable_any more_;
  std::vector<Slot> slots_;
  std::uint64_t asked_ = 0;
  std::exception_ptr failure_;
  std::vector<std::jthread> threads_;  // last: they stop before what they use goes
};

}  // namespace sluice
