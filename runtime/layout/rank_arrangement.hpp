// Which rank of a job has which place: replica and rank of the pipeline.
//
// RankOrder::kAuto packs groups of ranks into hosts, so that a group lies on one host where that
// has ranks enough. The groups are the pipelines, or the replicas of each stage: whichever way the
// busiest host exchanges fewer bytes with others in a step. Rank 0 has the first place in every
// order. A greedy packing, not always the best one.
#pragma once

#include <string>
#include <vector>

#include <sluice/options.hpp>
#include <sluice/schedule.hpp>

#include "comm/group/topology.hpp"

namespace sluice {

struct RankArrangement {
  Topology topology;
  std::string reason;  // a line for people; empty where hosts decide nothing
};

// `numbered`: the order by rank numbers, which stays unless shape.rank_order is kAuto. `placement`:
// of the stages on its pipeline's ranks. `hosts`: of each rank of the job. Pure: all ranks get the
// same result from the same arguments.
[[nodiscard]] RankArrangement arrange_ranks(const Topology& numbered,
                                            const PipelineOptions::Shape& shape,
                                            const Placement& placement,
                                            const std::vector<std::string>& hosts);

}  // namespace sluice
