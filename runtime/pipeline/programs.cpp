#include "runtime/pipeline/programs.hpp"

namespace sluice {

Engine& Programs::add(const Plan& plan) {
  Program& program = programs_[plan.micro_batches];
  program.plan = &plan;
  return engine(plan.micro_batches);
}

void Programs::plan(int micro_batches) {
  if (programs_.contains(micro_batches)) return;
  auto made = std::make_unique<const Plan>(make_plan_(micro_batches));
  Program& program = programs_[micro_batches];
  program.own = std::move(made);
  program.plan = program.own.get();
}

Engine& Programs::engine(int micro_batches) {
  Program& program = programs_.at(micro_batches);
  if (program.engine == nullptr) program.engine = make_engine_(*program.plan);
  return *program.engine;
}

}  // namespace sluice
