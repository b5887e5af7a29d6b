// Interleaved zero bubble: the interleaved order with the backward pass parted, as PyTorch's
// ScheduleInterleavedZeroBubble has it. Rank r forwards (v - 1)g + p - 1 - r chunks ahead, g the
// first group's size, and W stays r chunks behind I. With one chunk this is zb-h1. Where
// F = I = W, each rank idles p - 1 units for any m >= p; it holds at most (v - 1)g + p chunks, pv
// where p divides m. Fewer than p micro-batches run the schedule for p without the missing ones.
//
// interleaved-zb, p = 2, m = 2, v = 2:
//
//   rank 0 | 0F0 0F1 2F0 2F1     2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
//   rank 1 |     1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
#include <algorithm>

#include "schedules/generate/alternate.hpp"
#include "schedules/generate/generators.hpp"

namespace sluice::generators {

Schedule interleaved_zb(const ScheduleShape& shape) {
  const int p = shape.ranks, v = shape.chunks;
  const int m = std::max(shape.micro_batches, p);
  Schedule schedule = empty_schedule("interleaved-zb", Placement::looped(p, v), m, 3 * v * m);
  const int group = groups_of(m, p).front().end;
  for (int rank = 0; rank < p; ++rank) {
    AlternatingRank alternating = interleaved_rank({p, m, v}, rank);
    alternating.ahead = (v - 1) * group + p - 1 - rank;
    alternating.split = true;
    alternating.trail = rank;
    append_alternating(schedule, alternating);
  }
  drop_from(schedule, shape.micro_batches);
  return schedule;
}

}  // namespace sluice::generators
