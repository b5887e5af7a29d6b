#include "runtime/layout/job_layout.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"

namespace sluice {
namespace {

double mebi(std::size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

}  // namespace

ElementRange common_part(const ElementRange& a, const ElementRange& b) {
  const std::int64_t first = std::max(a.first, b.first);
  return {first, std::max<std::int64_t>(std::min(a.end(), b.end()) - first, 0)};
}

Tensor elements_of(const Tensor& tensor, const ElementRange& range) {
  const DType type = tensor.spec.dtype;
  const std::size_t before = static_cast<std::size_t>(range.first) * size_of(type);
  return {tensor.as<std::byte>() + before, {type, Shape{range.count}}};
}

ElementRange ParameterEntry::part(int replica) const {
  if (ends.empty()) return {0, elements};
  const auto part = at(ShardGroups{static_cast<int>(ends.size()), copies}.part_of(replica));
  const std::int64_t first = part == 0 ? 0 : ends[part - 1];
  return {first, ends[part] - first};
}

ElementRange ParameterEntry::part_at_rest(int replica) const {
  if (ends.empty()) return {0, elements};
  const ShardGroups groups{static_cast<int>(ends.size()), copies};
  const std::vector<int> same = groups.copies_of(replica);
  const std::int64_t first = part(same.front()).first;
  return {first, part(same.back()).end() - first};
}

std::vector<ElementRange> ParameterEntry::shards() const {
  std::vector<ElementRange> all;
  for (const std::int64_t count : shard_elements(slice, parts, elements)) {
    all.push_back({all.empty() ? 0 : all.back().end(), count});
  }
  return all;
}

std::string cut_text(const ParameterEntry& entry) {
  const Slice& slice = entry.slice;
  if (slice.all()) return "";
  if (entry.parts.empty()) {
    return fmt::format(" cut to {} of {} rows of dimension {}, from {} on", slice.length,
                       slice.whole, slice.axis, slice.begin);
  }
  std::vector<std::string> parts;
  for (const auto& [part, shard] : entry.parts) {
    parts.push_back(fmt::format("{} from {} on of shard {}", part.length, part.begin, shard));
  }
  return fmt::format(" cut to rows of dimension {}: {}", slice.axis, joined(parts, ", "));
}

bool StageEntry::has_shares() const {
  return std::ranges::any_of(parameters,
                             [](const ParameterEntry& each) { return each.shares > 0; });
}

std::string to_string(const RankMemory& memory) {
  return fmt::format(
      "parameters {:.1f}, gradients {:.1f}, optimizer {:.1f}, activations {:.1f}, workspace "
      "{:.1f}, operators {:.1f}, messages {:.1f}, libraries {:.1f}, of these outside the rank's "
      "arena {:.1f}{}{}, in MiB",
      mebi(memory.parameters), mebi(memory.gradients), mebi(memory.optimizer),
      mebi(memory.activations), mebi(memory.workspace), mebi(memory.operators),
      mebi(memory.buffers), mebi(memory.libraries), mebi(memory.outside_arena),
      memory.save_copy > 0
          ? fmt::format(", in host memory for saving {:.1f}", mebi(memory.save_copy))
          : "",
      memory.collectives > 0
          ? fmt::format(", in host memory for collectives {:.1f}", mebi(memory.collectives))
          : "");
}

StepPlans::States StepPlans::states_of(const Plan& plan, int stage) {
  States states;
  for (const BufferPool& pool : plan.ranks[at(plan.placement.rank_of(stage))].pools) {
    if (pool.stage != stage) continue;
    if (pool.kind == BufferKind::kState) states.slots = std::max(states.slots, pool.count);
    if (pool.kind == BufferKind::kStored) states.stored = pool.count;
  }
  return states;
}

StepPlans::States StepPlans::states_of(int stage) const {
  States states = smaller.empty() ? States() : smaller[at(stage)];
  for_each_plan([&](const Plan& plan) { states.raise(states_of(plan, stage)); });
  return states;
}

bool StepPlans::splits_backward() const {
  for (const RankPlan& plan : train.ranks) {
    for (const PlanOp& op : plan.ops) {
      if (op.action == ActionKind::kBackwardInput) return true;
    }
  }
  return false;
}

bool ParameterTable::is_owner(int stage, int index) const {
  for (const TiedParameter& tie : tied) {
    for (std::size_t u = 1; u < tie.uses.size(); ++u) {
      if (tie.uses[u].stage == stage && tie.uses[u].index == index) return false;
    }
  }
  return true;
}

bool JobLayout::nccl_in_pipeline() const {
  return uses_nccl(wires.routes) ||
         std::any_of(parameters.tied.begin(), parameters.tied.end(),
                     [](const TiedParameter& tie) { return uses_nccl(tie.routes); });
}

}  // namespace sluice
