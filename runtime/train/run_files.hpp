// The files a run writes: what must hold of them before it starts, and what its saves get.
#pragma once

#include <string>

#include <sluice/checkpoint.hpp>

#include "comm/group/collectives.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/train/run_start.hpp"
#include "runtime/train/train_data.hpp"
#include "runtime/train/train_options.hpp"

namespace sluice {

// Collective. Whether --resume auto found all steps done, on every rank: hosts with directories of
// their own may have other newest saves.
[[nodiscard]] bool already_complete(const TrainOptions& options, Collectives& job);
// On rank 0 of a complete run. A kill may have left the last save without its name, others half
// removed, its lock, or a request to stop; no Checkpointer opens the directory again.
void tidy_complete_run(const TrainOptions& options);

// On rank 0, before anything is computed. It changes no file, because the run may still be refused.
void require_writable_outputs(const TrainOptions& options);
// On rank 0. For a save, as the Checkpointer finds it. That may remove saves beyond --keep first.
void require_room(const TrainOptions& options, const JobLayout& layout);

// What the Checkpointer of the run gets; it reads `options` and `data` before each save. `writes`:
// whether this rank writes a model's files.
[[nodiscard]] CheckpointOptions checkpoint_options(const TrainOptions& options,
                                                   const TrainData& data, const RunStart& start,
                                                   bool writes);
// On rank 0. Writes options.conf beside the saves; one that is not Sluice's stays, and the text
// returned says so.
[[nodiscard]] std::string write_options(const TrainOptions& options);

}  // namespace sluice
