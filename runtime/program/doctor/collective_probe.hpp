// Measures the collectives over the replicas of each stage, in host memory, as a training makes
// them: gathers and ordered sums against plain messages of the same bytes. Uses the Communicator
// alone.
#pragma once

#include <cstddef>
#include <vector>

#include "comm/group/communicator.hpp"
#include "comm/group/topology.hpp"
#include "runtime/layout/device_choice.hpp"

namespace sluice {

// Bytes per second that a rank receives of the others, as many as it sends; of the group's slowest
// rank, the median of rounds. Shares are of the speed of plain messages.
struct CollectiveFigures {
  std::vector<int> ranks;  // of the job, by replica
  double gather = 0, gather_share = 0;
  double sum = 0, sum_share = 0;
};

struct CollectiveResult {
  std::size_t bytes = 0;  // that are gathered or summed
  std::vector<CollectiveFigures> groups;
};

// Collective over the job, with the device of each rank; the same on all ranks. All groups work at
// once: each gathers, sums, and sends as many bytes around its ranks, in turns. Takes about a
// second; on slow links there are fewer bytes. Without replicas there is nothing to measure. The
// first Collectives::kTags tags from base_tag on are the call's. Throws Error(kPeer) where a round
// takes longer than silence_seconds; requests are cancelled then.
[[nodiscard]] CollectiveResult probe_collectives(Communicator& comm, int base_tag,
                                                 const Topology& topology,
                                                 const std::vector<RankDevice>& devices,
                                                 double silence_seconds = 30);

}  // namespace sluice
