// The order of a training and the layers of each stage: by name, from a file, or searched for.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>
#include <sluice/stage.hpp>
#include <sluice/transformer.hpp>

#include "comm/group/collectives.hpp"
#include "runtime/program/train/train_options.hpp"

namespace sluice {

// What a schedule of a file or of a search is said to take.
struct StepPromise {
  double bubble = 0;        // Simulation::bubble_makespan
  double milliseconds = 0;  // of a step; 0: nobody gave times in milliseconds
  std::string source = {};  // "the schedule file", "the profile", "layer costs"
};

struct ScheduleChoice {
  std::shared_ptr<const Schedule> order = {};  // null: PipelineOptions::Order names it
  Partition partition = {};
  std::string remark =
      {};  // one line on the origin of an order or its layers; empty: nothing to say
  std::optional<StepPromise> promise = {};  // of a given or searched order
};

// [layer] of the model, embedding and head included, in units of their own. Each half of backward
// takes as many matmuls as forward. Recomputation adds to the input half; a whole block's is
// StageTimes::recompute.
[[nodiscard]] std::vector<StageTimes> layer_times(const TransformerConfig& model);

// [layer] What ranks that share the model's layers pass each other in a training, of an all-gather
// the parts of all ranks: for LayerTable. `shards` as of the options; of one those that two have.
// `inputs`: of one micro-batch. Empty where such a model can have no shards.
[[nodiscard]] std::vector<StageCollectives> layer_collectives(const TransformerConfig& model,
                                                              int shards, bool deals_positions,
                                                              std::vector<TensorSpec> inputs,
                                                              ComputeContext& compute);

// For a pipeline of `ranks` ranks. Collective over all ranks of the job. For --schedule auto rank 0
// searches and broadcasts the result. The costs of the search are those of TrainOptions::profile
// and cluster. Without them they are the layers' matmuls, and messages and collectives take no
// time. What --offload moves takes time by estimated_rates(), unless --recompute auto chooses it
// later. At most as many micro-batches are in flight as 1f1b holds. The layers of a schedule file
// that says them are its stages' unless --partition says otherwise, or unless they are of another
// number of layers, which the remark says. Throws Error(kUsage) where layers or stages cannot be
// placed.
[[nodiscard]] ScheduleChoice choose_schedule(const TrainOptions& options, int ranks,
                                             Collectives& world);

}  // namespace sluice
