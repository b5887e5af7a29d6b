#include "runtime/layout/layout.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace sluice {
namespace {

double mebi(std::size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

std::size_t at(int index) { return static_cast<std::size_t>(index); }

}  // namespace

std::string to_string(const RankMemory& memory) {
  return fmt::format(
      "parameters {:.1f}, gradients {:.1f}, optimizer {:.1f}, activations {:.1f}, "
      "workspace {:.1f}, operators {:.1f}, messages {:.1f}, libraries {:.1f}, of these apart from "
      "the rank's block {:.1f}, in MiB",
      mebi(memory.parameters), mebi(memory.gradients), mebi(memory.optimizer),
      mebi(memory.activations), mebi(memory.workspace), mebi(memory.operators),
      mebi(memory.buffers), mebi(memory.libraries), mebi(memory.apart));
}

int PipelineLayout::slots_of(int stage) const {
  int slots = 1;
  const auto look = [&](const Plan& plan) {
    if (plan.ranks.empty()) return;
    for (const BufferPool& pool : plan.ranks[at(train.placement.rank_of(stage))].pools) {
      if (pool.stage == stage && pool.kind == BufferKind::kState)
        slots = std::max(slots, pool.count);
    }
  };
  look(train);
  for (const EvaluationPlan& evaluation : evaluations) {
    look(evaluation.round);
    look(evaluation.rest);
  }
  return slots;
}

bool PipelineLayout::splits_backward() const {
  for (const RankPlan& plan : train.ranks) {
    for (const PlanOp& op : plan.ops) {
      if (op.action == ActionKind::kBackwardInput) return true;
    }
  }
  return false;
}

bool PipelineLayout::nccl_within() const {
  return uses_nccl(links) || std::any_of(tied.begin(), tied.end(), [](const TiedParameter& tie) {
           return uses_nccl(tie.links);
         });
}

bool PipelineLayout::is_owner(int stage, int index) const {
  for (const TiedParameter& tie : tied) {
    for (std::size_t u = 1; u < tie.uses.size(); ++u) {
      if (tie.uses[u].stage == stage && tie.uses[u].index == index) return false;
    }
  }
  return true;
}

}  // namespace sluice
