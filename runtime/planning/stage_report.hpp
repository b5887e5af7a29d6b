// What the rank that owns a stage tells every other rank about it, and its form as text; whether
// the stage keeps to it. Internal to the pipeline.
#pragma once

#include <array>
#include <string>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/plan.hpp>
#include <sluice/stage.hpp>
#include <sluice/tensor.hpp>

#include "runtime/engine/stage_binding.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

struct StageReport {
  StageEntry entry;
  std::vector<std::vector<TensorSpec>> outputs;    // [size][output]
  std::vector<std::vector<bool>> input_gradients;  // [size][input] whether it needs a gradient
  std::vector<std::vector<TensorSpec>> answers;    // [size] StageDescription::answers
  bool gives_answers = true;                       // LossStage::why_no_answers()
  std::string model;  // StageDescription::model; compared apart, so not in to_text()
};

// Where a stage is, for what it may describe.
struct StagePeers {
  bool last = false;
  std::array<int, kCollectiveAxes> ranks = {1, 1};  // [axis] that make its collectives
};

// Describes `stage`, which has the global number `index`. inputs[size] are its inputs for every
// shape that a micro-batch may have, the largest first. Throws Error(kUsage) that names
// the stage where a description or a parameter's name is not legal. `targets`, of the data: none,
// or [size] those that a loss of this stage gets; others than it describes are refused too.
[[nodiscard]] StageReport report_of(Stage& stage, int index,
                                    const std::vector<std::vector<TensorSpec>>& inputs,
                                    const std::vector<std::vector<TensorSpec>>& targets,
                                    const StagePeers& peers, ComputeContext& compute);

// After prepare(). Throws Error(kUsage) where a stage has other parameters or buffers than it
// described, or none of their memory.
void require_prepared(const StageBinding& binding, const StageEntry& described);

[[nodiscard]] std::string to_text(const StageReport& report);
// Requires a text of to_text().
[[nodiscard]] StageReport report_from(const std::string& text);

}  // namespace sluice
