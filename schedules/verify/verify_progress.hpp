// The part of verify() that looks at all ranks together: does every rank reach the end of its list
// under a transport model, and if not, who waits for whom.
#pragma once

#include <optional>

#include <sluice/plan.hpp>
#include <sluice/verify.hpp>

#include "schedules/verify/verify_trace.hpp"

namespace sluice {

// Requires: a complete trace whose sends and posts pair up. Linear in the number of events.
[[nodiscard]] std::optional<Violation> replay_progress(const Plan& plan, const PlanTrace& trace,
                                                       TransportModel model,
                                                       const VerifyOptions& options);

}  // namespace sluice
