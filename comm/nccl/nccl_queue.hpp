// NcclQueue: all NCCL operations of a rank, in one order.
//
// NCCL has no tags. A communicator is one in-order queue of groups per rank, and kernels of several
// communicators may wait for one another. A job avoids deadlock if every pair of ranks issues its
// groups in the same order: the plan's (MessageOrder::kGlobal). A queue issues groups in the order
// given, one after the other, across all communicators.
//
// Each communicator has an NCCL stream: a CUDA stream of its own, named by an index. An operation
// takes the event after which its memory may be used and returns a ticket for its end. Both are
// points in streams. NCCL processes a group in its own thread (comm/nccl/nccl.hpp); the group is
// issued, and its end is a point in a stream, only after that. The host can wait for that, and
// progress() issues the next groups.
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

#include <sluice/device.hpp>

#include "comm/group/communicator.hpp"
#include "comm/nccl/nccl.hpp"
#include "comm/nccl/ordered_sum.hpp"

namespace sluice {

// The end of an operation. It is returned exactly once, by wait_on(), wait(), drop() or a done()
// that is true. A default-made ticket is done.
struct NcclTicket {
  std::int32_t group = -1;
  std::int32_t nccl_stream = -1;
  std::uint64_t number = 0;
};

class NcclQueue {
 public:
  // `max_open`: groups, at least 1, that may have unissued operations or tickets not returned;
  // one more is Error(kInternal). `local_ranks` decides how waits behave (Waiter).
  NcclQueue(Device device, std::size_t max_open, int local_ranks);
  // Aborts all communicators at once unless finalized. Never throws.
  ~NcclQueue();
  NcclQueue(const NcclQueue&) = delete;
  NcclQueue& operator=(const NcclQueue&) = delete;

  // Takes a communicator of this queue's device and returns the index of its NCCL stream. Not
  // inside a group.
  [[nodiscard]] int add(std::unique_ptr<NcclCommunicator> communicator);
  [[nodiscard]] NcclCommunicator& communicator(int nccl_stream) const;

  // Operations from begin_group() to end_group() run concurrently, on each NCCL stream as one NCCL
  // group. `peer` is a rank of the stream's communicator. The bytes are device memory, of equal
  // size at both ends. `ready` must be recorded, and not again until the operation is issued.
  void begin_group();
  [[nodiscard]] NcclTicket send(int nccl_stream, int peer, std::span<const std::byte> data,
                                const Event& ready);
  [[nodiscard]] NcclTicket recv(int nccl_stream, int peer, std::span<std::byte> data,
                                const Event& ready);
  [[nodiscard]] NcclTicket all_reduce_sum(int nccl_stream, std::span<float> values,
                                          const Event& ready);
  // A kernel on the NCCL stream, alone in its group.
  [[nodiscard]] NcclTicket add_shards(int nccl_stream, const ShardSum& sum);
  // Issues the group in its turn. An empty group does nothing.
  void end_group();

  // Issues the groups that can be issued now. Throws Error(kPeer | kDevice) if a communicator has
  // failed. Never blocks. Call it in every wait that depends on other ranks' operations.
  void progress();
  // Both make progress. done() queries the device.
  [[nodiscard]] bool issued(const NcclTicket& ticket);
  [[nodiscard]] bool done(NcclTicket& ticket);
  // Work put on the stream from now on runs after the operation, which must be issued. Returns the
  // ticket.
  void wait_on(StreamView stream, NcclTicket& ticket);
  void drop(NcclTicket& ticket);

  // Block the host until the operation is issued, or is done and the ticket returned. Poll the
  // interrupt, which may be null.
  void wait_issued(const NcclTicket& ticket, Interrupt* interrupt);
  void wait(NcclTicket& ticket, Interrupt* interrupt);

  // Collective over all communicators, which all ranks added in one order, each those that it is
  // in: shuts them down after all issued operations are done.
  void finalize(Interrupt* interrupt);
  // Stops the kernels of all communicators, waiting ones too, and frees the communicators.
  void abort() noexcept;

 private:
  struct Operation;
  struct Group;
  struct NcclStream;

  [[nodiscard]] NcclTicket append(Operation operation);
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
  std::int32_t issuing_ = -1;  // passed to NCCL, not yet issued
  std::uint64_t numbers_ = 0;
  Waiter waiter_;
};

}  // namespace sluice
