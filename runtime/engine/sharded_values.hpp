// The values of this rank's parameters where each replica has a part of them at rest
// (ShardLevel::kParameters). Internal to the pipeline. One thread.
//
// Values, and copies in bf16, lie where they lie without parts, at addresses that never change. At
// rest a rank has the pages of its own parts alone. A unit (ShardedUnit) is gathered into its place
// before it is read; what is of other replicas is given back after that. Of a parameter with a copy
// in bf16 the copy is gathered, and its values are not.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <sluice/compute.hpp>

#include "comm/group/host_sums.hpp"
#include "runtime/engine/stage_binding.hpp"
#include "runtime/group/activity.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/layout/parameter_cut.hpp"

namespace sluice {

class ShardedValues {
 public:
  // All that is named outlives this; `activity` may be null. `gathers`: over the replicas.
  ShardedValues(HostSums& gathers, ActivityBoard* activity, ComputeContext& compute,
                const JobLayout& layout);

  // Gives back what is of other replicas, of a parameter that has been written whole.
  void drop_others(const Parameter& parameter, const ParameterEntry& entry) const;
  // In order of stages, once their parameters have memory. Gives back what is of other replicas.
  void add(const StageBinding& stage);
  // After any values were written whole: as drop_others() of all parameters.
  void drop_all() const;

  // Numbers of units, in order of stages; a stage has those from first_unit() on.
  [[nodiscard]] std::size_t first_unit(int stage) const;
  [[nodiscard]] std::size_t units_of(int stage) const;
  [[nodiscard]] int number_of(std::size_t unit) const { return units_[unit].number; }
  [[nodiscard]] bool use_units(int stage) const;
  [[nodiscard]] Gather gather() const { return layout_.parameters.gather; }

  // Makes the copies in bf16 of this rank's parts again, of those that are stale. Before a run.
  void renew_copies();
  // Collective over the replicas, which make the same calls in the same order. start() begins to
  // gather the unit where it is away, need() waits until it is whole, drop() gives back what is of
  // others.
  void start(std::size_t unit);
  void need(std::size_t unit);
  void drop(std::size_t unit);
  void progress() { gathers_.progress(); }

  // Collective over the replicas: the values of a parameter, whole, until drop_others().
  void lend(const Parameter& parameter, const ParameterEntry& entry);

 private:
  struct Part {
    std::span<float> floats;  // of the range
    std::vector<std::size_t> ends;
  };
  enum class Presence { kAway, kComing, kThere };
  struct Unit {
    int stage = 0, number = 0;
    std::vector<Part> parts = {};
    KeepAlive owner = nullptr;
    std::size_t bytes = 0;
    Presence presence = Presence::kAway;
    HostSums::Ticket ticket = {};
  };
  struct Copied {
    Parameter* parameter;
    ElementRange part;
  };

  void give_back(const Part& part) const;
  void add_parts(std::span<const CutRange> ranges, float* flat, std::vector<Part>& parts);

  HostSums& gathers_;
  ActivityBoard* activity_;
  ComputeContext& compute_;
  const JobLayout& layout_;
  const int replica_;
  std::vector<Unit> units_;
  std::vector<Part> all_;  // of values and copies
  std::vector<Copied> copied_;
};

}  // namespace sluice
