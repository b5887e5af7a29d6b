// The values of this rank's parameters where each replica has a part of them at rest
// (ShardLevel::kParameters). Internal to the pipeline. One thread.
//
// Values, and copies in bf16, lie at addresses that never change, in a PartialMemory. At rest a
// rank has its own parts alone. A unit (ShardedUnit) is gathered into its place before it is read,
// from the replicas of its group (ShardGroups). After that, what is of other replicas is given back
// on a CPU; on a GPU another unit overwrites it (ShardedMemory). Of a parameter with a copy in bf16
// the copy is gathered, and its values are not.
//
// A GPU's units are gathered over NCCL where sums over replicas are, after all work so far on the
// compute stream, of which later work runs after that. Else they pass through host memory, for
// which the host waits.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include <sluice/compute.hpp>

#include "comm/device/partial_memory.hpp"
#include "comm/group/host_sums.hpp"
#include "runtime/engine/stage_binding.hpp"
#include "runtime/group/activity.hpp"
#include "runtime/group/host_mirror.hpp"
#include "runtime/group/nccl_routes.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/layout/parameter_cut.hpp"
#include "runtime/layout/sharded_memory.hpp"

namespace sluice {

class ShardedValues {
 public:
  // Takes the memory of all of this rank's stages. All that is named outlives this; `activity` may
  // be null. `gathers`: over the replicas of the group.
  ShardedValues(HostSums& gathers, ActivityBoard* activity, ComputeContext& compute,
                HostMirror& mirror, const JobLayout& layout);

  // Before a stage's parameters are allocated, which then lie in this memory.
  void place(ParameterSet& set, int stage) const;
  // In order of stages, once their parameters have that memory. Gives back what is of other
  // replicas.
  void add(const StageBinding& stage);
  // After that: null where the replicas' sums do not go over NCCL.
  void gather_over(NcclRoutes* nccl);
  // Gathers over NCCL that may be open at a time, at most.
  [[nodiscard]] std::size_t most_open() const;

  // Gives back what is of other replicas: of a parameter that has been written whole, of all.
  void drop_others(const Parameter& parameter) const;
  void drop_all() const;

  // Numbers of units, in order of stages; a stage has those from first_unit() on.
  [[nodiscard]] std::size_t first_unit(int stage) const;
  [[nodiscard]] std::size_t units_of(int stage) const;
  [[nodiscard]] int number_of(std::size_t unit) const { return units_[unit].number; }
  // As StageDescription's.
  [[nodiscard]] bool use_units(int stage) const;
  [[nodiscard]] bool weight_reads(int stage) const;
  // Whether backward calls are I and then W, in B too.
  [[nodiscard]] bool splits_backward() const { return layout_.plans.splits_backward(); }
  [[nodiscard]] Gather gather() const { return layout_.parameters.gather; }

  // Makes the copies in bf16 of this rank's parts again, of those that are stale. Before a run.
  void renew_copies();
  // Whether start() of the unit leaves all units that have started as they are.
  [[nodiscard]] bool has_room(std::size_t unit) const;
  // Collective over the group, which makes the same calls in the same order. start() begins to
  // gather the unit where it is away, need() waits until it is whole, for later work of the compute
  // stream; drop() gives back what is of others.
  void start(std::size_t unit);
  void need(std::size_t unit);
  void drop(std::size_t unit);
  void progress() { gathers_.progress(); }

  // Collective over the group: the values of a parameter, whole, until drop_others(). One at a
  // time.
  void lend(const Parameter& parameter, const ParameterEntry& entry);

 private:
  struct Part {
    std::span<float> floats;        // of the range
    std::vector<std::size_t> ends;  // CutRange::ends_at_rest()
  };
  enum class Presence { kAway, kComing, kThere };
  struct Unit {
    int stage = 0, number = 0;
    std::vector<Part> parts = {};
    KeepAlive owner = nullptr;
    std::size_t bytes = 0;
    Presence presence = Presence::kAway;
    HostSums::Ticket ticket = {};
    std::vector<NcclTicket> nccl_tickets = {};
  };
  struct Copied {
    Parameter* parameter;
    ElementRange part;
  };

  void add_parts(std::span<const CutRange> ranges, std::size_t place, Unit& unit) const;
  [[nodiscard]] const ShardedMemory::Place& place_of(int stage) const;
  void give_back(std::span<const std::byte> memory) const;
  [[nodiscard]] NcclTicket gather_over_nccl(const Part& part);
  void gather_on_mirror(const Part& part);

  HostSums& gathers_;
  ActivityBoard* activity_;
  ComputeContext& compute_;
  HostMirror& mirror_;
  NcclRoutes* nccl_ = nullptr;
  const JobLayout& layout_;
  const int replica_;
  const std::vector<int> sharers_;  // the group's replicas
  const ShardedMemory places_;
  const std::shared_ptr<PartialMemory> memory_;
  std::vector<Unit> units_;
  std::vector<Copied> copied_;
  std::vector<NcclSums::Piece> pieces_;  // [replica] of the last gather
};

}  // namespace sluice
