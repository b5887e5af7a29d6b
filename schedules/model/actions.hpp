// What several rooms ask about actions: their messages, their place in a backward pass.
#pragma once

#include <vector>

#include <sluice/schedule.hpp>

#include "schedules/model/text.hpp"

namespace sluice {

[[nodiscard]] constexpr Action make_action(ActionKind kind, int stage, int micro_batch = -1) {
  return {.kind = kind, .stage = stage, .micro_batch = micro_batch};
}

[[nodiscard]] constexpr bool is_send(ActionKind kind) {
  return kind == ActionKind::kSendForward || kind == ActionKind::kSendBackward;
}
[[nodiscard]] constexpr bool is_receive(ActionKind kind) {
  return kind == ActionKind::kRecvForward || kind == ActionKind::kRecvBackward;
}
// B and I: the previous stage waits for their gradient.
[[nodiscard]] constexpr bool makes_gradient(ActionKind kind) {
  return kind == ActionKind::kBackward || kind == ActionKind::kBackwardInput;
}
// B and W: the weight gradients of the micro-batch are complete.
[[nodiscard]] constexpr bool ends_backward(ActionKind kind) {
  return kind == ActionKind::kBackward || kind == ActionKind::kBackwardWeight;
}

// The same message at the neighbouring stage. Requires: a message action.
[[nodiscard]] constexpr Action other_end(const Action& message) {
  switch (message.kind) {
    case ActionKind::kSendForward:
      return make_action(ActionKind::kRecvForward, message.stage + 1, message.micro_batch);
    case ActionKind::kRecvForward:
      return make_action(ActionKind::kSendForward, message.stage - 1, message.micro_batch);
    case ActionKind::kSendBackward:
      return make_action(ActionKind::kRecvBackward, message.stage - 1, message.micro_batch);
    default:
      return make_action(ActionKind::kSendBackward, message.stage + 1, message.micro_batch);
  }
}

// Whether `neighbour` exists and is on another rank than `stage`.
[[nodiscard]] inline bool crosses(const Placement& placement, int stage, int neighbour) {
  return neighbour >= 0 && neighbour < placement.stages() &&
         placement.rank_of(neighbour) != placement.rank_of(stage);
}

// Throws Error(kUsage) where the placement does not have the stage.
inline void require_stage(const Placement& placement, int stage) {
  if (stage >= 0 && stage < placement.stages()) return;
  refuse("an action of stage ", stage, "; legal: 0 to ", placement.stages() - 1);
}

// Calls visit(action) for each action of a rank's list, the overlapped ones included.
template <class Visit>
void for_each_action(const std::vector<Step>& steps, const Visit& visit) {
  for (const Step& step : steps) {
    visit(step.action);
    if (step.overlapped) visit(*step.overlapped);
  }
}

}  // namespace sluice
