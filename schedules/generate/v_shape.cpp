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
//
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
#include <array>
#include <deque>
#include <optional>

#include "schedules/generate/generators.hpp"
#include "schedules/model/index.hpp"

namespace sluice::generators {
namespace {

// Lists of one rank in V placement, where micro-batches ascend for each kind and chunk, so that a
// generator only says what comes next. Chunk 0 is stage `rank`, chunk 1 stage 2p - 1 - rank.
// Algorithms that need a least number of micro-batches are written down for that number: actions of
// micro-batches that the schedule does not have are left out, which keeps every order valid.
class VShapeList {
 public:
  // Appends to schedule.ranks[rank]; the schedule must outlive the list.
  VShapeList(Schedule& schedule, int rank)
      : steps_(schedule.ranks[at(rank)]),
        micro_batches_(schedule.micro_batches),
        stages_{rank, schedule.placement.stages() - 1 - rank} {}

  // The next F, B or I of a chunk.
  void add(ActionKind kind, int chunk) { push(next(kind, chunk), std::nullopt); }
  // The next F of one chunk overlapped with the next B of the other.
  void add_forward_over_backward(int forward_chunk) {
    const Action forward = next(ActionKind::kForward, forward_chunk);
    push(forward, next(ActionKind::kBackward, 1 - forward_chunk));
  }
  // The W of the oldest I whose W is open.
  void add_weight() {
    Action action = open_weights_.front();
    open_weights_.pop_front();
    action.kind = ActionKind::kBackwardWeight;
    push(action, std::nullopt);
  }
  void add_all_weights() {
    while (!open_weights_.empty()) add_weight();
  }

  // Forwards of a chunk so far, those left out included.
  [[nodiscard]] int forwards(int chunk) const { return forwards_[at(chunk)]; }

 private:
  Action next(ActionKind kind, int chunk) {
    const auto index = at(chunk);
    Action action;
    action.kind = kind;
    action.stage = stages_[index];
    action.micro_batch = (kind == ActionKind::kForward ? forwards_ : backwards_)[index]++;
    if (kind == ActionKind::kBackwardInput) open_weights_.push_back(action);
    return action;
  }

  void push(const Action& action, const std::optional<Action>& overlapped) {
    const bool second = overlapped && overlapped->micro_batch < micro_batches_;
    if (action.micro_batch < micro_batches_) {
      steps_.push_back(Step{action, second ? overlapped : std::nullopt});
    } else if (second) {
      steps_.push_back(Step{*overlapped, std::nullopt});
    }
  }

  std::vector<Step>& steps_;
  int micro_batches_;
  std::array<int, 2> stages_;
  std::array<int, 2> forwards_{}, backwards_{};
  std::deque<Action> open_weights_;
};

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
