// 1F1B (PipeDream-Flush: Narayanan et al., 2021, arXiv:2006.09503): stage s forwards
// min(p - 1 - s, m) micro-batches ahead, then alternates one forward and one backward, then drains.
// As fast as gpipe, (m + p - 1)(F + B), but stage s holds at most min(p - s, m) micro-batches.
//
// 1f1b, p = 4, m = 6:
//
//   rank 0 | F0 F1 F2 F3          B0 F4 B1 F5 B2    B3    B4    B5
//   rank 1 |    F0 F1 F2       B0 F3 B1 F4 B2 F5 B3    B4    B5
//   rank 2 |       F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4    B5
//   rank 3 |          F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
#include <algorithm>

#include "schedules/generate/generators.hpp"

namespace sluice::generators {

Schedule one_f_one_b(const ScheduleShape& shape) {
  const int m = shape.micro_batches;
  Schedule schedule = empty_linear("1f1b", shape, 2 * m);
  for (int stage = 0; stage < shape.ranks; ++stage) {
    const int ahead = std::min(shape.ranks - 1 - stage, m);
    for (int i = 0; i < ahead; ++i) append(schedule, ActionKind::kForward, stage, i);
    for (int i = 0; i < m; ++i) {
      if (ahead + i < m) append(schedule, ActionKind::kForward, stage, ahead + i);
      append(schedule, ActionKind::kBackward, stage, i);
    }
  }
  return schedule;
}

}  // namespace sluice::generators
