#include "runtime/layout/job_layout.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "comm/base/index.hpp"

namespace sluice {
namespace {

double mebi(std::size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

}  // namespace

std::string cut_text(const Slice& slice) {
  if (slice.all()) return "";
  return fmt::format(" cut to {} of {} rows of dimension {}, from {} on", slice.length, slice.whole,
                     slice.axis, slice.begin);
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

int StepPlans::slots_of(const Plan& plan, int stage) {
  int slots = 1;
  for (const BufferPool& pool : plan.ranks[at(plan.placement.rank_of(stage))].pools) {
    if (pool.stage == stage && pool.kind == BufferKind::kState) slots = std::max(slots, pool.count);
  }
  return slots;
}

int StepPlans::slots_of(int stage) const {
  int slots = smaller_slots.empty() ? 1 : smaller_slots[at(stage)];
  for_each_plan([&](const Plan& plan) { slots = std::max(slots, slots_of(plan, stage)); });
  return slots;
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
