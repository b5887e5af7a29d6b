// The part of verify() that looks at one rank's list alone: buffers, order and completeness.
#pragma once

#include <optional>
#include <vector>

#include <sluice/plan.hpp>

#include "schedules/verify/verify_trace.hpp"

namespace sluice {

// Replays the buffers of one rank and fills the trace's entries that belong to it. The trace is
// complete only where nothing is returned. Requires: plan.channels name legal stages and ranks.
[[nodiscard]] std::optional<Violation> replay_rank(const Plan& plan, int rank,
                                                   const std::vector<int>& local_stage,
                                                   PlanTrace& trace);

}  // namespace sluice
