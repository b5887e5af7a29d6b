// Which rank of a job has which place.
//
// RankOrder::kAuto packs groups of ranks into hosts, so that a group lies on one host where that
// has ranks enough. First the ranks that share a stage, then the pipelines, or the replicas of each
// stage. Replicas are put in an order in which aligned subtrees of the tree of sums
// (comm/base/sum_tree.hpp) are on one host. Of these two and the two orders by numbers it takes the
// one that puts the ranks of the fewest stages on several hosts, and then the one whose busiest
// host exchanges the fewest bytes with others in a step, without those among the ranks of a stage.
// Sums count as comm/group/block_steps.hpp sends them, on GPUs each rank's messages as they are.
// Rank 0 has the first place in every order. A greedy packing, not always the best one.
#pragma once

#include <string>
#include <vector>

#include <sluice/options.hpp>
#include <sluice/schedule.hpp>

#include "comm/group/topology.hpp"

namespace sluice {

struct RankArrangement {
  Topology topology;
  std::string reason;  // a line for people; empty where hosts leave nothing to choose
};

// `numbered`: the order by rank numbers. It stays unless options.shape.rank_order is kAuto, ranks
// are on several hosts and options.devices.choices is no list. `placement`: of the stages on
// numbered.size.pipeline ranks. `hosts`: of each rank of the job. Pure: all ranks get the same
// result from the same arguments.
[[nodiscard]] RankArrangement arrange_ranks(const Topology& numbered,
                                            const PipelineOptions& options,
                                            const Placement& placement,
                                            const std::vector<std::string>& hosts);

}  // namespace sluice
