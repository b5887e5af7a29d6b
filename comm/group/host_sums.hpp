// HostSums: sums over ranks in host memory, and gathers of their parts.
//
// Each element of a sum is added by the tree of comm/base/sum_tree.hpp, in fp32: a function of the
// number of ranks alone. The values are divided into parts, one of each rank, which may be empty:
// part i is [ends[i - 1], ends[i]), from 0 on; the last one ends with the values. Part r is that of
// rank r, or `parts` says for each rank which one it has. A rank adds its part, block by block
// (block_steps.hpp).
//
// Asynchronous: what has started goes on in progress() and wait() alone. All ranks of the
// communicator start the same calls in the same order, with the same ends. Sums of parts are made
// in that order, and so are gathers; a gather begins once the sums that started before it are done,
// while later ones go on. Blocks of several calls are on their way at a time. Ranks that disagree
// about sizes may get Error(kMismatch). A call that throws has cancelled all that has started.
// `owner` keeps the values' memory while cancelled messages use it; without one, the caller passes
// it to the communicator's keep() after a throw. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/group/block_steps.hpp"
#include "comm/group/communicator.hpp"
#include "comm/group/waiter.hpp"

namespace sluice {

class HostSums {
 public:
  // Of messages.
  struct Tags {
    int direct = -1, second_hand = -1;
  };
  // What has started so far: the number of sums of parts, and of gathers. After a throw all of it
  // counts as done.
  struct Ticket {
    std::uint64_t sums = 0, gathers = 0;
  };

  // `interrupt` may be null; it is polled by wait(), and may call progress() then.
  HostSums(Communicator& comm, const Tags& of_sums, const Tags& of_gathers, Interrupt* interrupt);
  ~HostSums() { abandon(); }
  HostSums(const HostSums&) = delete;
  HostSums& operator=(const HostSums&) = delete;

  // Hosts of the ranks, equal numbers for one host, the same on every rank; without it, all are on
  // one. It changes who sends what to whom, no result. Not while a call has started. Allocates.
  // Error(kInternal) for another number of ranks.
  void set_hosts(std::span<const int> hosts);
  // Allocates what sums of up to `count` values need, of parts of any sizes, while up to `calls`
  // of each kind have started; without it, the first ones that need it do. Not while a call has
  // started.
  void reserve(std::size_t count, std::size_t calls = 1);
  // What reserve() takes for the values on `rank` of these hosts; gathers take nothing.
  [[nodiscard]] static std::size_t bytes_for(std::span<const int> hosts, int rank,
                                             std::size_t count);
  [[nodiscard]] std::size_t bytes_held() const { return slots_->size() * sizeof(float); }

  // In place; the values are the call's until it is done. `ended` may be null, else it gets that
  // time, in steady_seconds(). Error(kInternal), before any message, for ends that are not as
  // above. The sum of each part, for its rank alone: other elements have any content after it.
  Ticket start_reduce_scatter(std::span<float> values, std::span<const std::size_t> ends,
                              const KeepAlive& owner = nullptr, double* ended = nullptr,
                              std::span<const int> parts = {});
  // Each rank's part, to all ranks.
  Ticket start_gather(std::span<float> values, std::span<const std::size_t> ends,
                      const KeepAlive& owner = nullptr);
  // Both, over parts of one size.
  Ticket start_sum(std::span<float> values, const KeepAlive& owner = nullptr,
                   double* ended = nullptr);

  [[nodiscard]] bool done(const Ticket& ticket) const {
    return ticket.sums <= sums_.finished && ticket.gathers <= gathers_.finished;
  }
  void progress();
  void wait(const Ticket& ticket);

 private:
  struct Range {
    std::size_t begin = 0, size = 0;
    // Of it, in blocks of `floats`; empty beyond its end.
    [[nodiscard]] Range block(std::size_t floats, std::size_t number) const;
  };
  struct Call {
    std::span<float> values;
    std::vector<Range> parts;  // [rank]
    KeepAlive owner;
    double* ended = nullptr;
    std::size_t blocks = 0;   // of the largest part
    std::uint64_t after = 0;  // of a gather: sums that have to be done before
  };
  // A block of a call.
  struct Place {
    std::size_t call = 0, block = 0;
  };
  // The calls of one kind: their blocks, one after the other, in one sequence.
  struct Lane {
    Tags tags;
    std::size_t floats = 0, most = 0;  // of a block; blocks on their way at a time
    BlockSteps steps = {};
    std::vector<Request> open = {};  // [block % most][request]
    // [first, last) have started, from number `finished` on. Others keep their memory for later
    // ones.
    std::vector<Call> calls = {};
    std::size_t first = 0, last = 0;
    Place begins = {}, ends = {};        // of the sequence: the next block to begin, and to end
    std::uint64_t begun = 0, ended = 0;  // blocks before them
    std::size_t next = 0;                // of the block that ends: the step of `rest` to make
    std::uint64_t finished = 0;          // calls

    void rewind() {
      first = last = next = 0;
      begins = ends = {};
    }
  };

  void start(Lane& lane, std::span<float> values, std::span<const std::size_t> ends,
             const KeepAlive& owner, double* ended, std::span<const int> parts = {});
  [[nodiscard]] Ticket started() const;
  bool step() { return step(sums_) || step(gathers_); }
  bool step(Lane& lane);
  void begin(Lane& lane);
  bool make(Lane& lane, const Place& place, std::uint64_t number, const BlockStep& step);
  static bool advance(const Lane& lane, Place& place);
  [[nodiscard]] bool has_slots(const Call& call);
  [[nodiscard]] WaitSubject subject(const Ticket& ticket) const;
  void abandon() noexcept;

  Communicator& comm_;
  Interrupt* interrupt_;
  Waiter waiter_;
  Lane sums_, gathers_;
  std::vector<std::size_t> even_ends_;  // [rank] of the last start_sum()
  std::uint64_t steps_ = 0;             // made so far, of all calls
  // Addends of the blocks on their way, [block % most][slot]. The communicator shares them after a
  // throw.
  std::shared_ptr<std::vector<float>> slots_;
  std::size_t slot_floats_ = 0;
};

}  // namespace sluice
