// Which part of each parameter the replicas of its stage update, where they divide the optimizer's
// state. A function of the table alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/layout/job_layout.hpp"

namespace sluice {

// Sets ParameterEntry::ends of all parameters that are updated. Parts consist of whole blocks of
// kSumBlock elements of a shard, so that sums of squares over blocks have the same bits for every
// number of replicas. The parameters of a unit are cut as one sequence of blocks, into one range a
// replica; the ranges of one more block move on from unit to unit, so that every unit and every
// stage differ by at most one block between replicas, in what they update and have at rest. A use
// of a tied parameter that is not its owner is cut like the owner and not counted. What is frozen
// is not cut.
void cut_parameters(ParameterTable& table, const ShardGroups& groups);

// A range of a stage's flat values or gradients (ParameterSet::flat_grads()) that is cut as its
// parameters are.
struct CutRange {
  std::size_t begin = 0;          // floats
  std::vector<std::size_t> ends;  // ParameterEntry::ends from `begin` on; the last one is its size
  int copies = 1;                 // ParameterEntry::copies
  [[nodiscard]] std::size_t size() const { return ends.back(); }
  [[nodiscard]] std::size_t end() const { return begin + size(); }
  // What a replica updates. What it has at rest, where there are parts: cut into those that the
  // replicas which have it update, in their order.
  [[nodiscard]] CutRange of(int replica) const;
  [[nodiscard]] CutRange at_rest(int replica) const;
  // [place in a group] where what a replica has at rest ends.
  [[nodiscard]] std::vector<std::size_t> ends_at_rest() const;
};
// The ranges of a stage's parameters that have been cut, the fewest, in order, none empty. They
// cover these parameters with their padding.
[[nodiscard]] std::vector<CutRange> ranges_of(const StageEntry& stage);
// Those of each of its units that have some, in order; where the stage does not use units
// (StageEntry::uses_units), of all in one.
[[nodiscard]] std::vector<std::vector<CutRange>> unit_ranges_of(const StageEntry& stage);

// What replicas gather at a time of a stage whose parameters they have parts of: the values of cut
// parameters, or, of those with a copy in bf16, that copy, of which two elements lie in a float.
struct ShardedUnit {
  int unit = 0;                          // Parameter::unit; 0 where it is the whole stage
  std::vector<CutRange> values, copies;  // of the stage's flat values, and of all its copies
  std::vector<CutRange> lent;            // the values of each parameter with a copy: not gathered
  [[nodiscard]] std::size_t bytes() const;
  [[nodiscard]] std::size_t own_bytes(int replica) const;  // at rest
};
// Bytes of an entry's values, and of its copy, in its set's memory.
[[nodiscard]] std::size_t value_bytes(const ParameterEntry& entry);
[[nodiscard]] std::size_t copy_bytes(const ParameterEntry& entry);
// Those of a stage in order: one for each of its units that have cut parameters where it uses units
// (StageEntry::uses_units), else one.
[[nodiscard]] std::vector<ShardedUnit> sharded_units(const StageEntry& stage);

}  // namespace sluice
