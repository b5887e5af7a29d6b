// The messages of a plan: which there are, and in which order their senders send them. What
// plan_receives, plan_rank and message_order work on.
#pragma once

#include <cstdint>
#include <vector>

#include <sluice/plan.hpp>

#include "schedules/model/actions.hpp"

namespace sluice {

// A rank's side of a message, at its place in the order kGlobal.
struct Issue {
  std::int32_t channel = -1, micro_batch = -1;
  std::int32_t before_step = 0;  // of the rank's list, at the latest
  bool receives = false;
  bool with_previous = false;  // one group with the issue before it
};

// True for the action after which nothing kept for its stage and micro-batch is read any more.
[[nodiscard]] constexpr bool ends_use(ActionKind kind, bool forward_only) {
  return ends_backward(kind) || (forward_only && kind == ActionKind::kForward);
}

// Every message of a plan: its channel, and the order in which a channel's sender sends.
struct PlanMessages {
  std::vector<Channel> channels;
  std::vector<int> forward;              // [stage] channel to stage + 1, -1: same rank or none
  std::vector<int> backward;             // [stage] channel to stage - 1
  std::vector<std::vector<int>> orders;  // [channel] micro-batches
  std::vector<int> depths;  // [channel] receives to post ahead at least; empty: no such bound
  std::vector<std::vector<Issue>> issues;  // [rank]; empty: MessageOrder::kReceivesAhead
};

// Sets neither depths nor issues. Requires: stages in range. Throws std::invalid_argument where a
// channel's messages are not all sent.
[[nodiscard]] PlanMessages find_messages(const Schedule& lowered);

}  // namespace sluice
