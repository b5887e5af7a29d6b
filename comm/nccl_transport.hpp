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
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/device.hpp"
#include "comm/nccl_queue.hpp"

namespace sluice {

class NcclTransport {
 public:
  // From one rank of the seam to another; first sends.
  using Edge = NcclCommunicator::Pair;

  enum class Communicators : std::uint8_t {
    kOne,      // for all ranks of the seam
    kPerEdge,  // each with a stream of its own: a message waits for those of its edge alone
  };

  // Collective over `seam`: adds communicators to `queue`, which must outlive this, and sends a
  // message over every edge, in an order all ranks agree on, since NCCL connects two ranks when
  // they first exchange. `edges` are equal on all ranks, in any order; repeated ones count once. No
  // edges make no communicator. Throws as NcclCommunicator, and Error(kDevice) naming both ends of
  // an edge that delivers other bytes than were sent.
  NcclTransport(NcclQueue& queue, Collectives& seam, Device device, std::span<const Edge> edges,
                Communicators communicators, const std::string& label, Interrupt* interrupt);

  // What NcclQueue's calls of these names do, with ranks of the seam as peers, between
  // begin_group() and end_group() of the queue. Error(kInternal) where there is no such edge.
  [[nodiscard]] NcclTicket send(int peer, std::span<const std::byte> data, const Event& ready);
  [[nodiscard]] NcclTicket recv(int peer, std::span<std::byte> data, const Event& ready);

  [[nodiscard]] NcclQueue& queue() { return queue_; }

 private:
  struct Route {
    int peer = 0;       // rank of the seam
    int lane = 0;       // of the queue
    int nccl_peer = 0;  // as that lane's communicator counts
  };

  void add_lanes(Collectives& seam, Device device, const std::vector<Edge>& edges,
                 Communicators communicators, const std::string& label, Interrupt* interrupt);
  void warm_up(Device device, const std::vector<Edge>& edges, Interrupt* interrupt);
  // Sends over one edge of this rank, or receives and compares.
  void probe(const Edge& edge, const Buffer& memory, Interrupt* interrupt);
  [[nodiscard]] const Route& route(const std::vector<Route>& routes, int peer,
                                   const char* direction) const;

  NcclQueue& queue_;
  int rank_;
  std::vector<Route> outgoing_, incoming_;
};

}  // namespace sluice
