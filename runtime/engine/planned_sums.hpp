// The sums over replicas that an action makes, held to the number that the plan has for it.
// Internal to the engine.
#pragma once

#include <span>

#include <sluice/stage.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice {

class PlannedSums final : public Collective {
 public:
  // Null: this stage has one replica.
  explicit PlannedSums(Collective* replicas) : replicas_(replicas) {}

  // Before the stage's part of an action that makes `planned` sums.
  void begin(int planned) {
    planned_ = planned;
    made_ = 0;
  }
  void sum(std::span<double> values) override {
    if (++made_ > planned_) {
      throw_usage(
          "the stage sums over its replicas {} times and describes {} (StageDescription's "
          "forward_sums and backward_sums)",
          made_, planned_);
    }
    if (replicas_ != nullptr) replicas_->sum(values);
  }
  // After it. Other replicas would wait for a sum that is missing.
  void end() const {
    if (made_ == planned_) return;
    throw_usage(
        "the stage sums over its replicas {} times and describes {} (StageDescription's "
        "forward_sums and backward_sums)",
        made_, planned_);
  }

 private:
  Collective* replicas_;
  int planned_ = 0, made_ = 0;
};

}  // namespace sluice
