// What a run goes on from (a save, the weights of a model, or nothing), and the files it writes:
// what must hold of them before it starts, and what its saves get.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sluice/checkpoint.hpp>
#include <sluice/pipeline.hpp>

#include "comm/group/collectives.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/program/options/option_table.hpp"
#include "runtime/program/train/saved_run.hpp"
#include "runtime/program/train/train_data.hpp"
#include "runtime/program/train/train_options.hpp"

namespace sluice {

struct RunStart {
  std::optional<SavedRun> resumed;       // the save that was loaded
  std::vector<std::string> passed_over;  // why newer saves were not
  std::vector<std::string> damaged;      // names of saves in resumed->root
  std::vector<std::string> changes;      // since that save
  std::vector<std::string> remarks;      // bits_change_since(), rate_jump_since()
  std::vector<std::uint64_t> skipped;    // steps of earlier runs whose loss was not finite
};

// Collective. Loads what the options say into the pipeline. `data`: data_identity().
[[nodiscard]] RunStart load_start(Pipeline& pipeline, const TrainOptions& options,
                                  const OptionValues& data);
// The same of a run that is only planned: compares, and loads nothing. `reads_save`: whether this
// rank finds out if the save fits.
[[nodiscard]] RunStart plan_start(const JobLayout& layout, const TrainOptions& options,
                                  const OptionValues& data, bool reads_save);

// Throws Error(kUsage) where `done` steps are all that the options ask for.
void require_steps_left(const TrainOptions& options, std::uint64_t done);

// Lines for the report at the start.
[[nodiscard]] std::string describe_start(const RunStart& start, const TrainOptions& options);

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
