// HostSums: sums over ranks in host memory, and gathers of their parts.
//
// Each element of a sum is added by the tree of comm/base/sum_tree.hpp, in fp32: a function of the
// number of ranks alone. The values are divided into parts, one of each rank, which may be empty:
// that of rank r is [ends[r - 1], ends[r]), from 0 on; the last one ends with the values. A rank
// adds its part, block by block (block_steps.hpp).
//
// Asynchronous: what has started goes on in progress() and wait() alone, one call after the other,
// so all ranks of the communicator start the same calls in the same order, with the same ends.
// Ranks that disagree about sizes may get Error(kMismatch). A call that throws has cancelled all
// that has started. `owner` keeps the values' memory while cancelled messages use it; without one,
// the caller passes it to the communicator's keep() after a throw. One thread.
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
    int addends, parts, second_hand;
  };
  // What has started. They end in the order of their numbers.
  using Ticket = std::uint64_t;

  // `interrupt` may be null; it is polled by wait(), and may call progress() then.
  HostSums(Communicator& comm, const Tags& tags, Interrupt* interrupt);
  ~HostSums() { abandon(); }
  HostSums(const HostSums&) = delete;
  HostSums& operator=(const HostSums&) = delete;

  // Hosts of the ranks, equal numbers for one host, the same on every rank; without it, all are on
  // one. It changes who sends what to whom, no result. Not while a call has started. Allocates.
  // Error(kInternal) for another number of ranks.
  void set_hosts(std::span<const int> hosts);
  // Allocates what sums of up to `count` values need, of parts of any sizes, while up to `calls`
  // have started, of which start_sum() makes two; without it, the first ones that need it do.
  // Not while a call has started.
  void reserve(std::size_t count, std::size_t calls = 2);

  // In place; the values are the call's until it is done. Error(kInternal), before any message, for
  // ends that are not as above.
  // The sum of each part, for its rank alone: other elements have any content after it.
  Ticket start_reduce_scatter(std::span<float> values, std::span<const std::size_t> ends,
                              const KeepAlive& owner = nullptr);
  // Each rank's part, to all ranks.
  Ticket start_gather(std::span<float> values, std::span<const std::size_t> ends,
                      const KeepAlive& owner = nullptr);
  // Both, over parts of one size.
  Ticket start_sum(std::span<float> values, const KeepAlive& owner = nullptr);

  [[nodiscard]] bool done(Ticket ticket) const { return ticket <= finished_; }
  void progress();
  void wait(Ticket ticket);

 private:
  struct Call {
    const BlockSteps* steps = nullptr;
    int tag = 0;
    std::span<float> values;
    std::vector<std::size_t> ends;  // [rank]
    KeepAlive owner;
    std::size_t floats = 0, blocks = 0;    // of a block; of the largest part
    std::size_t in_flight = 0, begun = 0;  // blocks
    std::size_t block = 0, next = 0;       // the step of BlockSteps::rest that has to be made
  };

  Ticket start(const BlockSteps& steps, int tag, std::span<float> values,
               std::span<const std::size_t> ends, const KeepAlive& owner);
  bool step();
  bool make(const Call& call, std::size_t block, const BlockStep& step);
  [[nodiscard]] WaitSubject subject() const;
  void abandon() noexcept;

  Communicator& comm_;
  Tags tags_;
  Interrupt* interrupt_;
  Waiter waiter_;
  BlockSteps scatter_, gather_;
  std::vector<Request> open_;           // of the call that runs; sized with the steps
  std::vector<std::size_t> even_ends_;  // [rank] of the last start_sum()
  // [first_, last_) have started; the first of them runs. Others keep their memory for later ones.
  std::vector<Call> calls_;
  std::size_t first_ = 0, last_ = 0;
  Ticket started_ = 0, finished_ = 0;
  std::uint64_t steps_ = 0;  // made so far, of all calls
  // Addends of the blocks on their way. The communicator shares them after a throw.
  std::shared_ptr<std::vector<float>> blocks_;
};

}  // namespace sluice
