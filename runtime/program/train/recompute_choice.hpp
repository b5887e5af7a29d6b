// What each block of a training's model recomputes: --recompute.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include <sluice/stage.hpp>
#include <sluice/transformer.hpp>

#include "runtime/layout/job_layout.hpp"

namespace sluice {

// "block*2,attention,none" of the model's blocks in order. A setting without a number is one
// block's; the last one is that of all that remain. "auto": choose_recompute().
struct RecomputeOption {
  struct Run {
    Recompute kind = Recompute::kNone;
    int blocks = 0;  // 0: all that remain, of the last run alone
  };
  std::vector<Run> runs = {{}};
  bool automatic = false;
};

// Throws Error(kUsage) that names the part.
[[nodiscard]] RecomputeOption parse_recompute(const std::string& text);
[[nodiscard]] std::string to_string(const RecomputeOption& option);

// Sets what the model's blocks recompute; with auto nothing. Throws Error(kUsage) where the option
// is for more or for fewer blocks.
void take_recompute(const RecomputeOption& option, TransformerConfig& model);

struct RecomputeChoice {
  TransformerConfig model;
  std::string remark;  // one line: what was chosen, and the memory that it takes
};

// The layout of the job with this model; the same on all ranks, whether or not it fits.
using LayoutOfModel = std::function<JobLayout(const TransformerConfig& model)>;

// What the blocks of `model` recompute so that no rank needs more than `limit` bytes on its device.
// Each rank's stages recompute the fewest floating-point operations that free what it lacks: a
// stage by as many bytes a block as a block of it frees with the setting, for each micro-batch that
// the schedule holds there. Blocks of a stage that recompute more come last. Every choice is
// planned, so what it says fits. Calls `layout_of` once where nothing has to be recomputed, else a
// few times more. Throws Error(kUsage) where no setting of one kind per rank fits, with the least
// memory that one needs.
[[nodiscard]] RecomputeChoice choose_recompute(const TransformerConfig& model,
                                               const Partition& partition, std::size_t limit,
                                               const LayoutOfModel& layout_of);

}  // namespace sluice
