// Measures what collectives within actions take (GroupCollective), for the simulation.
#pragma once

#include <array>

#include <sluice/compute.hpp>
#include <sluice/simulate.hpp>

#include "comm/group/collectives.hpp"

namespace sluice {

// [CollectiveKind] As SimulationTimes::collective_costs, in seconds and bytes per second; all 0:
// not measured.
using CollectiveCosts = std::array<LinkCost, kCollectiveKinds>;

// What measure_collectives() takes for means that another run confirms.
inline constexpr double kCollectiveSeconds = 4;

// Collective over the job; alike on all ranks of each `group`, whose ranks make small and large
// collectives between products on `compute`, a CPU's, all groups at once. A cost is what one adds
// to the product before it, so it has the wait for ranks that come later. Takes about so many
// seconds; on slow links longer, and the large ones are smaller.
[[nodiscard]] CollectiveCosts measure_collectives(Collectives& job, Collectives& group,
                                                  ComputeContext& compute, double seconds);

// The larger latency and the smaller bandwidth of each kind.
[[nodiscard]] CollectiveCosts slower(const CollectiveCosts& one, const CollectiveCosts& two);

}  // namespace sluice
