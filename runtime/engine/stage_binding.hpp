// A stage of this rank by its interfaces, as the engine and the sums of gradients use it, and the
// calls that are checked.
#pragma once

#include <functional>
#include <span>

#include <sluice/data.hpp>
#include <sluice/parameter.hpp>
#include <sluice/stage.hpp>

#include "stages/network/state_bytes.hpp"

namespace sluice {

// The pointers are of one object, which the caller owns, and of what it owns.
struct StageBinding {
  int index = 0;  // global
  Stage* stage = nullptr;
  SplitBackward* split = nullptr;  // null: cannot split backward
  LossStage* loss = nullptr;       // set on the last stage
  // As before prepare(). Null: the stage has none.
  ParameterSet* parameters = nullptr;
  StateBytes state = {};  // of its slots; none for a stage with own_memory
};

// LossStage::target_weight() of the last stage. Throws what it throws, and Error(kUsage) for a
// number that is no weight: it would be in the mean loss and in every gradient.
[[nodiscard]] double target_weight(const StageBinding& last, std::span<const Tensor> targets);

// Of a micro-batch in host memory, before any message. What Stage::check_inputs() and
// target_weight() throw names the stage, and the sample where they refuse one alone. `samples`: of
// the batch.
void check_inputs(const StageBinding& first, std::span<const Tensor> inputs, SampleRange samples);
[[nodiscard]] double check_targets(const StageBinding& last, std::span<const Tensor> targets,
                                   SampleRange samples);

// LossStage::loss() of the last stage. Throws what it throws, and Error(kUsage) where it leaves
// *sum unwritten. `first`: of training; then also where it leaves an output of f32 as forward()
// wrote it.
void watch_loss(const StageBinding& last, StageContext& ctx, std::span<const Tensor> outputs,
                std::span<const Tensor> targets, bool first, double* sum);

// Runs `pass`, the stage's part of an action on a CPU in training. Throws Error(kUsage) where a
// forward writes a gradient without Parameter::written_by_loss, or a backward one that has it.
void watch_gradients(const StageBinding& stage, StreamView stream, bool forward,
                     const std::function<void()>& pass);

}  // namespace sluice
