#include <sluice/plan.hpp>
#include <sluice/verify.hpp>

namespace sluice {
namespace {

// True where the plan posts too few receives: a rank of several stages may block in a send for one
// stage while the receiver waits for another. Only such plans are verified, since that costs as
// much as the plan.
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
