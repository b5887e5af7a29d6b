// Finds what a loss on a CPU leaves unwritten. Internal to the engine.
#pragma once

#include <span>

#include "runtime/engine/stage_binding.hpp"

namespace sluice {

// LossStage::loss() of the last stage. Throws what it throws, and Error(kUsage) where it leaves
// *sum unwritten. `first`: of training; then also where it leaves an output of f32 as forward()
// wrote it.
void watch_loss(const StageBinding& last, StageContext& ctx, std::span<const Tensor> outputs,
                std::span<const Tensor> targets, bool first, double* sum);

}  // namespace sluice
