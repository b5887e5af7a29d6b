// The generators of generate(). Each returns compute actions only; the comment of its file shows
// the schedule's grid. generate() has checked ranks >= 1, micro_batches >= 1, that
// the placement named in its table allows the chunks, and that the number of (stage, micro-batch)
// pairs fits an index.
#pragma once

#include <string_view>
#include <vector>

#include <sluice/schedule.hpp>

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
// The body of generate_forward_only().
[[nodiscard]] Schedule forward_only(const Placement& placement, int micro_batches);

// Micro-batches [begin, end).
struct MicroBatchGroup {
  int begin = 0, end = 0;
};

// Splits the micro-batches into as many groups of at least `smallest` as there can be, of nearly
// equal size, larger ones first; one group where there are fewer than `smallest`.
[[nodiscard]] std::vector<MicroBatchGroup> groups_of(int micro_batches, int smallest);

}  // namespace sluice::generators
