// Makes plans for the transport that carries their messages, and refuses a plan that may deadlock
// over it, before anything is allocated.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>

namespace sluice {

// Throws Error(kUsage) with the nearest legal number of micro-batches where there are more pairs.
void require_plannable(std::int64_t stages, std::int64_t micro_batches);

struct TransportNeeds {
  std::string name;  // Communicator::name(), or "nccl"
  MessageOrder order = MessageOrder::kReceivesAhead;
  std::vector<TransportModel> models;  // a plan must not deadlock under any of them
};

// Of "mpi", "loopback" and "nccl". Throws Error(kUsage) for another name, listing these.
[[nodiscard]] TransportNeeds needs_of(std::string_view transport);

// Throws Error(kPlan) that names the schedule, the transport and the fault: a broken rule, or the
// deadlock under a model that the transport needs.
void require_runnable(const Plan& plan, const TransportNeeds& needs);

// Checks, lowers and plans the schedule in the order that the transport needs, and verifies the
// plan. `collectives`, `fold_every`: as PlanOptions. Throws Error(kPlan) where a step refuses.
[[nodiscard]] Plan plan_for(const Schedule& schedule, const LowerOptions& lowering,
                            const TransportNeeds& needs,
                            std::vector<StageCollectives> collectives = {}, int fold_every = 0);

}  // namespace sluice
