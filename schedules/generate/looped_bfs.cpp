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

Schedule looped_bfs(const ScheduleShape& shape) {
  const int m = shape.micro_batches;
  Schedule schedule = empty_schedule("looped-bfs", Placement::looped(shape.ranks, shape.chunks), m,
                                     2 * shape.chunks * m);
  const int stages = schedule.placement.stages();
  for (int stage = 0; stage < stages; ++stage) {
    for (int i = 0; i < m; ++i) append(schedule, ActionKind::kForward, stage, i);
  }
  for (int stage = stages - 1; stage >= 0; --stage) {
    for (int i = 0; i < m; ++i) append(schedule, ActionKind::kBackward, stage, i);
  }
  return schedule;
}

}  // namespace sluice::generators
