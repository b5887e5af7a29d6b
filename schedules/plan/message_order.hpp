// When and in which order messages travel where F, I and W take one unit of time and B two: the
// order that assemble_plan() gives to in-order queues, and the receives it posts ahead for others.
#pragma once

#include <vector>

#include "schedules/plan/plan_messages.hpp"

namespace sluice {

// [rank] What assemble_plan() says of MessageOrder::kGlobal. Both ends of a message find it in
// groups of the same messages. Requires: assemble_plan()'s requirements, and `messages` found in
// the same schedule. Throws std::invalid_argument for a schedule that cannot run to its end.
[[nodiscard]] std::vector<std::vector<Issue>> global_issue_order(const Schedule& lowered,
                                                                 const PlanMessages& messages);

// [channel] How many receives must be posted ahead so that every send finds its receive in unit
// time. One execution then finishes without a send that waits. Every rank's list is fixed and
// nothing that happened is undone, so all executions finish, under any times and any transport.
// Requirements and errors as above. Linear in the number of actions.
[[nodiscard]] std::vector<int> unit_time_depths(const Schedule& lowered,
                                                const PlanMessages& messages);

}  // namespace sluice
