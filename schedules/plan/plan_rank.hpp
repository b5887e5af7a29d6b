// The walk of assemble_plan(): one rank's list of actions becomes its list of ops.
#pragma once

#include <vector>

#include <sluice/plan.hpp>

#include "schedules/plan/plan_messages.hpp"

namespace sluice {

struct PlannedRank {
  RankPlan plan;
  bool exact = true;  // its stages' weight gradients accumulate in ascending order
};

// Requires: assemble_plan()'s requirements, and `messages` found in the same schedule. Throws
// std::invalid_argument for actions a plan cannot carry and for receives that are not all there.
[[nodiscard]] PlannedRank plan_rank(const Schedule& lowered, const PlanMessages& messages,
                                    const std::vector<TiedStages>& tied, const PlanOptions& options,
                                    int rank);

}  // namespace sluice
