// Lists of one rank in V placement, where micro-batches ascend for each kind and chunk, so that a
// generator only says what comes next. Chunk 0 is stage `rank`, chunk 1 stage 2p - 1 - rank.
// Algorithms that need a least number of micro-batches are written down for that number: actions of
// micro-batches that the schedule does not have are left out, which keeps every order valid.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include <sluice/schedule.hpp>

#include "schedules/model/index.hpp"

namespace sluice::generators {

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

}  // namespace sluice::generators
