// ZB-V (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, arXiv:2401.10241, section 6): V
// placement and split backward, so that the last rank of the way there has its gradients at once.
// With F = I = W and m >= 2p - 1 no rank idles between its first and last action. It holds
// 2p chunks, each half a stage of 1F1B: the memory of 1F1B. Rank r forwards until the 2p chunks are
// full, then repeats F, I and W of both chunks, then drains. Fewer micro-batches than 2p - 1: as
// for 2p - 1, the others left out.
//
// zb-v, p = 2, m = 3:
//
//   rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
//   rank 1 |     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
#include <algorithm>

#include "schedules/generate/generators.hpp"
#include "schedules/generate/v_shape.hpp"

namespace sluice::generators {

Schedule zb_v(const ScheduleShape& shape) {
  const int p = shape.ranks;
  const int m = std::max(shape.micro_batches, 2 * p - 1);
  Schedule schedule =
      empty_schedule("zb-v", Placement::v_shape(p), shape.micro_batches, 6 * shape.micro_batches);
  for (int rank = 0; rank < p; ++rank) {
    VShapeList list(schedule, rank);
    const auto backward = [&](int chunk) {
      list.add(ActionKind::kBackwardInput, chunk);
      list.add_weight();
    };
    for (int i = 0; i < 2 * (p - rank) - 1; ++i) list.add(ActionKind::kForward, 0);
    for (int i = 0; i < rank; ++i) {
      list.add(ActionKind::kForward, 1);
      list.add(ActionKind::kForward, 0);
    }
    for (int i = rank; i < p; ++i) {
      list.add(ActionKind::kForward, 1);
      backward(1);
    }
    while (list.forwards(1) < m) {
      if (list.forwards(0) < m) list.add(ActionKind::kForward, 0);
      backward(0);
      list.add(ActionKind::kForward, 1);
      backward(1);
    }
    for (int i = 0; i < rank; ++i) {
      list.add(ActionKind::kBackwardInput, 0);
      list.add(ActionKind::kBackwardInput, 1);
    }
    for (int i = rank; i < p; ++i) backward(0);
    list.add_all_weights();
  }
  return schedule;
}

}  // namespace sluice::generators
