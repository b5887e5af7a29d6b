// The collectives of tensor ranks whose values are in GPUs, over NCCL: NcclRoutes::tensor().
#pragma once

#include <cstddef>
#include <span>

#include <sluice/compute.hpp>
#include <sluice/stage.hpp>

#include "comm/group/collectives.hpp"
#include "comm/group/waiter.hpp"
#include "comm/nccl/nccl_queue.hpp"
#include "comm/nccl/nccl_sums.hpp"

namespace sluice {

// One at a time. The host waits until NCCL has accepted it, the compute stream until it is done.
class NcclCollective final : public Collective {
 public:
  // Collective over `ranks`, as NcclSums. `workspace`: of the largest collective; outlives the
  // queue.
  NcclCollective(NcclQueue& queue, Collectives& ranks, ComputeContext& compute,
                 const NcclLabel& label, std::span<float> workspace, Interrupt& interrupt);
  // What other ranks make is not checked: it is in the plan.
  void make(const CollectiveCall& call) override;

  [[nodiscard]] static std::size_t workspace(const PlannedCollective& collective, int ranks);

 private:
  // Begins after all work so far on the compute stream; later work of it runs after finish().
  void start(const CollectiveCall& call);
  void finish();
  [[nodiscard]] NcclTicket exchange(const CollectiveCall& call);

  NcclQueue& queue_;
  ComputeContext& compute_;
  Interrupt& interrupt_;
  std::size_t ranks_, me_;
  NcclSums sums_;
  std::span<float> workspace_;  // of addends: [other ranks, this rank's part]
  Event ready_;
  NcclTicket open_;
};

}  // namespace sluice
