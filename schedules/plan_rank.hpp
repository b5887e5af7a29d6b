// The walk behind make_plan(): one rank's list of actions becomes its list of ops.
#pragma once

#include <vector>

#include "schedules/plan.hpp"

namespace sluice {

// Every message of a plan: its channel, and the order in which a channel's sender sends.
struct PlanMessages {
  std::vector<Channel> channels;
  std::vector<int> forward;              // [stage] channel to stage + 1, -1: same rank or none
  std::vector<int> backward;             // [stage] channel to stage - 1
  std::vector<std::vector<int>> orders;  // [channel] micro-batches
  std::vector<int> depths;  // [channel] receives to post ahead at least; empty: no such bound
};

// Requires: make_plan()'s requirements, and `messages` found in the same schedule. Throws
// std::invalid_argument for actions a plan cannot carry and for receives that are not all there.
[[nodiscard]] RankPlan plan_rank(const Schedule& lowered, const PlanMessages& messages,
                                 const std::vector<TiedStages>& tied, const PlanOptions& options,
                                 int rank);

}  // namespace sluice
