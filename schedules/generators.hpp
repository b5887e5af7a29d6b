// The generators behind generate(): each returns compute actions only, in a file of its own whose
// comment shows the schedule's grid. generate() has checked ranks >= 1, micro_batches >= 1, that
// the layout named in its table allows the chunks, and that the number of (stage, micro-batch)
// pairs fits an index.
#pragma once

#include <string_view>
#include <vector>

#include "schedules/schedule.hpp"

namespace sluice::generators {

[[nodiscard]] Schedule gpipe(const ScheduleShape& shape);
[[nodiscard]] Schedule gpipe_lifo(const ScheduleShape& shape);
[[nodiscard]] Schedule one_f_one_b(const ScheduleShape& shape);
[[nodiscard]] Schedule one_f_one_b_eager(const ScheduleShape& shape);
[[nodiscard]] Schedule interleaved(const ScheduleShape& shape);
[[nodiscard]] Schedule looped_bfs(const ScheduleShape& shape);
[[nodiscard]] Schedule zb_h1(const ScheduleShape& shape);
[[nodiscard]] Schedule zb_h2(const ScheduleShape& shape);
[[nodiscard]] Schedule interleaved_zb(const ScheduleShape& shape);
[[nodiscard]] Schedule zb_v(const ScheduleShape& shape);
[[nodiscard]] Schedule v_half(const ScheduleShape& shape);
[[nodiscard]] Schedule v_min(const ScheduleShape& shape);
[[nodiscard]] Schedule dualpipe_v(const ScheduleShape& shape);
[[nodiscard]] Schedule forward_only(const ScheduleShape& shape);

// A schedule of that name, one empty list per rank with room for `steps_per_rank`.
[[nodiscard]] Schedule empty_schedule(std::string_view name, const Placement& placement,
                                      int micro_batches, int steps_per_rank);

// The same over linear placement.
[[nodiscard]] Schedule empty_linear(std::string_view name, const ScheduleShape& shape,
                                    int steps_per_rank);

// Micro-batches [begin, end).
struct MicroBatchGroup {
  int begin = 0, end = 0;
};

// Parts the micro-batches into as many groups of at least `smallest` as there can be, of nearly
// equal size, larger ones first; one group where there are fewer than `smallest`.
[[nodiscard]] std::vector<MicroBatchGroup> groups_of(int micro_batches, int smallest);

// Appends an action that computes `micro_batch` on `stage` to the list of the stage's rank.
inline void append(Schedule& schedule, ActionKind kind, int stage, int micro_batch) {
  Step step;
  step.action.kind = kind;
  step.action.stage = stage;
  step.action.micro_batch = micro_batch;
  schedule.ranks[static_cast<std::size_t>(schedule.placement.rank_of(stage))].push_back(step);
}

}  // namespace sluice::generators
