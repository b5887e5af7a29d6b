// The parts of assemble_plan(): which messages there are and in which order their senders send
// them; when and in which order they travel where F, I and W take one unit of time and B two, which
// is the order of in-order queues and says the receives to post ahead for others; and the walk in
// which one rank's list of actions becomes its list of ops.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <sluice/plan.hpp>

#include "schedules/model/actions.hpp"

namespace sluice {

class CollectiveLists;  // schedules/plan/collectives.hpp

inline constexpr std::array kAllBuffers = {BufferKind::kInput,      BufferKind::kOutput,
                                           BufferKind::kGradOutput, BufferKind::kGradInput,
                                           BufferKind::kState,      BufferKind::kStored};

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

// Sets neither depths nor issues. Requires: stages in range. Throws Error(kUsage) where a
// channel's messages are not all sent.
[[nodiscard]] PlanMessages find_messages(const Schedule& lowered);

// [rank] What assemble_plan() says of MessageOrder::kGlobal. Both ends of a message find it in
// groups of the same messages. Requires: assemble_plan()'s requirements, and `messages` found in
// the same schedule. Throws Error(kUsage) for a schedule that cannot run to its end.
[[nodiscard]] std::vector<std::vector<Issue>> global_issue_order(const Schedule& lowered,
                                                                 const PlanMessages& messages);

// [channel] How many receives must be posted ahead so that every send finds its receive in unit
// time. One execution then finishes without a send that waits. Every rank's list is fixed and
// nothing that happened is undone, so all executions finish, under any times and any transport.
// Requirements and errors as above. Linear in the number of actions.
[[nodiscard]] std::vector<int> unit_time_depths(const Schedule& lowered,
                                                const PlanMessages& messages);

struct PlannedRank {
  RankPlan plan;
  bool exact = true;  // its stages' weight gradients accumulate in ascending order
};

// Requires: assemble_plan()'s requirements, and `messages` found in the same schedule. Throws
// Error(kUsage) for actions a plan cannot carry and for receives that are not all there.
[[nodiscard]] PlannedRank plan_rank(const Schedule& lowered, const PlanMessages& messages,
                                    const std::vector<TiedStages>& tied, const PlanOptions& options,
                                    const CollectiveLists& collectives, int rank);

}  // namespace sluice
