// The part of verify_progress for communicators without tags: in-order queues of groups, as NCCL's.
#pragma once

#include <optional>

#include <sluice/plan.hpp>
#include <sluice/verify.hpp>

#include "schedules/verify/verify_trace.hpp"

namespace sluice {

// As replay_progress(), for kNccl and kNcclEdges. Requires: a complete trace whose sends and posts
// pair up. Linear in the number of events.
[[nodiscard]] std::optional<Violation> replay_queues(const Plan& plan, const PlanTrace& trace,
                                                     TransportModel model);

}  // namespace sluice
