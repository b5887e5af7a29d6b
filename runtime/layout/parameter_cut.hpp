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
// stage differ by at most one block between replicas. A use of a tied parameter that is not its
// owner is cut like the owner and not counted. What is frozen is not cut.
void cut_parameters(ParameterTable& table, int replicas);

// A range of a stage's flat values or gradients (ParameterSet::flat_grads()) whose parts belong to
// the replicas in their order.
struct CutRange {
  std::size_t begin = 0;          // floats
  std::vector<std::size_t> ends;  // [replica] from `begin` on; the last one is the range's size
};
// The ranges of a stage's parameters that have been cut, the fewest, in order, none empty. They
// cover these parameters with their padding.
[[nodiscard]] std::vector<CutRange> ranges_of(const StageEntry& stage);

}  // namespace sluice
