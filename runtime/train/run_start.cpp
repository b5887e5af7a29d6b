#include "runtime/train/run_start.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include <sluice/checkpoint.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/checkpoint/load_checkpoint.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/models/model_tensors.hpp"
#include "runtime/pipeline/pipeline_access.hpp"

namespace sluice {
namespace {

void compare_with_saved(RunStart& start, const TrainOptions& options, const OptionValues& data,
                        const std::string& arithmetic_change) {
  start.changes = {changes_since(*start.resumed, options),
                   data_changes_since(*start.resumed, options, data), arithmetic_change};
  std::erase(start.changes, "");
  start.rate_jump = rate_jump_since(*start.resumed, options);
}

// The directory of --weights, or of the newest save in it as rank 0 sees it.
std::filesystem::path newest_model(Pipeline& pipeline, const TrainOptions& options) {
  std::string path;
  PipelineAccess::guarded(pipeline, [&] {
    Collectives& world = PipelineAccess::world(pipeline);
    if (world.communicator().rank() == 0) path = newest_save(options.weights).string();
    path = world.broadcast_string(path, 0);
  });
  return path;
}

}  // namespace

// An older save than the one that gave the options may be the newest that is sound.
RunStart load_start(Pipeline& pipeline, const TrainOptions& options, const OptionValues& data) {
  RunStart start;
  if (!options.resume.from) {
    if (!options.weights.empty()) {
      load_model(pipeline, newest_model(pipeline, options), options.resume.verify);
    }
    return start;
  }
  const std::vector<std::string>& allowed = options.resume.allow;
  const bool converts =
      std::find(allowed.begin(), allowed.end(), "moment-precision") != allowed.end();
  LoadedCheckpoint loaded =
      load_checkpoint(pipeline, options.resume.path, options.resume.verify,
                      converts ? OtherPrecision::kConvert : OtherPrecision::kRefuse);
  start.passed_over = std::move(loaded.notes);
  start.damaged = std::move(loaded.passed_over);
  start.skipped = std::move(loaded.skipped);
  start.resumed = options.resume.from;
  start.resumed->directory = loaded.directory;
  start.resumed->step = loaded.step;
  if (!loaded.run.empty()) {
    start.resumed->run = std::move(loaded.run);
    start.resumed->options = std::move(loaded.options);
    start.resumed->data = std::move(loaded.data);
  }
  PipelineAccess::guarded(pipeline, [&] {
    require_steps_left(options, start.resumed->step);
    compare_with_saved(start, options, data, loaded.arithmetic);
  });
  return start;
}

RunStart plan_start(const JobLayout& layout, const TrainOptions& options, const OptionValues& data,
                    bool reads_save) {
  RunStart start;
  if (!options.resume.from) return start;
  start.resumed = options.resume.from;
  compare_with_saved(start, options, data,
                     arithmetic_change(start.resumed->arithmetic, layout.arithmetic));
  if (reads_save) require_steps_left(options, require_fitting_save(layout, options.resume.path));
  return start;
}

void require_steps_left(const TrainOptions& options, std::uint64_t done) {
  if (done < options.steps) return;
  throw_usage(
      "option --steps: '{}' has done {} steps already, --steps {} leaves "
      "nothing to do; choose at least {}",
      options.resume.path, done, options.steps, done + 1);
}

std::string describe_start(const RunStart& start, const TrainOptions& options) {
  std::string lines;
  for (const std::string& broken : start.passed_over) {
    lines += fmt::format("passed over: {}\n", broken);
  }
  if (start.resumed) {
    const std::filesystem::path& save = start.resumed->directory;
    lines += fmt::format("going on after step {} of '{}'\n", start.resumed->step,
                         (save.parent_path() / save_name(save)).string());
  } else if (!options.weights.empty()) {
    lines += fmt::format("starting from the weights of '{}'\n", options.weights);
  }
  for (const std::string& change : start.changes) {
    lines += fmt::format("changed since step {}: {}\n", start.resumed->step, change);
  }
  if (!start.rate_jump.empty()) lines += start.rate_jump + "\n";
  return lines;
}

}  // namespace sluice
