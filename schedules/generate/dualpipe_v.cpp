// DualPipeV (DeepSeek-AI, github.com/deepseek-ai/DualPipe, 2025; DualPipe: DeepSeek-V3 Technical
// Report, arXiv:2412.19437; cut in half: Qi, "DualPipe could be better without the Dual", 2025):
// V placement; in the steady part the forward of one chunk overlaps the backward of the other,
// which hides messages inside a stage. At most 2p + 1 chunks in flight. Below m = 2p: as for 2p,
// the others left out.
// clang-format off
// dualpipe-v, p = 2, m = 4:
//
//   rank 0 | 0F0     0F1     0F2     3F0     3I0     3W0     3F1     0F3+3B1 3F2+0B0 3B2     3F3+0B1 3B3     0I2     0W2     0I3     0W3
//   rank 1 |         1F0     2F0     1F1     2F1     1F2     2B0     2F2+1B0 1F3+2B1 2F3+1B1 2B2     1B2     2I3     1I3     2W3     1W3
// clang-format on
#include <algorithm>

#include "schedules/generate/generators.hpp"
#include "schedules/generate/v_shape.hpp"

namespace sluice::generators {
namespace {

// The last p micro-batches of both chunks, of which the later ones split I and W: the remaining W
// then fill the gaps of the drain.
void drain(VShapeList& list, int p, int rank) {
  bool split = false;
  const auto backward = [&](int chunk) {
    list.add(split ? ActionKind::kBackwardInput : ActionKind::kBackward, chunk);
  };
  const int both = rank + 1;
  for (int i = 0; i < both; ++i) {
    const bool turn = i == both / 2;
    split = split || (turn && rank % 2 == 1);
    backward(1);
    split = split || turn;
    backward(0);
  }
  for (int i = rank + 1; i < p; ++i) {
    list.add_weight();
    list.add(ActionKind::kBackwardInput, 0);
  }
  list.add_all_weights();
}

}  // namespace

Schedule dualpipe_v(const ScheduleShape& shape) {
  const int p = shape.ranks;
  const int m = std::max(shape.micro_batches, 2 * p);
  Schedule schedule = empty_schedule("dualpipe-v", Placement::v_shape(p), shape.micro_batches,
                                     6 * shape.micro_batches);
  for (int rank = 0; rank < p; ++rank) {
    VShapeList list(schedule, rank);
    const int behind = p - 1 - rank;  // ranks between this one and the turn
    for (int i = 0; i < 2 * behind; ++i) list.add(ActionKind::kForward, 0);
    for (int i = 0; i <= rank; ++i) {
      list.add(ActionKind::kForward, 0);
      list.add(ActionKind::kForward, 1);
    }
    for (int i = 0; i < behind; ++i) {
      list.add(ActionKind::kBackwardInput, 1);
      list.add_weight();
      list.add(ActionKind::kForward, 1);
    }
    for (int i = 0; i < m - 2 * p + rank + 1; ++i) {
      if (i == 0 && behind == 0) {  // no pair, so that the backward does not wait
        list.add(ActionKind::kForward, 0);
        list.add(ActionKind::kBackward, 1);
      } else {
        list.add_forward_over_backward(0);
      }
      list.add_forward_over_backward(1);
    }
    for (int i = 0; i < behind; ++i) {
      list.add(ActionKind::kBackward, 1);
      list.add_forward_over_backward(1);
    }
    drain(list, p, rank);
  }
  return schedule;
}

}  // namespace sluice::generators
