// What a run goes on from: a save, the weights of a model, or nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sluice/pipeline.hpp>

#include "runtime/layout/job_layout.hpp"
#include "runtime/options/option_table.hpp"
#include "runtime/train/saved_run.hpp"
#include "runtime/train/train_options.hpp"

namespace sluice {

struct RunStart {
  std::optional<SavedRun> resumed;       // the save that was loaded
  std::vector<std::string> passed_over;  // why newer saves were not
  std::vector<std::string> damaged;      // names of saves in resumed->root
  std::vector<std::string> changes;      // since that save
  std::string rate_jump;                 // rate_jump_since()
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

}  // namespace sluice
