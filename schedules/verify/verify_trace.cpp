#include "schedules/verify/verify_trace.hpp"

#include <map>
#include <numeric>
#include <utility>

#include "schedules/model/actions.hpp"
#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"

namespace sluice {

PlanTrace::PlanTrace(const Plan& plan)
    : events(plan.ranks.size()), peak_in_flight(plan.ranks.size()), channels(plan.channels.size()) {
  std::map<std::pair<int, int>, std::int32_t> found;
  for (const Channel& channel : plan.channels) ++found[{channel.from_rank, channel.to_rank}];
  for (auto& [ranks, number] : found) {
    pairs.push_back({PairDepth{ranks.first, ranks.second, 0}, 0, number});
    number = static_cast<std::int32_t>(pairs.size() - 1);
  }
  for (std::size_t i = 0; i < channels.size(); ++i) {
    channels[i].pair = found[{plan.channels[i].from_rank, plan.channels[i].to_rank}];
  }
}

std::int32_t MessageOrderTrace::add_out_of_order(std::int32_t micro_batch,
                                                 std::int32_t micro_batches) {
  if (index_of(micro_batch) >= 0) return -1;
  if (table_.empty()) {
    table_.resize(at(micro_batches), -1);
    std::iota(table_.begin(), table_.begin() + count_, 0);
  }
  return table_[at(micro_batch)] = count_++;
}

std::vector<int> local_stage_indices(const Placement& placement) {
  std::vector<int> local(at(placement.stages()));
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    int next = 0;
    for (const int stage : placement.stages_of(rank)) local[at(stage)] = next++;
  }
  return local;
}

Violation violation_at(const Plan& plan, int rank, int position, const std::string& what) {
  const PlanOp& op = plan.ranks[at(rank)].ops[at(position)];
  return Violation{rank, position, concat("rank ", rank, ", op ", position, " (", op, "): ", what)};
}

Action sending_action(const Channel& channel, int micro_batch) {
  return make_action(channel.kind, channel.from_stage, micro_batch);
}

Action receiving_action(const Channel& channel, int micro_batch) {
  return other_end(sending_action(channel, micro_batch));
}

}  // namespace sluice
