#include "runtime/pipeline/transport_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>

#include <sluice/error.hpp>
#include <sluice/verify.hpp>

namespace sluice {

void require_plannable(std::int64_t stages, std::int64_t micro_batches) {
  if (micro_batches <= kMaxPlannedPairs / stages) return;
  throw Error(
      ErrorCode::kUsage,
      fmt::format("{} stages with {} micro-batches each are too many to plan: at most {} pairs of "
                  "stage and micro-batch are legal{}",
                  stages, micro_batches, kMaxPlannedPairs,
                  stages > kMaxPlannedPairs ? ""
                                            : fmt::format("; nearest legal: --micro-batches {}",
                                                          kMaxPlannedPairs / stages)));
}

const TransportNeeds& needs_of(std::string_view transport) {
  // Messages with tags are sent without blocking, at worst by rendezvous; a bound on unmatched
  // sends is none of these transports'.
  static const std::array<TransportNeeds, 3> table = {{
      {"mpi", MessageOrder::kReceivesAhead, {TransportModel::kEager, TransportModel::kRendezvous}},
      {"loopback",
       MessageOrder::kReceivesAhead,
       {TransportModel::kEager, TransportModel::kRendezvous}},
      {"nccl", MessageOrder::kGlobal, {TransportModel::kNccl}},
  }};
  const auto found = std::find_if(table.begin(), table.end(), [&](const TransportNeeds& needs) {
    return needs.name == transport;
  });
  if (found != table.end()) return *found;
  throw Error(ErrorCode::kUsage,
              fmt::format("no plan can be made for transport '{}'; known are mpi, loopback, nccl",
                          transport));
}

void require_runnable(const Plan& plan, const TransportNeeds& needs) {
  const Verification verification = verify(plan);
  const auto refuse = [&](const Violation& violation) {
    throw Error(ErrorCode::kPlan, fmt::format("schedule '{}' cannot run over transport '{}': {}",
                                              plan.schedule_name, needs.name, violation.message));
  };
  if (!verification.ok()) refuse(*verification.violation);
  for (const Deadlock& deadlock : verification.deadlocks) {
    if (std::find(needs.models.begin(), needs.models.end(), deadlock.model) != needs.models.end()) {
      refuse(deadlock.violation);
    }
  }
}

Plan plan_for(const Schedule& schedule, const LowerOptions& lowering, const TransportNeeds& needs) {
  if (const auto violation = check(schedule)) {
    throw Error(ErrorCode::kPlan,
                fmt::format("schedule '{}': {}", schedule.name, violation->message));
  }
  PlanOptions options;
  options.order = needs.order;
  Plan plan = make_plan(lower(schedule, lowering), lowering.tied, options);
  require_runnable(plan, needs);
  return plan;
}

}  // namespace sluice
