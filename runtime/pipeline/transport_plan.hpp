// Plans for the transport that will carry them: what each transport needs is asked for here, and a
// plan that may stand still over it is refused before anything is allocated.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>
#include <sluice/verify.hpp>

namespace sluice {

// Throws Error(kUsage) with the nearest legal number of micro-batches where there are more pairs.
void require_plannable(std::int64_t stages, std::int64_t micro_batches);

struct TransportNeeds {
  std::string_view name;  // as Communicator::name() says it
  MessageOrder order = MessageOrder::kReceivesAhead;
  std::vector<TransportModel> models;  // a plan must end under each of them
};

// Of "mpi", "loopback" and "nccl". Throws Error(kUsage) for another name, listing these.
[[nodiscard]] const TransportNeeds& needs_of(std::string_view transport);

// Throws Error(kPlan) that names schedule, transport and what is wrong: a broken rule, or who waits
// for whom under a model that the transport needs.
void require_runnable(const Plan& plan, const TransportNeeds& needs);

// Checks, lowers and plans the schedule in the order that the transport needs, and verifies the
// plan. Throws Error(kPlan) where a step refuses.
[[nodiscard]] Plan plan_for(const Schedule& schedule, const LowerOptions& lowering,
                            const TransportNeeds& needs);

}  // namespace sluice
