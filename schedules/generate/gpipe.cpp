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
#include "schedules/generate/generators.hpp"

namespace sluice::generators {
namespace {

enum class BackwardOrder { kAscending, kDescending };

Schedule all_forwards_first(std::string_view name, const ScheduleShape& shape,
                            BackwardOrder order) {
  const int m = shape.micro_batches;
  Schedule schedule = empty_linear(name, shape, 2 * m);
  for (int stage = 0; stage < shape.ranks; ++stage) {
    for (int i = 0; i < m; ++i) append(schedule, ActionKind::kForward, stage, i);
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

}  // namespace sluice::generators
