// Eager 1F1B: 1F1B whose stage s forwards twice as far ahead, min(2(p - 1 - s), m) micro-batches,
// so that messages travel while other micro-batches compute. As fast as 1F1B where messages take no
// time; with latency C up to (F + B) / 2 it loses 2(p - 1)C in all, where 1F1B's loss grows with m.
// Stage s holds at most min(2p - 1 - 2s, m) micro-batches.
//
// 1f1b-eager, p = 3, m = 6:
//
//   rank 0 | F0 F1 F2 F3 F4 B0 F5 B1    B2    B3    B4    B5
//   rank 1 |    F0 F1 F2 B0 F3 B1 F4 B2 F5 B3    B4    B5
//   rank 2 |       F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
#include "schedules/generate/alternate.hpp"
#include "schedules/generate/generators.hpp"

namespace sluice::generators {

Schedule one_f_one_b_eager(const ScheduleShape& shape) {
  const int m = shape.micro_batches;
  Schedule schedule = empty_linear("1f1b-eager", shape, 2 * m);
  for (int stage = 0; stage < shape.ranks; ++stage) {
    AlternatingRank rank;
    rank.forwards = ascending(stage, m);
    rank.backwards = rank.forwards;
    rank.ahead = 2 * (shape.ranks - 1 - stage);
    append_alternating(schedule, rank);
  }
  return schedule;
}

}  // namespace sluice::generators
