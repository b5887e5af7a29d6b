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
//
// 1f1b-eager: stage s forwards twice as far ahead, min(2(p - 1 - s), m) micro-batches, so that
// messages travel while other micro-batches compute. As fast as 1f1b where messages take no time.
// With latency C up to (F + B) / 2 it loses 2(p - 1)C in all, where the loss of 1f1b grows with m.
// Stage s holds at most min(2p - 1 - 2s, m) micro-batches. p = 3, m = 6:
//
//   rank 0 | F0 F1 F2 F3 F4 B0 F5 B1    B2    B3    B4    B5
//   rank 1 |    F0 F1 F2 B0 F3 B1 F4 B2 F5 B3    B4    B5
//   rank 2 |       F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
#include "schedules/generate/alternate.hpp"
#include "schedules/generate/generators.hpp"

namespace sluice::generators {

Schedule one_f_one_b(const ScheduleShape& shape) { return alternating("1f1b", shape, 1, false); }

Schedule one_f_one_b_eager(const ScheduleShape& shape) {
  return alternating("1f1b-eager", shape, 2, false);
}

}  // namespace sluice::generators
