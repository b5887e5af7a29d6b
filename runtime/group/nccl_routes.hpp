// Everything that a pipeline transfers over NCCL, in one queue: the messages of NCCL edges, tied
// gradients and values, the sums over replicas, and the collectives of tensor ranks. Internal to
// the pipeline. One thread.
//
// The host never waits for a device here: events order slots and gradients against the compute
// stream. The host may wait until NCCL has accepted a group; it polls the interrupt meanwhile.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/plan.hpp>
#include <sluice/stage.hpp>

#include "comm/group/transport.hpp"
#include "comm/nccl/nccl_queue.hpp"
#include "comm/nccl/nccl_sums.hpp"
#include "runtime/group/job_context.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

// The sums over replicas of one rank and step: their number, with that of gathers that may be open
// beside them, the floats of the largest, and the different numbers of floats; of those that only
// scatter, the floats of the largest piece. `tensor`: PlannedCollectives::nccl_floats().
struct SumLoad {
  std::size_t count = 0, largest = 0, largest_piece = 0;
  std::vector<std::size_t> sizes = {};
  std::size_t tensor = 0;
};

// Made in builds with NCCL alone, by make().
class NcclRoutes {
 public:
  // Collective over the job. All arguments outlive the result. `sums`: of this rank, all of which
  // may be open at once; `open`: messages that may be open at once, over all engines. Throws as
  // NcclCommunicator. Without finalize() the destructor aborts.
  [[nodiscard]] static std::unique_ptr<NcclRoutes> make(JobContext& job, const JobLayout& layout,
                                                        ComputeContext& compute,
                                                        const SumLoad& sums, std::size_t open,
                                                        bool all_reduce);
  virtual ~NcclRoutes() = default;

  // A plan's messages between GPUs. No header travels, so the order in which two ranks issue them
  // identifies them: see NcclTransport. Null on a rank without GPU.
  [[nodiscard]] virtual Transport* messages() = 0;

  // A message of its own, which starts after `ready`. The caller records `ready` on the compute
  // stream first. `peer`: rank of the pipeline.
  [[nodiscard]] virtual NcclTicket send(int peer, std::span<const std::byte> data,
                                        const Event& ready) = 0;
  [[nodiscard]] virtual NcclTicket recv(int peer, std::span<std::byte> data,
                                        const Event& ready) = 0;
  // Makes all later work of the compute stream run after the message or sum.
  virtual void wait_on_stream(NcclTicket& ticket) = 0;
  // Called by every wait. Throws Error(kPeer | kDevice) where NCCL has failed.
  virtual void progress() = 0;

  // Whether this rank's sums over replicas go over NCCL.
  [[nodiscard]] virtual bool sums() const = 0;
  // Sums over this rank's replicas in place, after all work so far on the compute stream. Sums run
  // one after the other.
  [[nodiscard]] virtual NcclTicket sum(std::span<float> values) = 0;
  // The halves of a sum, as those of NcclSums: each piece's sum for its replica alone, and each
  // replica's piece to all, or among some. `pieces`: [replica].
  [[nodiscard]] virtual NcclTicket reduce_scatter(std::span<float> values,
                                                  std::span<const NcclSums::Piece> pieces) = 0;
  [[nodiscard]] virtual NcclTicket gather(std::span<float> values,
                                          std::span<const NcclSums::Piece> pieces,
                                          std::span<const int> among) = 0;

  // Makes the collectives of a GPU's values over this rank's tensor ranks, in the order of the
  // compute stream, with the sums of GroupCollective bit for bit: no sums of f64. Only the sizes of
  // this rank are checked: its plan is that of the others. Null where NCCL does not join them.
  [[nodiscard]] virtual Collective* tensor() = 0;

  // Tells NCCL that messages lie in this memory, so that it may send and receive there without a
  // copy of its own. The memory outlives finalize(), or abort().
  virtual void register_messages(std::span<std::byte> memory) = 0;

  // Collective over the job. The orderly end: waits until NCCL has finished everything, on all
  // ranks. Only the destructor may follow.
  virtual void finalize() = 0;
  // Ends what NCCL does on this rank, whatever other ranks do; only the destructor may follow.
  virtual void abort() noexcept = 0;

  // Of NCCL, for the messages of a pipeline rank.
  [[nodiscard]] static int message_communicators(const JobLayout& layout, int rank);
  // Bytes of device memory that a rank's sums take, in addition to NCCL's own.
  [[nodiscard]] static std::size_t sum_bytes(const SumLoad& sums, int replicas, bool all_reduce);
  // Floats of workspace that one of tensor()'s takes.
  [[nodiscard]] static std::size_t collective_floats(const PlannedCollective& collective,
                                                     int ranks);
  // Whether the layout transfers anything over NCCL.
  [[nodiscard]] static bool wanted(const JobLayout& layout);
};

}  // namespace sluice
