#include <sluice/plan.hpp>
#include <sluice/verify.hpp>

namespace sluice {
namespace {

// Whether receives for what the schedule holds may be too few: a rank of several stages may block
// sending for one while the receiver waits for another. Asks verify() of such plans alone, since
// that costs as much as the plan.
bool needs_receives(const Plan& plan) {
  return plan.placement.stages() > plan.placement.ranks() &&
         !verify(plan).progresses(TransportModel::kBounded);
}

}  // namespace

Plan make_plan(const Schedule& lowered, const std::vector<TiedStages>& tied,
               const PlanOptions& options) {
  Plan plan = assemble_plan(lowered, tied, options);
  if (options.order == MessageOrder::kReceivesAhead && needs_receives(plan)) {
    PlanOptions deeper = options;
    deeper.unit_time_depths = true;
    plan = assemble_plan(lowered, tied, deeper);
  }
  return plan;
}

}  // namespace sluice
