// Schedules written out by hand, of kinds no generator makes yet, and small helpers to bend them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>

namespace sluice::testing {

// One text per rank, steps separated by blanks.
[[nodiscard]] Schedule hand_made(const Placement& placement, int micro_batches,
                                 const std::vector<std::string_view>& ranks);

// V placement over 2 ranks (stages 0 and 3, 1 and 2), backward split into I and W.
[[nodiscard]] Schedule v_split();
// Looped placement, 2 ranks with 2 chunks.
[[nodiscard]] Schedule interleaved();
// V placement over 2 ranks with an overlapped forward and backward.
[[nodiscard]] Schedule v_overlapped();
// The three above.
[[nodiscard]] std::vector<Schedule> all_hand_made();

// The steps of a rank as text.
[[nodiscard]] std::string text_of(const std::vector<Step>& steps);

// lower() and make_plan() with gradients reduced and `tied` groups.
[[nodiscard]] Plan plan_of(const Schedule& schedule, const std::vector<TiedStages>& tied = {},
                           const PlanOptions& options = {});

// The same, with every sum over replicas overlapped with computation.
[[nodiscard]] Plan plan_with_early_sums(const Schedule& schedule, const PlanOptions& options = {});
[[nodiscard]] Schedule lower_with_early_sums(const Schedule& schedule);

// How often an op of that kind occurs on all ranks.
[[nodiscard]] int count(const Plan& plan, OpKind kind);

}  // namespace sluice::testing
