// NcclTransport: the messages of a plan between GPUs, through NCCL.
//
// Nothing tells one message from another but the order in which two ranks issue them, so a user
// issues exactly the plan's list (MessageOrder::kGlobal), its groups (PlanOp::with_previous)
// included, and both ends give the same number of bytes; nothing here knows or checks that. A
// message that meets no counterpart keeps its group, and all after it, from ending: whoever waits
// polls an Interrupt, and what it throws ends in NcclQueue::abort().
//
// Asynchronous as NcclQueue, whose rules and threading hold.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <sluice/communicator.hpp>
#include <sluice/device.hpp>

#include "comm/nccl/nccl_queue.hpp"

namespace sluice {

class NcclTransport {
 public:
  // From one rank of the bootstrap to another.
  struct Edge {
    int from = 0, to = 0;
    friend bool operator==(const Edge&, const Edge&) = default;
  };

  // Collective over `bootstrap`: adds one communicator to `queue`, which must outlive this, and
  // sends a message over every edge (2 KiB of `memory`, for the time), in an order all ranks agree
  // on, since NCCL connects two ranks when they first exchange. `edges` are equal on all ranks, in
  // any order; repeated ones count once. No edges make no communicator. Throws as NcclCommunicator,
  // and Error(kDevice) naming both ends of an edge that delivers other bytes than were sent.
  NcclTransport(NcclQueue& queue, Collectives& bootstrap, const DeviceMemory& memory,
                std::span<const Edge> edges, const NcclLabel& label, Interrupt* interrupt);

  // What NcclQueue's calls of these names do, with ranks of the bootstrap as peers, between
  // begin_group() and end_group() of the queue. Error(kInternal) where there is no such edge.
  [[nodiscard]] NcclTicket send(int peer, std::span<const std::byte> data, const Event& ready);
  [[nodiscard]] NcclTicket recv(int peer, std::span<std::byte> data, const Event& ready);

  [[nodiscard]] NcclQueue& queue() { return queue_; }

 private:
  void warm_up(const NcclCommunicator& ranks, const DeviceMemory& memory, Interrupt* interrupt);
  // Sends over one edge of this rank, or receives and compares.
  void probe(const Edge& edge, const NcclCommunicator& ranks, const Buffer& memory,
             Interrupt* interrupt);
  // Error(kInternal) unless there is such an edge of this rank.
  void require(const Edge& edge) const;

  NcclQueue& queue_;
  int rank_;
  int nccl_stream_ = -1;     // of the queue
  std::vector<Edge> edges_;  // from this rank or to it
};

}  // namespace sluice
