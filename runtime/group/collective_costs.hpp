// Measures what collectives within actions take (GroupCollective), for the simulation.
#pragma once

#include <array>

#include <sluice/simulate.hpp>

#include "comm/group/collectives.hpp"

namespace sluice {

// [CollectiveKind] As SimulationTimes::collective_costs, in seconds and bytes per second; all 0:
// not measured.
using CollectiveCosts = std::array<LinkCost, kCollectiveKinds>;

// Collective over the job, as this rank sees it: the ranks of each `group` make small and large
// collectives, all groups at once. Takes about a second; on slow links the large ones are smaller.
[[nodiscard]] CollectiveCosts measure_collectives(Collectives& job, Collectives& group);

// The larger latency and the smaller bandwidth of each kind.
[[nodiscard]] CollectiveCosts slower(const CollectiveCosts& one, const CollectiveCosts& two);

}  // namespace sluice
