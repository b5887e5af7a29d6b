// GPipe (Huang et al., 2019, arXiv:1811.06965): all forwards, then all backwards. Every rank holds
// the activations of all m micro-batches; makespan (m + p - 1)(F + B).
//
// gpipe, p = 4, m = 4: backwards ascend, so weight gradients accumulate in the order every exact
// schedule shares.
//
//   rank 0 | F0 F1 F2 F3                   B0 B1 B2 B3
//   rank 1 |    F0 F1 F2 F3             B0 B1 B2 B3
//   rank 2 |       F0 F1 F2 F3       B0 B1 B2 B3
//   rank 3 |          F0 F1 F2 F3 B0 B1 B2 B3
//
// gpipe-lifo, p = 4, m = 4: backwards descend, as in the paper's figure 2c.
//
//   rank 0 | F0 F1 F2 F3                   B3 B2 B1 B0
//   rank 1 |    F0 F1 F2 F3             B3 B2 B1 B0
//   rank 2 |       F0 F1 F2 F3       B3 B2 B1 B0
//   rank 3 |          F0 F1 F2 F3 B3 B2 B1 B0
//
// Breadth-first pipeline parallelism (Lamy-Poirier, 2022, arXiv:2211.05953): v chunks per rank over
// looped placement; every micro-batch forwards through a chunk before the next chunk starts, then
// backwards likewise from the last chunk on, ascending. Holds all mv chunks. Times of one chunk:
// from m = p on (mv + p - 1)(F + B), below (m + pv - 1)(F + B).
//
// looped-bfs, p = 2, m = 3, v = 2:
//
//   rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2         2B0 2B1 2B2 0B0 0B1 0B2
//   rank 1 |     1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2
#include "schedules/generate/generators.hpp"

namespace sluice::generators {
namespace {

enum class BackwardOrder { kAscending, kDescending };

// Every micro-batch forwards through a chunk before the next chunk starts; then backwards likewise
// from the last chunk on.
Schedule all_forwards_first(std::string_view name, const ScheduleShape& shape,
                            BackwardOrder order) {
  const int m = shape.micro_batches;
  Schedule schedule =
      empty_schedule(name, Placement::looped(shape.ranks, shape.chunks), m, 2 * shape.chunks * m);
  const int stages = schedule.placement.stages();
  for (int stage = 0; stage < stages; ++stage) {
    for (int i = 0; i < m; ++i) append(schedule, ActionKind::kForward, stage, i);
  }
  for (int stage = stages - 1; stage >= 0; --stage) {
    for (int i = 0; i < m; ++i) {
      const int micro_batch = order == BackwardOrder::kAscending ? i : m - 1 - i;
      append(schedule, ActionKind::kBackward, stage, micro_batch);
    }
  }
  return schedule;
}

}  // namespace

Schedule gpipe(const ScheduleShape& shape) {
  return all_forwards_first("gpipe", shape, BackwardOrder::kAscending);
}

Schedule gpipe_lifo(const ScheduleShape& shape) {
  return all_forwards_first("gpipe-lifo", shape, BackwardOrder::kDescending);
}

Schedule looped_bfs(const ScheduleShape& shape) {
  return all_forwards_first("looped-bfs", shape, BackwardOrder::kAscending);
}

}  // namespace sluice::generators
