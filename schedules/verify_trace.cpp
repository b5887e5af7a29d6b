#include <map>
#include <string>
#include <utility>

#include "schedules/verify_rank.hpp"

namespace sluice {

PlanTrace::PlanTrace(const Plan& plan)
    : events(plan.ranks.size()),
      peak_in_flight(plan.ranks.size()),
      queue_depth(plan.channels.size()),
      send_index(plan.channels.size() * static_cast<std::size_t>(plan.micro_batches), -1),
      post_index(send_index),
      sent(plan.channels.size()),
      posted(plan.channels.size()),
      open_sends(plan.channels.size()) {
  std::map<std::pair<int, int>, std::int32_t> found;
  for (const Channel& channel : plan.channels) found[{channel.from_rank, channel.to_rank}] = 0;
  for (auto& [ranks, index] : found) {
    index = static_cast<std::int32_t>(pair_depths.size());
    pair_depths.push_back({ranks.first, ranks.second, 0});
  }
  pairs.reserve(plan.channels.size());
  for (const Channel& channel : plan.channels) {
    pairs.push_back(found[{channel.from_rank, channel.to_rank}]);
  }
  open_of_pair.resize(pair_depths.size());
}

std::vector<int> local_stage_indices(const Placement& placement) {
  std::vector<int> local(static_cast<std::size_t>(placement.stages()));
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    int next = 0;
    for (const int stage : placement.stages_of(rank))
      local[static_cast<std::size_t>(stage)] = next++;
  }
  return local;
}

Violation violation_at(const Plan& plan, int rank, int position, const std::string& what) {
  const PlanOp& op =
      plan.ranks[static_cast<std::size_t>(rank)].ops[static_cast<std::size_t>(position)];
  return Violation{rank, position,
                   "rank " + std::to_string(rank) + ", op " + std::to_string(position) + " (" +
                       to_string(op) + "): " + what};
}

}  // namespace sluice
