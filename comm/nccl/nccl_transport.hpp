// NcclTransport: the messages of a plan between GPUs, through NCCL.
//
// A communicator executes one group after the other, so a receive that waits for its message holds
// back all that is issued after it. Each edge therefore has a communicator of its own, of its two
// ranks: a rank within a chain has four. NCCL also divides the blocks of a message by the ranks of
// its communicator.
//
// Only the order in which two ranks issue messages identifies them. A user therefore issues exactly
// the plan's list (MessageOrder::kGlobal) with its groups (PlanOp::with_previous), and both ends
// pass the same number of bytes; this is not checked. A message without a counterpart blocks its
// group and all later ones of its edge. Waits therefore poll an Interrupt, and its exception leads
// to NcclQueue::abort().
//
// Asynchronous, with the rules and threading of NcclQueue.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <sluice/device.hpp>

#include "comm/group/communicator.hpp"
#include "comm/nccl/nccl_queue.hpp"

namespace sluice {

class NcclTransport {
 public:
  // From one rank of the bootstrap communicator to another.
  struct Edge {
    int from = 0, to = 0;
    friend bool operator==(const Edge&, const Edge&) = default;
  };

  // Collective over `bootstrap`: adds its communicators to `queue`, which must outlive this object.
  // Sends a message over every edge, since NCCL connects two ranks at their first exchange; this
  // uses 2 KiB of temporary `memory`. `edges` are equal on all ranks, in any order; repeated ones
  // count once. Without edges there is no communicator. Throws as NcclCommunicator, and
  // Error(kDevice) naming both ends of an edge that delivers other bytes than were sent.
  NcclTransport(NcclQueue& queue, Collectives& bootstrap, const DeviceMemory& memory,
                std::span<const Edge> edges, const NcclLabel& label, Interrupt* interrupt);

  // As the calls of NcclQueue with these names, with ranks of the bootstrap communicator as peers.
  // Error(kInternal) where there is no such edge.
  [[nodiscard]] NcclTicket send(int peer, std::span<const std::byte> data, const Event& ready);
  [[nodiscard]] NcclTicket recv(int peer, std::span<std::byte> data, const Event& ready);

  // How many communicators that takes on a rank.
  [[nodiscard]] static int communicators(std::span<const Edge> edges, int rank);

  // As NcclCommunicator::register_memory(); does nothing where there is no edge.
  void register_memory(std::span<std::byte> memory);

  [[nodiscard]] NcclQueue& queue() { return queue_; }

 private:
  // An edge from this rank or to it.
  struct Own {
    Edge edge;
    int nccl_stream;  // of the queue
  };

  void warm_up(const DeviceMemory& memory, Interrupt* interrupt);
  // Sends over one edge of this rank, or receives and compares.
  void probe(const Own& own, const Buffer& memory, Interrupt* interrupt);
  // Error(kInternal) unless there is such an edge of this rank.
  [[nodiscard]] int nccl_stream_of(const Edge& edge) const;

  NcclQueue& queue_;
  int rank_;
  std::vector<Own> edges_;
};

}  // namespace sluice
