// The plans that a pipeline has run, each with its engine, by number of micro-batches. A number
// that has not occurred before is planned and verified then.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <utility>

#include <sluice/plan.hpp>

#include "runtime/engine/engine.hpp"

namespace sluice {

class Programs {
 public:
  using MakePlan = std::function<Plan(int micro_batches)>;
  using MakeEngine = std::function<std::unique_ptr<Engine>(const Plan& plan)>;
  Programs(MakePlan make_plan, MakeEngine make_engine)
      : make_plan_(std::move(make_plan)), make_engine_(std::move(make_engine)) {}

  // Makes the engine of a plan that is there already; `plan` outlives this.
  Engine& add(const Plan& plan);
  // Plans, if it is the first time. Needs no other rank; throws what MakePlan throws.
  void plan(int micro_batches);
  // Requires plan(micro_batches). Makes the engine, if it is the first time.
  [[nodiscard]] Engine& engine(int micro_batches);

 private:
  struct Program {
    std::unique_ptr<const Plan> own;  // null: added
    const Plan* plan = nullptr;
    std::unique_ptr<Engine> engine;
  };
  MakePlan make_plan_;
  MakeEngine make_engine_;
  std::map<int, Program> programs_;
};

}  // namespace sluice
