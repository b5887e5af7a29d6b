// Parameters with several uses: their gradients brought together, their value kept equal. Internal
// to the pipeline.
//
// Each use accumulates a gradient of its own; the owner, the first use's rank, adds them up in the
// order of uses, updates, and gives every further use the new value. What goes to another rank goes
// over NCCL where that joins the two, ordered against the compute stream by events, and else
// through host memory, for which the host waits.
//
// All ranks walk groups and their uses in one order, behind all messages and sums of a step: over
// NCCL's queues as over blocking sends that order is what keeps them from waiting for one another.
#pragma once

#include <span>
#include <vector>

#include <sluice/device.hpp>

#include "runtime/engine/engine_config.hpp"
#include "runtime/job/host_mirror.hpp"
#include "runtime/job/job_context.hpp"
#include "runtime/job/nccl_routes.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

class TiedUses {
 public:
  // All that is named outlives this; `nccl` may be null where the layout wants none. `stages` are
  // this rank's; `mirror` is used by what goes through host memory.
  TiedUses(JobContext& job, const JobLayout& layout, ComputeContext& compute, NcclRoutes* nccl,
           HostMirror& mirror, std::vector<StageBinding> stages);

  // This rank's parameter of that use, null where another rank has it.
  [[nodiscard]] Parameter* parameter(std::size_t group, std::size_t use) const {
    return parameters_[group][use];
  }

  // Collective over the ranks with a use of the group. Behind it in stream order the owner's
  // gradient is the sum; the other uses' must stay as they are until spread_values().
  void sum_gradients(int group);
  // Collective over the pipeline: the owners' values to every further use; all stages are told that
  // values changed. What goes on the compute stream from here on runs after it, and after what
  // still reads gradients.
  void spread_values();

  // NCCL messages of one rank that may be open at once.
  [[nodiscard]] static std::size_t most_open(const JobLayout& layout);

 private:
  [[nodiscard]] int rank_of(std::size_t group, std::size_t use) const;
  // The other end of this rank's message for the use: the owner, or, on the owner's rank, the use.
  [[nodiscard]] int peer_of(std::size_t group, std::size_t use) const;
  void make_addend();
  void settle();  // what goes on the compute stream from here on runs after the sends under way
  // In the order of events on the compute stream; what is sent is read until the ticket's end.
  void receive(const Tensor& tensor, std::size_t group, std::size_t use);
  // A tensor that lies in `memory`.
  void send(const Tensor& tensor, const Owner& memory, std::size_t group, std::size_t use);

  JobContext& job_;
  const JobLayout& layout_;
  ComputeContext& compute_;
  NcclRoutes* nccl_;
  std::vector<StageBinding> stages_;
  std::vector<std::vector<Parameter*>> parameters_;  // [group][use]
  HostMirror& mirror_;
  Buffer addend_;                 // another use's gradient, on the device
  std::vector<Event> ready_;      // of messages over NCCL, [open]
  std::vector<NcclTicket> open_;  // sends over NCCL
};

}  // namespace sluice
