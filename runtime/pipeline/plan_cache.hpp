// The plans that a pipeline runs, each with its engine, by number of micro-batches. A number that
// is not there is planned and verified, in place of the one whose last use is longest ago where
// there are kMost.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <sluice/plan.hpp>

#include "runtime/engine/engine.hpp"

namespace sluice {

class PlanCache {
 public:
  static constexpr std::size_t kMost = 8;  // besides those that are added

  using MakePlan = std::function<Plan(int micro_batches)>;
  using MakeEngine = std::function<std::unique_ptr<Engine>(const Plan& plan)>;
  // `rank`: of the pipeline. With its engine a plan loses the lists of the other ranks.
  PlanCache(int rank, MakePlan make_plan, MakeEngine make_engine)
      : rank_(rank), make_plan_(std::move(make_plan)), make_engine_(std::move(make_engine)) {}

  // Makes the engine of a plan that is there already; `plan` outlives this. It stays.
  Engine& add(Plan& plan);
  // Plans, if the number is not there. Needs no other rank; throws what MakePlan throws.
  void plan(int micro_batches);
  // Requires plan(micro_batches). Makes the engine, if it is the first time. It lives until kMost
  // other numbers have been planned since its last use.
  [[nodiscard]] Engine& engine(int micro_batches);

 private:
  struct Program {
    std::unique_ptr<Plan> own;  // null: added
    Plan* plan = nullptr;
    std::unique_ptr<Engine> engine;
  };
  // Moves the program to the front; null: it is not there.
  Program* find(int micro_batches);

  int rank_;
  MakePlan make_plan_;
  MakeEngine make_engine_;
  std::vector<Program> programs_;  // by their last use, the latest first
};

}  // namespace sluice
