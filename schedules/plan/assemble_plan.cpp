#include <stdexcept>
#include <string>
#include <utility>

#include <sluice/plan.hpp>

#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"
#include "schedules/plan/message_order.hpp"
#include "schedules/plan/plan_messages.hpp"
#include "schedules/plan/plan_rank.hpp"

namespace sluice {
namespace {

void require_legal(const Schedule& lowered, const PlanOptions& options) {
  if (options.receive_ahead < 0) {
    refuse("plan: receive_ahead is ", options.receive_ahead, "; the nearest legal value is 0");
  }
  if (options.send_slots < 1) {
    refuse("plan: send_slots is ", options.send_slots, "; the nearest legal value is 1");
  }
  if (!options.sums.empty() && options.sums.size() != at(lowered.placement.stages())) {
    refuse("plan: sums of ", static_cast<int>(options.sums.size()), " stages, there are ",
           lowered.placement.stages());
  }
  for (const StageSums& sums : options.sums) {
    if (sums.forward >= 0 && sums.backward >= 0) continue;
    refuse("plan: a stage makes ", sums.forward, " and ", sums.backward,
           " sums; the nearest legal value is 0");
  }
  if (lowered.ranks.size() != at(lowered.placement.ranks())) {
    refuse("plan of '", lowered.name, "': ", lowered.ranks.size(), " lists for ",
           lowered.placement.ranks(), " ranks");
  }
}

}  // namespace

Plan assemble_plan(const Schedule& lowered, const std::vector<TiedStages>& tied,
                   const PlanOptions& options) {
  require_legal(lowered, options);
  PlanMessages messages = find_messages(lowered);
  if (options.order == MessageOrder::kGlobal) {
    messages.issues = global_issue_order(lowered, messages);
  } else if (options.unit_time_depths) {
    messages.depths = unit_time_depths(lowered, messages);
  }
  Plan plan;
  plan.schedule_name = lowered.name;
  plan.placement = lowered.placement;
  plan.micro_batches = lowered.micro_batches;
  plan.forward_only = lowered.forward_only;
  plan.tied = tied;
  plan.ranks.reserve(lowered.ranks.size());
  for (int rank = 0; rank < lowered.placement.ranks(); ++rank) {
    PlannedRank planned = plan_rank(lowered, messages, tied, options, rank);
    plan.exact = plan.exact && planned.exact;
    plan.ranks.push_back(std::move(planned.plan));
  }
  plan.channels = std::move(messages.channels);
  return plan;
}

}  // namespace sluice
