#include "runtime/planning/transport_plan.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <string>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice {

void require_plannable(std::int64_t stages, std::int64_t micro_batches) {
  if (micro_batches <= kMaxPlannedPairs / stages) return;
  throw_usage(
      "{} stages with {} micro-batches each are too many to plan: at most {} pairs of stage and "
      "micro-batch are legal{}",
      stages, micro_batches, kMaxPlannedPairs,
      stages > kMaxPlannedPairs
          ? ""
          : fmt::format("; nearest legal: --micro-batches {}", kMaxPlannedPairs / stages));
}

TransportNeeds needs_of(std::string_view transport) {
  // Each edge has a queue of its own (kNcclEdges). The plan must end in one per rank too, which is
  // stricter: then streams may share a hardware queue.
  if (transport == "nccl") return {"nccl", MessageOrder::kGlobal, {TransportModel::kNccl}};
  // Messages with tags are sent without blocking, at worst by rendezvous. These transports do not
  // bound the number of unmatched sends.
  if (transport == "mpi" || transport == "loopback") {
    return {std::string(transport),
            MessageOrder::kReceivesAhead,
            {TransportModel::kEager, TransportModel::kRendezvous}};
  }
  throw_usage("no plan can be made for transport '{}'; known are mpi, loopback, nccl", transport);
}

void require_runnable(const Plan& plan, const TransportNeeds& needs) {
  const Verification verification = verify(plan);
  const auto refuse = [&](const Violation& violation) {
    throw_error(ErrorCode::kPlan, "schedule '{}' cannot run over transport '{}': {}",
                plan.schedule_name, needs.name, violation.message);
  };
  if (!verification.ok()) refuse(*verification.violation);
  for (const Deadlock& deadlock : verification.deadlocks) {
    if (std::find(needs.models.begin(), needs.models.end(), deadlock.model) != needs.models.end()) {
      refuse(deadlock.violation);
    }
  }
}

Plan plan_for(const Schedule& schedule, const LowerOptions& lowering, const TransportNeeds& needs,
              std::vector<StageCollectives> collectives, int fold_every) {
  if (const auto violation = check(schedule)) {
    throw_error(ErrorCode::kPlan, "schedule '{}': {}", schedule.name, violation->message);
  }
  PlanOptions options;
  options.order = needs.order;
  options.collectives = std::move(collectives);
  options.fold_every = fold_every;
  Plan plan = make_plan(lower(schedule, lowering), lowering.tied, options);
  require_runnable(plan, needs);
  return plan;
}

}  // namespace sluice
