// Parameters with several uses: sums their gradients and keeps their values equal. Internal to the
// pipeline. One thread.
//
// Each use accumulates its own gradient. The rank of the first use, the owner, adds them up in the
// order of uses, updates the value, and sends it to the other uses. Where replicas update parts of
// a parameter (ParameterEntry::ends), gradients are added in this replica's part alone. Where NCCL
// joins the two ranks, it carries the tensors, ordered against the compute stream by events. Else
// they pass through host memory, and the host waits for them.
//
// All ranks visit groups and uses in the same order, after all messages and sums of a step. This
// order prevents deadlock, both with blocking sends and with NCCL's queues.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include <sluice/device.hpp>

#include "runtime/engine/stage_binding.hpp"
#include "runtime/group/host_mirror.hpp"
#include "runtime/group/job_context.hpp"
#include "runtime/group/nccl_routes.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

class TiedUses {
 public:
  // Everything named outlives this. `nccl` may be null where the layout has no NCCL routes.
  // `stages` are this rank's. `mirror` is for tensors that pass through host memory.
  TiedUses(JobContext& job, const StepPlans& plans, const ParameterTable& table,
           ComputeContext& compute, NcclRoutes* nccl, HostMirror& mirror,
           std::vector<StageBinding> stages);

  [[nodiscard]] const std::vector<TiedParameter>& ties() const { return ties_; }  // [group]
  // The pipeline rank of a use.
  [[nodiscard]] int rank_of(std::size_t group, std::size_t use) const {
    return placement_.rank_of(ties_[group].uses[use].stage);
  }
  // The parameter of a use; null where another rank has it.
  [[nodiscard]] Parameter* parameter(std::size_t group, std::size_t use) const {
    return parameters_[group][use];
  }

  // Collective over the ranks with a use of the group. After it, in stream order, the owner's
  // gradient is the sum: `whole`, or in the part that this replica updates. The other gradients
  // must not change before broadcast_tied_values().
  void sum_gradients(int group, bool whole);
  // Collective over the pipeline. Copies the owners' values to all other uses. Later work of the
  // compute stream runs after it, and after all sends of gradients.
  void broadcast_tied_values();
  // Tells all of this rank's stages that values change or have changed. Not collective.
  void mark_values_changed();

  // NCCL messages of one rank that may be open at once.
  [[nodiscard]] static std::size_t most_open(const ParameterTable& table);

 private:
  // What sum_gradients() adds of the gradient of a group's parameter.
  [[nodiscard]] ElementRange summed(std::size_t group, bool whole) const;
  // The other end of this rank's message for the use: the owner, or, on the owner's rank, the use.
  [[nodiscard]] int peer_of(std::size_t group, std::size_t use) const;
  void allocate_receive_buffer();
  // Makes all later work of the compute stream run after all sends so far.
  void wait_all_on_stream();
  // Both run in the order of the compute stream. NCCL reads a sent tensor until its ticket is done.
  // `memory` owns the tensor.
  void receive(const Tensor& tensor, const KeepAlive& memory, std::size_t group, std::size_t use);
  void send(const Tensor& tensor, const KeepAlive& memory, std::size_t group, std::size_t use);

  JobContext& job_;
  const Placement& placement_;
  const ParameterTable& table_;
  const std::vector<TiedParameter>& ties_;  // [group]
  ComputeContext& compute_;
  NcclRoutes* nccl_;
  std::vector<StageBinding> stages_;
  std::vector<std::vector<Parameter*>> parameters_;  // [group][use]
  HostMirror& mirror_;
  std::shared_ptr<Buffer> received_;  // another rank's gradient, on the device
  std::vector<Event> ready_;          // of messages over NCCL, [open]
  std::vector<NcclTicket> open_;      // sends over NCCL
};

}  // namespace sluice
