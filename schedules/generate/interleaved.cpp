// Interleaved 1F1B (Narayanan et al., 2021, arXiv:2104.04473): v chunks per rank over looped
// placement; groups of micro-batches pass chunk by chunk, and rank r forwards
// (v - 1)g + 2(p - 1 - r) chunks ahead, g the first group's size. Times of one chunk: from m = p on
// (mv + p - 1)(F + B), below (m + pv - 1)(F + B).
//
// Groups are floor(m / p) of nearly equal size, larger ones first: any m >= p is served, where the
// paper asks for a multiple of p. A larger last group or a small remainder would deadlock. Fewer
// than p micro-batches run the schedule for p without those that are not there.
//
// interleaved, p = 2, m = 4, v = 2:
//
//   rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3
//   rank 1 |     1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
#include <algorithm>

#include "schedules/generate/alternate.hpp"
#include "schedules/generate/generators.hpp"

namespace sluice::generators {

Schedule interleaved(const ScheduleShape& shape) {
  const int p = shape.ranks, v = shape.chunks;
  const int m = std::max(shape.micro_batches, p);
  Schedule schedule = empty_schedule("interleaved", Placement::looped(p, v), m, 2 * v * m);
  const int group = groups_of(m, p).front().end;
  for (int rank = 0; rank < p; ++rank) {
    AlternatingRank alternating = interleaved_rank({p, m, v}, rank);
    alternating.ahead = (v - 1) * group + 2 * (p - 1 - rank);
    append_alternating(schedule, alternating);
  }
  drop_from(schedule, shape.micro_batches);
  return schedule;
}

}  // namespace sluice::generators
