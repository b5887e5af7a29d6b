// The units of parameters in the order in which an engine's run reads them, where replicas have
// parts of them. Internal to the engine. One thread.
//
// The plan's UNSHARD and RESHARD say when a stage's units may be there. With Gather::kPerUse the
// one in use is, and the next one is on its way where it has room beside it; with kPerStep all of
// the stage's are.
#pragma once

#include <cstddef>
#include <vector>

#include <sluice/plan.hpp>
#include <sluice/stage.hpp>

#include "runtime/engine/sharded_values.hpp"

namespace sluice {

class UnitWalk final : public ParameterUnits {
 public:
  // Both outlive this.
  UnitWalk(ShardedValues& values, const std::vector<PlanOp>& ops);

  // Before the ops of a run.
  void begin_run();
  // Between these calls, after begin_run(), a stage that uses no units has all of its parameters.
  void lend(int stage);
  void take_back(int stage);
  void unshard(const PlanOp& op);
  void reshard(const PlanOp& op);
  // Around the stage's part of a compute op; null: all of its parameters are there. Units that the
  // stage does not use are gathered all the same: the other replicas make the same calls. Where the
  // plan splits backward calls, B is I and then W, which may read all units once more.
  [[nodiscard]] ParameterUnits* begin(const PlanOp& op);
  void end();
  void use(int unit) override;

 private:
  // Of ops_[index], in uses_.
  struct Uses {
    std::size_t first = 0, count = 0;
  };
  [[nodiscard]] const Uses& uses_of(const PlanOp& op) const;
  // Throws where the action does not have that unit, which replicas have parts of.
  void require_uncut(int unit) const;
  // Makes the next unit whole, and starts the one after it.
  void use_next();
  void start_next();

  ShardedValues& values_;
  const std::vector<PlanOp>& ops_;
  std::vector<std::size_t> uses_;  // units, one after the other
  std::vector<Uses> op_uses_;      // [op]
  std::vector<bool> sharded_;      // [unit] its stage is between UNSHARD and RESHARD
  int stage_ = -1;                 // of the action
  // Of uses_: where the action's begin, the next one, where they end.
  std::size_t first_ = 0, next_ = 0, end_ = 0;
};

}  // namespace sluice
