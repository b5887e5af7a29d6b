// The shape that 1F1B and its relatives share: some forwards ahead, then one forward and one
// backward in turn, then the backwards that are left.
#pragma once

#include <vector>

#include <sluice/schedule.hpp>

namespace sluice::generators {

struct StageMicroBatch {
  int stage = 0, micro_batch = 0;
};

struct AlternatingRank {
  std::vector<StageMicroBatch> forwards;   // in their order
  std::vector<StageMicroBatch> backwards;  // in their order, as many
  int ahead = 0;                           // forwards before the first backward's own
  bool split = false;                      // backwards as I and W
  int trail = 0;                           // how many backwards W stays behind I
};

// Appends one rank's list. `ahead` beyond the number of forwards counts as all of them.
void append_alternating(Schedule& schedule, const AlternatingRank& rank);

// Micro-batches 0..m-1 of one stage.
[[nodiscard]] std::vector<StageMicroBatch> ascending(int stage, int micro_batches);

// A rank of looped placement: groups of at least p micro-batches, in each group chunk by chunk,
// forwards from the first chunk on and backwards from the last one on. Requires m >= p.
[[nodiscard]] AlternatingRank interleaved_rank(const ScheduleShape& shape, int rank);

// Removes what computes micro-batches from `micro_batches` on: a schedule built for the fewest its
// algorithm serves becomes one for fewer.
void drop_from(Schedule& schedule, int micro_batches);

}  // namespace sluice::generators
