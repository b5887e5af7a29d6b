// What each block of a training's model recomputes, and with auto how much leaves the device:
// --recompute, --offload.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/options.hpp>
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
  PipelineOptions::Offload offload;  // that of the options, with what stages keep
  std::string remark;  // one line: what was chosen, the memory that it takes, what moves take
};

// The layout of the job with this model and these options, whether or not it fits; collective over
// the ranks that plan.
using LayoutOfOptions =
    std::function<JobLayout(const TransformerConfig& model, const PipelineOptions& options)>;

// How much a rank computes and moves out or back in a second: estimates, the same everywhere, so
// that all ranks and a --dry-run choose alike. A disk's is for one of the ranks that share it.
struct Rates {
  double operations = 0, bytes = 0;
};
[[nodiscard]] Rates estimated_rates(const PipelineOptions& options, DeviceKind kind);

// What a pipeline's rank moves out, and back, in a step.
[[nodiscard]] double moved_bytes(const JobLayout& layout, int rank);

// What the blocks of `model` recompute, and where the options offload, how many micro-batches each
// stage keeps, so that no rank needs more than Devices::memory. Of both together each rank takes
// what makes its step shortest: the longer of its computation and of its moves, since these run
// beside it. Among equals it is what moves less. Where nothing may leave, that is the fewest
// floating-point operations. Times are those of estimated_rates().
//
// A stage of each rank frees as many bytes a block as a block of it frees with the setting, for
// each micro-batch that it keeps. Blocks of a stage that recompute more come last. Every choice is
// planned, so what it says fits. Calls `layout_of` once where everything fits as it is, else a few
// times more. Throws Error(kUsage) where no setting of one kind per rank fits, with the least
// memory that one needs.
[[nodiscard]] RecomputeChoice choose_recompute(const TransformerConfig& model,
                                               const Partition& partition,
                                               const PipelineOptions& options,
                                               const LayoutOfOptions& layout_of);

}  // namespace sluice
