#include "runtime/program/train/run_start.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <utility>

#include <sluice/hugging_face.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/checkpoint/load_checkpoint.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/checkpoint/save_lock.hpp"
#include "runtime/files/trace.hpp"
#include "runtime/files/writable.hpp"
#include "runtime/layout/division.hpp"
#include "runtime/layout/save_shares.hpp"
#include "runtime/models/model_config.hpp"
#include "runtime/models/model_tensors.hpp"
#include "runtime/models/tokenizer_file.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "stages/operators/optimizer.hpp"

namespace sluice {
namespace {

namespace fs = std::filesystem;

void compare_with_saved(RunStart& start, const TrainOptions& options, const OptionValues& data,
                        const std::string& arithmetic_change) {
  start.changes = {changes_since(*start.resumed, options),
                   data_changes_since(*start.resumed, options, data), arithmetic_change};
  std::erase(start.changes, "");
  start.remarks = {bits_change_since(*start.resumed, options),
                   rate_jump_since(*start.resumed, options)};
  std::erase(start.remarks, "");
}

// The directory of --weights, or of the newest save in it as rank 0 sees it.
fs::path newest_model(Pipeline& pipeline, const TrainOptions& options) {
  std::string path;
  PipelineAccess::guarded(pipeline, [&] {
    Collectives& world = PipelineAccess::world(pipeline);
    if (world.communicator().rank() == 0) path = newest_save(options.weights).string();
    path = world.broadcast_string(path, 0);
  });
  return path;
}

void print_line(const std::string& line) { fmt::print("{}\n", line); }

// Another job that saves there removes old saves while this one reads them. The Checkpointer takes
// the lock for good.
void require_unused(const TrainOptions& options) {
  if (options.dry_run || !fs::exists(options.save)) return;
  const SaveLock probe(options.save, SaveLock::kWatch, print_line);
}

// Of the saves: those of the save or the model that the run goes on from stay.
std::map<std::string, std::string> model_files(const TrainOptions& options, const TokenFile& data,
                                               const RunStart& start) {
  std::map<std::string, std::string> base;
  if (start.resumed) {
    base = read_model_files(start.resumed->directory);
  } else if (!options.weights.empty()) {
    base = read_model_files(newest_save(options.weights));
  }
  if (!base.contains("tokenizer.json")) {
    std::string text = tokenizer_beside(data);
    if (!text.empty()) base["tokenizer.json"] = std::move(text);
  }
  if (!base.contains("config.json") && data.end_of_text() >= 0) {
    base["config.json"] = fmt::format("{{\"eos_token_id\": {}}}", data.end_of_text());
  }
  return hugging_face_files(options.model, options.checkpoint.precision, base);
}

// A warning where there are more tensor ranks than heads of keys; else empty.
std::string describe_idle_ranks(const TrainOptions& options) {
  const TransformerConfig& model = options.model;
  const PipelineOptions::Shape& shape = options.pipeline.shape;
  const int heads = model.kv_heads > 0 ? model.kv_heads : model.heads;
  if (shape.tensor <= heads) return "";
  int most = 1;
  for (const int ranks : dividing(shape.tensor_shards)) {
    if (ranks <= heads) most = ranks;
  }
  return fmt::format(
      "warning: {} of {} tensor ranks compute no attention: the model has {} head{} of keys; "
      "--tensor {} leaves none without\n",
      shape.tensor - heads, shape.tensor, heads, heads == 1 ? "" : "s", most);
}

bool same_directory(const fs::path& a, const fs::path& b) {
  std::error_code error;
  return fs::weakly_canonical(a, error) == fs::weakly_canonical(b, error);
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
  const bool converts = std::ranges::find(allowed, "moment-precision") != allowed.end();
  LoadedCheckpoint loaded =
      load_checkpoint(pipeline, options.resume.path, options.resume.verify,
                      converts ? OtherPrecision::kConvert : OtherPrecision::kRefuse);
  start.passed_over = std::move(loaded.notes);
  start.damaged = std::move(loaded.passed_over);
  start.skipped = std::move(loaded.skipped);
  start.resumed = options.resume.from;
  start.resumed->directory = loaded.directory;
  start.resumed->step = loaded.step;
  start.resumed->virtual_replicas = loaded.virtual_replicas;
  start.resumed->tensor_shards = loaded.tensor_shards;
  start.resumed->gradient_order = loaded.gradient_order;
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
    const fs::path& save = start.resumed->directory;
    lines += fmt::format("going on after step {} of '{}'\n", start.resumed->step,
                         (save.parent_path() / save_name(save)).string());
  } else if (!options.weights.empty()) {
    lines += fmt::format("starting from the weights of '{}'\n", options.weights);
  }
  for (const std::string& change : start.changes) {
    lines += fmt::format("changed since step {}: {}\n", start.resumed->step, change);
  }
  for (const std::string& remark : start.remarks) lines += remark + "\n";
  return lines + describe_idle_ranks(options);
}

bool already_complete(const TrainOptions& options, Collectives& job) {
  if (!options.resume.automatic) return false;
  const std::uint64_t done = options.resume.from ? options.resume.from->step : 0;
  const auto all = job.all_gather_strings(std::to_string(done));
  return std::ranges::all_of(
      all, [&](const std::string& theirs) { return std::stoull(theirs) >= options.steps; });
}

void tidy_complete_run(const TrainOptions& options) {
  const fs::path& last = options.resume.from->directory;
  const fs::path stop = fs::path(options.save) / "stop";
  std::error_code error;
  const bool named = last.filename() == save_name(last), cut = has_leftovers(options.save);
  const bool ended = fs::exists(stop, error) || fs::exists(stop.parent_path() / "lock", error);
  if (options.dry_run || (named && !cut && !ended)) return;
  try {
    const SaveLock lock(options.save, SaveLock::kWatch, print_line);
    for (const std::string& line : open_save_directory(options.save)) print_line(line);
    if (fs::is_regular_file(stop, error)) fs::remove(stop, error);
  } catch (const Error& in_use) {
    if (!named) throw;
    if (!cut) return;
    print_line(fmt::format("remains of cut saves stay in '{}': {}", options.save, in_use.what()));
  }
}

void require_writable_outputs(const TrainOptions& options) {
  if (!options.trace.empty()) require_replaceable_file(options.trace, kTraceBegin, "timeline");
  if (!options.metrics.empty()) require_writable_file(options.metrics);
  if (options.save.empty()) return;
  require_writable_directory(options.save);
  require_unused(options);
  if (options.resume.from || options.checkpoint.overwrite) return;
  // The Checkpointer refuses it as well, but only after the memory of the pipeline is there.
  const SaveScan scan = scan_saves(options.save);
  if (scan.saves.empty() && scan.broken.empty()) return;
  throw_error(
      ErrorCode::kIo,
      "directory '{}' holds {}; --resume auto goes on with what is there, --overwrite "
      "replaces it, or give another --save",
      options.save,
      scan.saves.empty() ? "a damaged save: " + scan.broken.front() : "saves of another run");
}

void require_room(const TrainOptions& options, const JobLayout& layout) {
  const CheckpointOptions& checkpoint = options.checkpoint;
  if (options.save.empty() || std::ssize(scan_saves(options.save).saves) > checkpoint.keep) return;
  std::size_t elements = 0;
  for (const SavedParameter& each : share_saves(layout)) {
    elements += static_cast<std::size_t>(each.elements);
  }
  const std::size_t state =
      checkpoint.weights_only ? 0 : state_bytes_per_element(options.pipeline.training.optimizer);
  const std::size_t rounded = checkpoint.precision == DType::kBf16 ? size_of(DType::kBf16) : 0;
  require_space(options.save, elements * (sizeof(float) + state + rounded));
}

CheckpointOptions checkpoint_options(const TrainOptions& options, const TrainData& data,
                                     const RunStart& start, bool writes) {
  CheckpointOptions checkpoint = options.checkpoint;
  checkpoint.data = data.identity;
  checkpoint.before_save = [&] { require_same_data(options, data); };
  checkpoint.model = model_config_text(options.model);
  checkpoint.skipped = start.skipped;
  if (!architecture_of(options.model).empty()) {
    checkpoint.layout = hugging_face_layout(options.model);
    if (writes) checkpoint.files = model_files(options, *data.file, start);
  }
  // In another directory the run is one of its own: two may go on from one save.
  if (start.resumed && same_directory(start.resumed->root, options.save)) {
    checkpoint.run = start.resumed->run;
    checkpoint.damaged = start.damaged;
  }
  return checkpoint;
}

std::string write_options(const TrainOptions& options) {
  const fs::path path = fs::path(options.save) / "options.conf";
  const bool written = write_for_people(
      path, to_config_text(options.checkpoint.options),
      [](std::string_view text) { return text.find('#') == std::string_view::npos; });
  return written ? "" : fmt::format("'{}' is not Sluice's: it stays as it is", path.string());
}

}  // namespace sluice
