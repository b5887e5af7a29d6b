#include "runtime/pipeline/plan_cache.hpp"

#include <algorithm>

#include "comm/base/index.hpp"

namespace sluice {

PlanCache::Program* PlanCache::find(int micro_batches) {
  const auto found = std::find_if(programs_.begin(), programs_.end(), [&](const Program& program) {
    return program.plan->micro_batches == micro_batches;
  });
  if (found == programs_.end()) return nullptr;
  std::rotate(programs_.begin(), found, found + 1);
  return &programs_.front();
}

Engine& PlanCache::add(Plan& plan) {
  if (find(plan.micro_batches) == nullptr) {
    programs_.insert(programs_.begin(), {.own = nullptr, .plan = &plan, .engine = nullptr});
  }
  return engine(plan.micro_batches);
}

void PlanCache::plan(int micro_batches) {
  if (find(micro_batches) != nullptr) return;
  auto made = std::make_unique<Plan>(make_plan_(micro_batches));
  const auto is_own = [](const Program& program) { return program.own != nullptr; };
  if (std::count_if(programs_.begin(), programs_.end(), is_own) ==
      static_cast<std::ptrdiff_t>(kMost)) {
    programs_.erase(std::find_if(programs_.rbegin(), programs_.rend(), is_own).base() - 1);
  }
  Plan* const plan = made.get();
  programs_.insert(programs_.begin(), {.own = std::move(made), .plan = plan, .engine = nullptr});
}

Engine& PlanCache::engine(int micro_batches) {
  Program& program = *find(micro_batches);
  if (program.engine == nullptr) {
    program.engine = make_engine_(*program.plan);
    for (std::size_t rank = 0; rank < program.plan->ranks.size(); ++rank) {
      if (rank != at(rank_)) program.plan->ranks[rank].ops = std::vector<PlanOp>();
    }
  }
  return *program.engine;
}

}  // namespace sluice
