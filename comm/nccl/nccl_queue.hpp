// NcclQueue: everything a rank gives to NCCL, in one order.
//
// NCCL has no tags, and a communicator is one in-order queue of groups per rank; kernels of several
// communicators may wait for one another. So one order of all groups, the same as seen by every
// pair of ranks, is what keeps a job from standing still: the plan's (MessageOrder::kGlobal). A
// queue issues what it is given in exactly the order it is given, one group after the other,
// whatever the communicator, and knows no other rule.
//
// Each communicator is a nccl_stream with a stream of its own. An operation takes the event after
// which its memory may be touched and gives a ticket for its end; both are points in streams, and
// the host never waits for a device here. What the host does wait for, where it asks, is that an
// operation has been issued: NCCL works on a group in a thread of its own (see comm/nccl/nccl.hpp),
// and only afterwards is its end a point in a stream. progress() issues what has waited for that.
//
// Threading: one thread. Nothing is allocated once max_open groups have been used. After an Error
// only abort() and the destructor may be called. The memory of open operations must outlive
// abort() or their end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <sluice/communicator.hpp>
#include <sluice/device.hpp>

#include "comm/nccl/nccl.hpp"
#include "comm/nccl/ordered_sum.hpp"

namespace sluice {

// The end of an operation. To be given back exactly once, by wait_on(), wait(), drop() or a done()
// that was true. A default-made one is done.
struct NcclTicket {
  std::int32_t group = -1;
  std::int32_t nccl_stream = -1;
  std::uint64_t number = 0;
};

class NcclQueue {
 public:
  // `max_open`: groups, at least 1, that may have unissued operations or tickets not given back;
  // one more is Error(kInternal). `local_ranks` decides how waits behave (Waiter).
  NcclQueue(Device device, std::size_t max_open, int local_ranks);
  // Aborts all nccl_streams at once unless finalized. Never throws.
  ~NcclQueue();
  NcclQueue(const NcclQueue&) = delete;
  NcclQueue& operator=(const NcclQueue&) = delete;

  // Takes the communicator, of this queue's device, and returns its nccl_stream. Not inside a
  // group.
  [[nodiscard]] int add(std::unique_ptr<NcclCommunicator> communicator);
  [[nodiscard]] const NcclCommunicator& communicator(int nccl_stream) const;

  // Operations from begin_group() to end_group() run side by side, on each nccl_stream as one group
  // of NCCL's. `peer` counts as the nccl_stream's communicator does; the bytes are the device's,
  // their number the same at both ends. `ready` must have been recorded and must not be recorded
  // again until the operation is issued.
  void begin_group();
  [[nodiscard]] NcclTicket send(int nccl_stream, int peer, std::span<const std::byte> data,
                                const Event& ready);
  [[nodiscard]] NcclTicket recv(int nccl_stream, int peer, std::span<std::byte> data,
                                const Event& ready);
  [[nodiscard]] NcclTicket all_reduce_sum(int nccl_stream, std::span<float> values,
                                          const Event& ready);
  // A kernel in the nccl_stream's stream, alone in its group.
  [[nodiscard]] NcclTicket add_shards(int nccl_stream, const ShardSum& sum);
  // Issues the group, or keeps it until its turn. An empty group is none.
  void end_group();

  // Issues what can be issued now, and throws Error(kPeer | kDevice) where any nccl_stream has
  // failed. Never blocks; whoever waits for anything that another rank's operations lead to calls
  // it.
  void progress();
  // Make progress. done() asks the device.
  [[nodiscard]] bool issued(const NcclTicket& ticket);
  [[nodiscard]] bool done(NcclTicket& ticket);
  // What is put on the stream from now on runs after the operation, which must be issued. Gives the
  // ticket back.
  void wait_on(StreamView stream, NcclTicket& ticket);
  void drop(NcclTicket& ticket);

  // Block the host, polling the interrupt, which may be null: until the operation is issued, or
  // done and the ticket given back.
  void wait_issued(const NcclTicket& ticket, Interrupt* interrupt);
  void wait(NcclTicket& ticket, Interrupt* interrupt);

  // Collective over all nccl_streams, added in the same order on all ranks: the orderly end. Waits
  // until everything issued is done.
  void finalize(Interrupt* interrupt);
  // Ends every nccl_stream's kernels, wherever they hang, and frees the communicators.
  void abort() noexcept;

 private:
  struct Operation;
  struct Group;
  struct NcclStream;

  Operation& append(int nccl_stream, const Event* ready);
  [[nodiscard]] NcclTicket ticket_of(int nccl_stream);
  [[nodiscard]] Group& group_of(const NcclTicket& ticket);
  void give_back(NcclTicket& ticket);
  void issue(Group& group);
  void record(std::int32_t index);
  [[nodiscard]] bool nccl_streams_ready();
  void recycle(std::int32_t index);

  Device device_;
  std::vector<NcclStream> nccl_streams_;
  std::vector<NcclCommunicator*> communicators_;  // [nccl_stream]
  std::vector<Group> groups_;
  std::vector<std::int32_t> free_;     // indices of groups_
  std::vector<std::int32_t> pending_;  // a ring: groups ended and not yet issued
  std::size_t first_pending_ = 0, pending_count_ = 0;
  std::int32_t open_ = -1;     // between begin_group() and end_group()
  std::int32_t issuing_ = -1;  // handed to NCCL, which still works on it
  std::uint64_t numbers_ = 0;
  Waiter waiter_;
};

}  // namespace sluice
