// `sluice train`: data, pipeline, steps, validation, reports, weights, summary.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <sluice/checkpoint.hpp>
#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/hugging_face.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>

#include "comm/base/cores.hpp"
#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/mpi/mpi_session.hpp"
#include "runtime/checkpoint/load_checkpoint.hpp"
#include "runtime/checkpoint/save_directory.hpp"
#include "runtime/checkpoint/save_lock.hpp"
#include "runtime/cli/commands.hpp"
#include "runtime/cli/layout_report.hpp"
#include "runtime/cli/schedule_choice.hpp"
#include "runtime/cli/train_options.hpp"
#include "runtime/cli/validation.hpp"
#include "runtime/files/trace.hpp"
#include "runtime/files/writable.hpp"
#include "runtime/job/activity.hpp"
#include "runtime/job/configuration.hpp"
#include "runtime/job/guard.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/layout/save_shares.hpp"
#include "runtime/models/model_config.hpp"
#include "runtime/models/model_tensors.hpp"
#include "runtime/options/process.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/report/job_gpus.hpp"
#include "runtime/report/layer_table.hpp"
#include "runtime/report/metrics.hpp"
#include "runtime/report/operator_report.hpp"
#include "runtime/report/rank_table.hpp"
#include "runtime/report/run_events.hpp"
#include "runtime/report/stragglers.hpp"
#include "runtime/report/timeline.hpp"
#include "runtime/tokens/same_tokenizer.hpp"
#include "stages/cpu/cpu_report.hpp"
#include "stages/operators/optimizer.hpp"

namespace sluice {
namespace {

// Steps at the end of a run that go into the trace.
constexpr std::uint64_t kTracedSteps = 4;
// Windows of a validation at the end, unless --validation-samples is given: what share of those
// that are trained between two validations, at least and at most.
constexpr double kValidationShare = 0.05;
constexpr double kLeastValidation = 32, kMostValidation = 1024;
// The most of one between steps, likewise.
constexpr std::int64_t kQuickValidation = 64;
// The exit code of a run that was asked to stop.
constexpr int kStopped = 12;

ProductPrecision products_of(const TrainOptions& options) {
  if (options.model.precision == DType::kBf16) return ProductPrecision::kBf16;
  return options.pipeline.devices.tf32 ? ProductPrecision::kTf32 : ProductPrecision::kF32;
}

// A request to stop by a signal, which may come before there is a saver. Without begin(), signals
// have their default action.
class StopRequest {
 public:
  StopRequest() = default;
  ~StopRequest() { signals_.reset(); }  // before what its handler uses
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  void begin() {
    signals_.emplace([this]() noexcept {
      asked_ = true;
      ActivityBoard::for_each([](ActivityBoard& board, void*) noexcept { board.expect_end(); },
                              nullptr);
      if (Checkpointer* saver = saver_) saver->request_stop();
    });
  }
  // Null before the saver goes.
  void set_saver(Checkpointer* saver) {
    saver_ = saver;
    if (saver != nullptr && asked_) saver->request_stop();
  }
  [[nodiscard]] bool asked() const { return asked_; }
  void describe(std::uint64_t step, const std::filesystem::path& save) {
    if (signals_) signals_->describe(step, save);
  }

 private:
  std::atomic<bool> asked_ = false;
  std::atomic<Checkpointer*> saver_ = nullptr;
  std::optional<StopSignals> signals_;
};

bool same_directory(const std::filesystem::path& a, const std::filesystem::path& b) {
  std::error_code error;
  return std::filesystem::weakly_canonical(a, error) == std::filesystem::weakly_canonical(b, error);
}

struct Sums {
  double seconds = 0, tokens = 0, bubble = 0;
  std::uint64_t steps = 0;
};

// A step's messages between stages, [samples, context, width] there and back, and a rank's part of
// the gradients.
void set_traffic(PipelineOptions::Shape& shape, const TransformerConfig& model, int ranks) {
  const double samples =
      shape.batch_size > 0
          ? static_cast<double>(shape.batch_size) / shape.replicas
          : static_cast<double>(shape.micro_batches) * static_cast<double>(shape.micro_batch_size);
  shape.edge_bytes = 2 * static_cast<double>(size_of(model.stream_precision)) * samples *
                     model.context * model.width;
  shape.gradient_bytes =
      sizeof(float) * static_cast<double>(parameter_count(model)) * shape.replicas / ranks;
}

// Sizes that always give the same order, in which a host's ranks hold whole stages if they can.
void keep_replicas_together(PipelineOptions::Shape& shape) {
  shape.edge_bytes = 0;
  shape.gradient_bytes = 1;
}

class Training {
 public:
  // `world`, `options` and `stop` outlive this.
  Training(MpiInfo machine, Communicator& world, const TrainOptions& options, StopRequest& stop)
      : machine_(std::move(machine)), world_(world), options_(options), stop_(stop) {}
  ~Training() { stop_.set_saver(nullptr); }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  void run();
  // Whether the run was asked to stop before its last step. The same on all ranks.
  [[nodiscard]] bool stopped() const { return stopped_; }

 private:
  [[nodiscard]] bool first() const { return world_.rank() == 0; }
  [[nodiscard]] int job_ranks() const;
  [[nodiscard]] int pipeline_depth() const;
  [[nodiscard]] const OptionValues& resolved() const {
    return options_.pipeline.checks.configuration;
  }
  void open_data(Communicator& comm, ControlChannel& control);
  void require_same_options(Collectives& collectives) const;
  [[nodiscard]] bool already_complete(Collectives& collectives) const;
  void tidy_complete_run() const;
  void open_metrics();
  void open_saver();
  void require_same_data() const;
  [[nodiscard]] std::map<std::string, std::string> model_files(DType precision) const;
  void plan_evaluations();
  void dry_run(Communicator& comm, ControlChannel& control);
  void make_pipeline();
  void load();
  [[nodiscard]] std::filesystem::path newest_model();
  void compare_with_saved(const std::string& arithmetic_change);
  // In windows.
  [[nodiscard]] std::int64_t usual_validation() const;
  [[nodiscard]] std::int64_t part_of_validation() const;
  void require_a_batch() const;
  void require_writable_outputs() const;
  void require_room(const JobLayout& layout) const;
  void require_unused(const std::filesystem::path& directory) const;
  void require_steps_left(std::uint64_t done) const;
  [[nodiscard]] StageFactory stages() const;
  [[nodiscard]] LayerTable layers() const {
    return {choice_.partition.first, layer_times(options_.model)};
  }
  // Whether a host's directory must hold whole stages.
  [[nodiscard]] bool keeps_replicas_together() const {
    return options_.checkpoint.local && options_.pipeline.shape.replicas > 1;
  }
  [[nodiscard]] std::string describe_ranks(Collectives& collectives, const JobLayout& layout) const;
  void describe(const JobLayout& layout, const std::string& ranks) const;
  void steps();
  void one_step();
  // The newest save that a run can go on from; may be empty. On rank 0.
  [[nodiscard]] std::filesystem::path last_resumable() const {
    return saver_ && !options_.checkpoint.weights_only ? saver_->last_save()
                                                       : std::filesystem::path();
  }
  void report(const StepReport& step);
  void count_skip(const StepReport& step);
  std::vector<int> work_of_ranks();
  void look_at_gpus();
  void profile_step(double seconds);
  void sum_profile();
  void read_gpus(std::uint64_t step);
  void look_for_stragglers();
  // Collective. Whether a signal asked any rank to stop.
  [[nodiscard]] bool asked_anywhere();
  void validate(std::int64_t samples);
  void note(const std::string& line);
  void summarise();
  void print_promise() const;
  void print_files() const;
  StepRecord record_of(const StepReport& report) const;

  MpiInfo machine_;
  Communicator& world_;
  const TrainOptions& options_;
  StopRequest& stop_;
  ScheduleChoice choice_;
  std::shared_ptr<TokenFile> file_;
  std::unique_ptr<DataSource> source_;
  PipelineOptions pipeline_options_;
  std::unique_ptr<Pipeline> pipeline_;
  std::optional<MetricsWriter> metrics_;
  std::optional<Progress> progress_;
  std::optional<Stragglers> stragglers_;  // on rank 0
  std::optional<JobGpus> gpus_;
  std::vector<OperatorTime> operators_;  // of all ranks, in the last steps
  int profiled_steps_ = 0;
  double profiled_seconds_ = 0;
  std::vector<GpuState> gpu_states_;  // after the last step; empty: not read then
  std::optional<Checkpointer> saver_;
  std::optional<SavedRun> resumed_;  // the save that was loaded
  std::vector<std::string> changes_, passed_over_;
  std::string rate_jump_;
  std::vector<std::string> damaged_;    // names of saves in resumed_->root
  std::vector<std::uint64_t> skipped_;  // steps, of earlier runs as well
  bool stopped_ = false;
  OptionValues data_;
  Timeline timeline_;
  double clock_error_ = 0;         // of the trace, in seconds
  std::uint64_t traced_from_ = 0;  // the first step in the trace
  std::int64_t quick_samples_ = 0, last_samples_ = 0, windows_ = 0;
  std::optional<double> validation_loss_;
  double train_loss_ = 0;
  Sums sums_;
  RunEvents events_;  // on rank 0
};

void Training::run() {
  bool complete = false;
  {
    const std::unique_ptr<Communicator> comm = world_.duplicate();
    ControlChannel control(*comm);
    guarded(control, world_.rank(), [&] {
      Collectives collectives(*comm, 0, &control);
      require_same_options(collectives);
      complete = already_complete(collectives);
      if (complete) return tidy_complete_run();
      if (options_.resume.from) require_steps_left(options_.resume.from->step);
      choice_ = choose_schedule(options_, pipeline_depth(), collectives);
    });
    if (complete) {
      if (first()) {
        fmt::print("already complete: {} has done all {} steps\n", options_.save, options_.steps);
      }
      return;
    }
    open_data(*comm, control);
    guarded(control, world_.rank(), [&] { require_writable_outputs(); });
    plan_evaluations();
    if (options_.dry_run) {
      dry_run(*comm, control);
      return require_stdout();
    }
  }
  make_pipeline();
  steps();
  sum_profile();
  if (last_samples_ > 0 && !stopped_) validate(last_samples_);
  if (!options_.trace.empty() && !stopped_) {
    clock_error_ = timeline_.write(*pipeline_, options_.trace, layers());
  }
  pipeline_->close();
  if (first()) summarise();
}

// One process plans the job that the options say.
int Training::job_ranks() const {
  const PipelineOptions::Shape& shape = options_.pipeline.shape;
  if (!options_.dry_run || world_.size() > 1) return world_.size();
  const std::int64_t ranks = std::int64_t{std::max(shape.pipeline, 1)} * shape.replicas;
  return static_cast<int>(std::min<std::int64_t>(ranks, std::numeric_limits<int>::max()));
}

// A size that cannot work ends here.
int Training::pipeline_depth() const {
  const PipelineOptions::Shape& shape = options_.pipeline.shape;
  const int depth = shape.pipeline > 0 ? shape.pipeline : std::max(job_ranks() / shape.replicas, 1);
  if (job_ranks() == world_.size()) {
    (void)make_topology(world_.size(), depth, shape.replicas, shape.rank_order);
  }
  return depth;
}

void Training::require_same_options(Collectives& collectives) const {
  OptionValues values = resolved();
  if (options_.resume.automatic) {
    values.emplace_back("saves in " + options_.save, options_.resume.from ? "found" : "none");
  }
  require_same_configuration(collectives, values);
}

// Hosts with directories of their own may have other newest saves.
bool Training::already_complete(Collectives& collectives) const {
  if (!options_.resume.automatic) return false;
  const std::uint64_t done = options_.resume.from ? options_.resume.from->step : 0;
  const auto all = collectives.all_gather_strings(std::to_string(done));
  return std::all_of(all.begin(), all.end(), [&](const std::string& theirs) {
    return std::stoull(theirs) >= options_.steps;
  });
}

// A kill may have left the last save without its name, others half removed, its lock, or a request
// to stop; no Checkpointer opens the directory again.
void Training::tidy_complete_run() const {
  const std::filesystem::path& last = options_.resume.from->directory;
  const std::filesystem::path stop = std::filesystem::path(options_.save) / "stop";
  std::error_code error;
  const bool named = last.filename() == save_name(last), cut = has_leftovers(options_.save);
  const bool ended = std::filesystem::exists(stop, error) ||
                     std::filesystem::exists(stop.parent_path() / "lock", error);
  if (!first() || options_.dry_run || (named && !cut && !ended)) return;
  const auto print = [](const std::string& line) { fmt::print("{}\n", line); };
  try {
    const SaveLock lock(options_.save, SaveLock::kWatch, print);
    for (const std::string& line : open_save_directory(options_.save)) print(line);
    if (std::filesystem::is_regular_file(stop, error)) std::filesystem::remove(stop, error);
  } catch (const Error& in_use) {
    if (!named) throw;
    if (!cut) return;
    print(fmt::format("remains of cut saves stay in '{}': {}", options_.save, in_use.what()));
  }
}

void Training::open_data(Communicator& comm, ControlChannel& control) {
  guarded(control, world_.rank(), [&] {
    if (options_.data.empty()) {
      source_ = make_token_shapes(options_.model.context);
      return;
    }
    file_ = std::make_shared<TokenFile>(options_.data, options_.validation_share);
    Collectives collectives(comm, 0, &control);
    require_same_configuration(collectives, file_->identity("--data"));
    data_ = data_identity(*file_);
    if (options_.resume.from) {
      require_same_tokenizer(*file_, options_.resume.from->directory);
    } else if (!options_.weights.empty()) {
      require_same_tokenizer(*file_, newest_save(options_.weights));
    }
    if (options_.resume.from) (void)data_changes_since(*options_.resume.from, options_, data_);
    const std::int64_t samples = options_.validation_samples;
    const bool exactly =
        samples != TrainOptions::kSomeWindows && samples != TrainOptions::kAllWindows;
    if (file_->train_size() == file_->size() && (exactly || options_.validate_every > 0)) {
      throw_usage(
          "option --validation-share: {} of {} tokens leaves nothing for "
          "--validation-samples or --validate-every; give a larger share or "
          "leave them out",
          options_.validation_share, file_->size());
    }
    source_ = make_token_source(file_, options_.model.context, options_.model.vocabulary,
                                options_.pipeline.training.seed);
    require_a_batch();
    windows_ = validation_samples(*file_, options_.model.context);
    last_samples_ = exactly ? samples : std::min(windows_, usual_validation());
    quick_samples_ = exactly ? samples : std::min(last_samples_, kQuickValidation);
  });
}

std::int64_t Training::usual_validation() const {
  if (options_.validation_samples == TrainOptions::kAllWindows) return windows_;
  const std::uint64_t every = options_.validate_every;
  const double steps =
      static_cast<double>(every > 0 ? std::min(every, options_.steps) : options_.steps);
  const double trained = steps * static_cast<double>(options_.pipeline.shape.batch_size);
  return static_cast<std::int64_t>(
      std::clamp(kValidationShare * trained, kLeastValidation, kMostValidation));
}

std::int64_t Training::part_of_validation() const {
  const PipelineOptions::Shape& shape = options_.pipeline.shape;
  return validation_part(shape.micro_batch_size, shape.replicas);
}

void Training::require_a_batch() const {
  const std::int64_t needed = options_.pipeline.shape.batch_size * options_.model.context + 1;
  if (file_->train_size() >= needed) return;
  throw_error(ErrorCode::kData,
              "data file '{}' has {} tokens to train on, fewer than one batch: "
              "--batch-size {} of --context {} takes {}",
              options_.data, file_->train_size(), options_.pipeline.shape.batch_size,
              options_.model.context, needed);
}

// Another job that saves there removes old saves while this one reads them. The Checkpointer takes
// the lock for good.
void Training::require_unused(const std::filesystem::path& directory) const {
  if (options_.dry_run || !std::filesystem::exists(directory)) return;
  const SaveLock probe(directory, SaveLock::kWatch,
                       [](const std::string& line) { fmt::print("{}\n", line); });
}

// Called before anything is computed. It changes no file, because the run may still be refused.
void Training::require_writable_outputs() const {
  if (!first()) return;
  if (!options_.trace.empty()) {
    require_replaceable_file(options_.trace, kTraceBegin, "timeline");
  }
  if (!options_.metrics.empty()) require_writable_file(options_.metrics);
  if (options_.save.empty()) return;
  require_writable_directory(options_.save);
  require_unused(options_.save);
  if (options_.resume.from || options_.checkpoint.overwrite) return;
  // The Checkpointer refuses it as well, but only after the memory of the pipeline is there.
  const SaveScan scan = scan_saves(options_.save);
  if (scan.saves.empty() && scan.broken.empty()) return;
  throw_error(
      ErrorCode::kIo,
      "directory '{}' holds {}; --resume auto goes on with what is there, --overwrite "
      "replaces it, or give another --save",
      options_.save,
      scan.saves.empty() ? "a damaged save: " + scan.broken.front() : "saves of another run");
}

void Training::open_metrics() {
  PipelineAccess::guarded(*pipeline_, [&] {
    if (!first() || options_.metrics.empty()) return;
    nlohmann::ordered_json run;
    for (const auto& [key, value] : resolved()) run["options"][key] = value;
    run["layers"] = nlohmann::ordered_json::parse(to_json_text(layers()));
    run["ranks"] = world_.size();
    run["kernels"] = kernel_set();
    run["matmul"] = matmul_library();
    run["mpi"] = machine_.library;
    metrics_.emplace(options_.metrics,
                     run.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
                     resumed_ ? std::optional(resumed_->step) : std::nullopt);
  });
}

void Training::open_saver() {
  if (options_.save.empty()) {
    PipelineAccess::set_step_flags(*pipeline_, [this] { return stop_.asked() ? 1U : 0U; });
    return;
  }
  CheckpointOptions checkpoint = options_.checkpoint;
  checkpoint.data = data_;
  checkpoint.before_save = [this] { require_same_data(); };
  checkpoint.model = model_config_text(options_.model);
  checkpoint.skipped = skipped_;
  if (!architecture_of(options_.model).empty()) {
    checkpoint.layout = hugging_face_layout(options_.model);
    PipelineAccess::guarded(*pipeline_, [&] {
      if (first()) checkpoint.files = model_files(checkpoint.precision);
    });
  }
  // In another directory the run is one of its own: two may go on from one save.
  if (resumed_ && same_directory(resumed_->root, options_.save)) {
    checkpoint.run = resumed_->run;
    checkpoint.damaged = damaged_;
  }
  saver_.emplace(*pipeline_, std::move(checkpoint),
                 [this](const std::string& line) { note(line); });
  stop_.set_saver(&*saver_);
  PipelineAccess::guarded(*pipeline_, [&] {
    if (!first()) return;
    const std::filesystem::path path = std::filesystem::path(options_.save) / "options.conf";
    const bool written = write_for_people(
        path, to_config_text(options_.checkpoint.options),
        [](std::string_view text) { return text.find('#') == std::string_view::npos; });
    if (!written) note(fmt::format("'{}' is not Sluice's: it stays as it is", path.string()));
  });
}

// A save says what it was trained on.
void Training::require_same_data() const {
  const std::string change = data_difference(data_, data_identity(*file_));
  if (change.empty()) return;
  throw_error(ErrorCode::kData,
              "data file '{}' has changed since the start: {}; nothing is saved of the steps since "
              "the last save",
              options_.data, change);
}

// Of the saves: those of the save or the model that the run goes on from stay.
std::map<std::string, std::string> Training::model_files(DType precision) const {
  std::map<std::string, std::string> base;
  if (resumed_) {
    base = read_model_files(resumed_->directory);
  } else if (!options_.weights.empty()) {
    base = read_model_files(newest_save(options_.weights));
  }
  if (!base.contains("tokenizer.json")) {
    std::string text = tokenizer_beside(*file_);
    if (!text.empty()) base["tokenizer.json"] = std::move(text);
  }
  if (!base.contains("config.json") && file_->end_of_text() >= 0) {
    base["config.json"] = fmt::format("{{\"eos_token_id\": {}}}", file_->end_of_text());
  }
  return hugging_face_files(options_.model, precision, base);
}

void Training::plan_evaluations() {
  std::vector<std::int64_t> evaluations;
  for (const std::int64_t samples :
       {last_samples_, options_.validate_every > 0 ? quick_samples_ : 0}) {
    for (const std::int64_t size : validation_sizes(samples, part_of_validation())) {
      evaluations.push_back(size);
    }
  }
  pipeline_options_ = options_.pipeline;
  pipeline_options_.training.evaluations = std::move(evaluations);
  pipeline_options_.order.given = choice_.order;
  pipeline_options_.shape.pipeline = pipeline_depth();
  set_traffic(pipeline_options_.shape, options_.model, job_ranks());
  if (keeps_replicas_together()) keep_replicas_together(pipeline_options_.shape);
  if (first() && !choice_.remark.empty()) fmt::print("{}\n", choice_.remark);
}

StageFactory Training::stages() const {
  return [this, model = Transformer(options_.model)](int stage, int) {
    return model.stage_of(choice_.partition, stage);
  };
}

// Collective. Where each rank runs, and its place; empty for one rank.
std::string Training::describe_ranks(Collectives& collectives, const JobLayout& layout) const {
  if (world_.size() == 1) return "";
  const std::string reason = keeps_replicas_together() && !layout.place.order_reason.empty()
                                 ? "the replicas of a stage share hosts, as --save-local needs"
                                 : layout.place.order_reason;
  return (reason.empty() ? "" : fmt::format("  order of ranks: {}\n", reason)) +
         gather_rank_table(collectives, layout, options_.pipeline.devices.threads, "  ");
}

// Nothing is printed before this, so a job that is refused prints only its error.
void Training::describe(const JobLayout& layout, const std::string& ranks) const {
  fmt::print("{}{}{}", describe_configuration(resolved()),
             describe_layout(layout, choice_.partition), ranks);
  for (const std::string& broken : passed_over_) fmt::print("passed over: {}\n", broken);
  if (resumed_) {
    const std::filesystem::path& save = resumed_->directory;
    fmt::print("going on after step {} of '{}'\n", resumed_->step,
               (save.parent_path() / save_name(save)).string());
  }
  if (!resumed_ && !options_.weights.empty()) {
    fmt::print("starting from the weights of '{}'\n", options_.weights);
  }
  for (const std::string& change : changes_) {
    fmt::print("changed since step {}: {}\n", resumed_->step, change);
  }
  if (!rate_jump_.empty()) fmt::print("{}\n", rate_jump_);
  if (options_.save.empty() && !options_.dry_run) fmt::print("nothing is saved: give --save DIR\n");
  std::fflush(stdout);
}

// For a save, as the Checkpointer finds it. That may remove saves beyond --keep first.
void Training::require_room(const JobLayout& layout) const {
  const CheckpointOptions& checkpoint = options_.checkpoint;
  if (options_.save.empty() || std::ssize(scan_saves(options_.save).saves) > checkpoint.keep)
    return;
  std::size_t elements = 0;
  for (const SavedParameter& each :
       share_saves(layout.plans, layout.parameters, layout.place.topology.replicas)) {
    elements += static_cast<std::size_t>(each.elements);
  }
  const std::size_t state =
      checkpoint.weights_only ? 0 : state_bytes_per_element(options_.pipeline.training.optimizer);
  const std::size_t rounded = checkpoint.precision == DType::kBf16 ? size_of(DType::kBf16) : 0;
  require_space(options_.save, elements * (sizeof(float) + state + rounded));
}

void Training::dry_run(Communicator& comm, ControlChannel& control) {
  const JobLayout layout =
      PipelineAccess::plan_layout(world_, pipeline_options_, stages(), *source_);
  std::string ranks;
  guarded(control, world_.rank(), [&] {
    Collectives collectives(comm, 0, &control);
    ranks = describe_ranks(collectives, layout);
    if (first()) require_room(layout);
    if (!options_.resume.from) return;
    resumed_ = options_.resume.from;
    compare_with_saved(arithmetic_change(resumed_->arithmetic, layout.arithmetic));
    if (first()) require_steps_left(require_fitting_save(layout, options_.resume.path));
  });
  if (!first()) return;
  describe(layout, ranks);
  if (job_ranks() == world_.size()) return;
  fmt::print(
      "planned in one process: {} ranks, each with a device like this one's; memory of hosts was "
      "not compared\n",
      job_ranks());
}

void Training::make_pipeline() {
  pipeline_ = std::make_unique<Pipeline>(world_, pipeline_options_, stages(), *source_);
  if (options_.resume.from) {
    load();
  } else if (!options_.weights.empty()) {
    load_model(*pipeline_, newest_model(), options_.resume.verify);
  }
  open_metrics();
  open_saver();
  const JobLayout& layout = PipelineAccess::layout(*pipeline_);
  const std::string ranks = describe_ranks(PipelineAccess::world(*pipeline_), layout);
  if (first()) describe(layout, ranks);
}

// The directory of --weights, or of the newest save in it as rank 0 sees it.
std::filesystem::path Training::newest_model() {
  std::string path;
  PipelineAccess::guarded(*pipeline_, [&] {
    if (first()) path = newest_save(options_.weights).string();
    path = PipelineAccess::world(*pipeline_).broadcast_string(path, 0);
  });
  return path;
}

// An older save than the one that gave the options may be the newest that is sound.
void Training::load() {
  const std::vector<std::string>& allowed = options_.resume.allow;
  const bool converts =
      std::find(allowed.begin(), allowed.end(), "moment-precision") != allowed.end();
  LoadedCheckpoint loaded =
      load_checkpoint(*pipeline_, options_.resume.path, options_.resume.verify,
                      converts ? OtherPrecision::kConvert : OtherPrecision::kRefuse);
  passed_over_ = std::move(loaded.notes);
  damaged_ = std::move(loaded.passed_over);
  skipped_ = std::move(loaded.skipped);
  resumed_ = options_.resume.from;
  resumed_->directory = loaded.directory;
  resumed_->step = loaded.step;
  if (!loaded.run.empty()) {
    resumed_->run = std::move(loaded.run);
    resumed_->options = std::move(loaded.options);
    resumed_->data = std::move(loaded.data);
  }
  PipelineAccess::guarded(*pipeline_, [&] {
    require_steps_left(resumed_->step);
    compare_with_saved(loaded.arithmetic);
  });
}

void Training::compare_with_saved(const std::string& arithmetic_change) {
  changes_ = {changes_since(*resumed_, options_), data_changes_since(*resumed_, options_, data_),
              arithmetic_change};
  std::erase(changes_, "");
  rate_jump_ = rate_jump_since(*resumed_, options_);
}

void Training::require_steps_left(std::uint64_t done) const {
  if (done < options_.steps) return;
  throw_usage(
      "option --steps: '{}' has done {} steps already, --steps {} leaves "
      "nothing to do; choose at least {}",
      options_.resume.path, done, options_.steps, done + 1);
}

void Training::steps() {
  progress_.emplace(pipeline_->step() + 1, options_.steps, terminal_output());
  stragglers_.emplace(work_of_ranks());
  look_at_gpus();
  const std::uint64_t before = options_.steps - std::min(options_.steps, kTracedSteps);
  traced_from_ = std::max(pipeline_->step(), before) + 1;
  if (first()) events_.start(pipeline_->step(), last_resumable());
  while (pipeline_->step() < options_.steps && !stopped_) one_step();
  if (first()) progress_->finish();
  progress_.reset();
  if (saver_) saver_->save_now();
  if (!first()) return;
  events_.save(last_resumable());
  events_.end(pipeline_->step());
}

void Training::one_step() {
  stop_.describe(pipeline_->step() + 1, saver_ ? saver_->last_save() : std::filesystem::path());
  if (!options_.trace.empty() && pipeline_->step() + 1 == traced_from_) timeline_.begin(*pipeline_);
  if (options_.profile_operators && pipeline_->step() + 1 == traced_from_) {
    pipeline_->compute().profile_operators(true);
  }
  const StepReport step = pipeline_->train_step();
  profile_step(step.seconds);
  look_for_stragglers();
  read_gpus(step.step);
  if (!options_.trace.empty() && step.step >= traced_from_) timeline_.add(*pipeline_);
  report(step);
  count_skip(step);
  const bool last = step.step == options_.steps;
  if (options_.validate_every > 0 && step.step % options_.validate_every == 0 && !last) {
    validate(quick_samples_);
  }
  if (saver_) {
    saver_->after_step(step);
    if (first()) events_.save(last_resumable());
  }
  const bool asked =
      saver_ ? saver_->stop_requested() : PipelineAccess::step_flags(*pipeline_) != 0;
  stopped_ = asked && !last;
}

void Training::report(const StepReport& step) {
  if (!step.skipped) train_loss_ = step.loss;
  if (!first()) return;
  const StepRecord record = record_of(step);
  sums_.seconds += record.seconds;
  sums_.tokens += static_cast<double>(record.tokens);
  sums_.bubble += record.bubble_measured;
  ++sums_.steps;
  progress_->step(record);
  if (metrics_) metrics_->step(record);
  events_.step(record.step, record.seconds);
}

// Collective. What Stragglers compare: a rank's place in its pipeline.
std::vector<int> Training::work_of_ranks() {
  std::vector<int> work;
  PipelineAccess::guarded(*pipeline_, [&] {
    const int needed = world_.local_size() * options_.pipeline.devices.threads;
    const bool shares = needed > host_cores();
    const Topology& topology = PipelineAccess::layout(*pipeline_).place.topology;
    const auto all = PipelineAccess::world(*pipeline_).all_gather_strings(shares ? "shares" : "");
    for (int rank = 0; rank < world_.size(); ++rank) {
      work.push_back(all[at(rank)].empty() ? topology.pipeline_rank(rank) : Stragglers::kShared);
    }
  });
  return work;
}

void Training::look_at_gpus() {
  PipelineAccess::guarded(*pipeline_, [&] {
    const RankPlace& place = PipelineAccess::layout(*pipeline_).place;
    gpus_.emplace(PipelineAccess::world(*pipeline_), place.devices[at(place.rank)].machine,
                  place.device());
  });
}

// Of the steps that a trace would have.
void Training::profile_step(double seconds) {
  if (!options_.profile_operators || pipeline_->step() < traced_from_) return;
  ++profiled_steps_;
  profiled_seconds_ += seconds;
}

void Training::sum_profile() {
  if (!options_.profile_operators || stopped_) return;
  PipelineAccess::guarded(*pipeline_, [&] {
    operators_ = sum_operator_times(PipelineAccess::world(*pipeline_),
                                    pipeline_->compute().operator_times());
    pipeline_->compute().profile_operators(false);
  });
}

// After every tenth step of a run with metrics: a driver's answers take a while.
void Training::read_gpus(std::uint64_t step) {
  constexpr std::uint64_t kEvery = 10;
  gpu_states_.clear();
  if (options_.metrics.empty() || step % kEvery != 0) return;
  PipelineAccess::guarded(*pipeline_, [&] { gpu_states_ = gpus_->read(); });
}

void Training::look_for_stragglers() {
  if (!first()) return;
  for (const Straggler& each : stragglers_->step(PipelineAccess::busy_seconds(*pipeline_))) {
    note(fmt::format(
        "rank {} on {} is slow: its actions take {:.2f} times as long as {}, over {} "
        "steps",
        each.rank, PipelineAccess::hosts(*pipeline_)[at(each.rank)], each.factor,
        each.of_replicas ? "those of the same stages in other replicas" : "in its first steps",
        Stragglers::kWindow));
  }
}

void Training::count_skip(const StepReport& step) {
  if (!step.skipped) return;
  skipped_.push_back(step.step);
  const auto most = static_cast<std::size_t>(options_.max_skips);
  if (skipped_.size() > most) {
    throw_error(ErrorCode::kNumeric,
                "step {}: the loss or a gradient is not finite, and {} steps have been skipped "
                "already, which is all that --max-skips {} allows",
                step.step, most, most);
  }
  note(fmt::format("step {}: skipped, the loss or a gradient is not finite ({} of at most {})",
                   step.step, skipped_.size(), most));
}

void Training::note(const std::string& line) {
  if (!first()) return;
  if (progress_) return progress_->note(line);
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

StepRecord Training::record_of(const StepReport& report) const {
  StepRecord record;
  record.step = report.step;
  record.loss = report.loss;
  record.tokens = static_cast<std::int64_t>(report.targets);
  record.seconds = report.seconds;
  record.tokens_per_second = report.targets / report.seconds;
  record.flops = record.tokens_per_second * training_flops(options_.model) / options_.model.context;
  const double peak = gpus_->peak(products_of(options_));
  if (peak > 0) record.share_of_peak = record.flops / peak;
  record.grad_norm = report.grad_norm;
  record.learning_rate = report.learning_rate;
  record.bubble_measured = report.bubble_measured;
  record.bubble_ideal = PipelineAccess::layout(*pipeline_).plans.bubble_ideal;
  record.peak_in_flight = report.peak_in_flight;
  record.peak_bytes = report.peak_bytes;
  record.skipped = report.skipped;
  record.stragglers = stragglers_->now();
  record.gpus = gpu_states_;
  return record;
}

bool Training::asked_anywhere() {
  bool asked = false;
  PipelineAccess::guarded(*pipeline_, [&] {
    Collectives& world = PipelineAccess::world(*pipeline_);
    for (const std::string& each : world.all_gather_strings(stop_.asked() ? "stop" : "")) {
      asked = asked || !each.empty();
    }
  });
  return asked;
}

// A stop ends it without a loss.
void Training::validate(std::int64_t samples) {
  std::optional<Progress> of_the_last;
  Progress& progress = progress_
                           ? *progress_
                           : of_the_last.emplace(options_.steps, options_.steps, terminal_output());
  const auto goes_on = [&](std::int64_t done) {
    const bool stop = asked_anywhere();
    if (first()) progress.validation(stop ? samples : done, samples);
    return !stop;
  };
  validation_loss_ = sluice::validate(*pipeline_, *source_, samples, part_of_validation(), goes_on);
  if (!validation_loss_) return note("validation stopped as asked");
  if (!first()) return;
  if (metrics_) metrics_->validation(pipeline_->step(), *validation_loss_);
  if (progress_) {
    progress_->note(fmt::format("step {}: validation loss {:.4f} over {} windows",
                                pipeline_->step(), *validation_loss_, samples));
  }
}

void Training::summarise() {
  const bool bytes = file_->format() == TokenFormat::kText;
  const char* unit = bytes ? "byte" : "token";
  const auto line = [&](const char* name, double nats, const std::string& remark) {
    fmt::print("  {:<18} {:.4f} nats, {:.4f} bits per {}{}\n", name, nats, nats / std::log(2.0),
               unit, remark);
  };
  if (stopped_) {
    fmt::print("\nstopped as asked after step {}", pipeline_->step());
    if (!saver_) {
      fmt::print("; nothing is saved");
    } else if (!options_.checkpoint.weights_only) {
      fmt::print("; resume with --resume {} (or auto)", options_.save);
    }
    fmt::print("\n");
  } else {
    fmt::print("\nDone: {} step{}\n", options_.steps, options_.steps == 1 ? "" : "s");
  }
  if (sums_.steps > 0) line("training loss", train_loss_, "");
  if (validation_loss_ && !stopped_) {
    line("validation loss", *validation_loss_,
         last_samples_ < windows_ ? fmt::format(" ({} of {} windows)", last_samples_, windows_)
                                  : "");
  }
  if (!skipped_.empty()) {
    fmt::print("  {:<18} {}: the loss or a gradient was not finite\n", "skipped steps",
               skipped_.size());
  }
  if (sums_.steps > 0) {
    fmt::print("  {:<18} {:.0f} tokens/s\n", "speed", sums_.tokens / sums_.seconds);
    const int ranks = world_.local_size(), cores = host_cores();
    const bool sliced = ranks > cores;
    fmt::print("  {:<18} {:.1f} % measured, {:.1f} % ideal{}\n", "bubble",
               100 * sums_.bubble / static_cast<double>(sums_.steps),
               100 * PipelineAccess::layout(*pipeline_).plans.bubble_ideal,
               sliced ? fmt::format(" (measured includes time-slicing: {} ranks share {} cores)",
                                    ranks, cores)
                      : "");
    print_promise();
  }
  print_files();
  if (profiled_steps_ == 0 || stopped_) return;
  fmt::print("\nOperators (ranks: {}, last steps: {})\n{}", world_.size(), profiled_steps_,
             operator_table(operators_, {.steps = profiled_steps_,
                                         .rank_seconds = profiled_seconds_ * world_.size(),
                                         .precision = products_of(options_),
                                         .card = gpus_->card()}));
}

// Beside what the run measured.
void Training::print_promise() const {
  if (!choice_.promise) return;
  const StepPromise& promise = *choice_.promise;
  const auto steps = static_cast<double>(sums_.steps);
  std::string text = fmt::format("bubble {:.1f} % promised by {}, {:.1f} % measured",
                                 100 * promise.bubble, promise.source, 100 * sums_.bubble / steps);
  if (promise.milliseconds > 0) {
    text += fmt::format("; step {:.4g} ms promised, {:.4g} ms measured", promise.milliseconds,
                        1000 * sums_.seconds / steps);
  }
  fmt::print("  {:<18} {}\n", "schedule", text);
}

void Training::print_files() const {
  const auto path = [](const char* name, const std::string& where) {
    if (!where.empty()) fmt::print("  {:<18} {}\n", name, where);
  };
  if (saver_) {
    path("weights",
         (std::filesystem::path(options_.save) / saver_->last_save().filename()).string());
    if (!options_.checkpoint.weights_only && !stopped_) {
      path("to go on",
           fmt::format("train --resume {} --steps N (N above {})", options_.save, options_.steps));
    }
  }
  path("metrics", options_.metrics);
  if (!stopped_ && !options_.trace.empty()) {
    path("trace", options_.trace + " (open it at ui.perfetto.dev)");
    if (world_.size() > 1) {
      path("trace clock",
           fmt::format("ranks agree with rank 0 within {:.0f} us", std::ceil(clock_error_ * 1e6)));
    }
  }
}

}  // namespace

int train_command(int argc, char** argv) {
  const std::vector<std::string> arguments(argv, argv + argc);
  TrainOptions options;
  bool stopped = false;
  StopRequest stop;
  const int code = run_command(
      "train", argc, argv,
      [&] {
        options = parse_train_options(arguments);
        // A reader of the output that goes, and a file that may not grow, are errors of writing.
        for (const int each : {SIGPIPE, SIGXFSZ}) (void)std::signal(each, SIG_IGN);
        if (!options.dry_run && options.help.empty()) stop.begin();
        return options.help;
      },
      [&](Communicator& world) {
        // Not every launcher tells the number of ranks before MPI starts.
        if (options.resume.from && world.size() != launched_size()) {
          options = parse_train_options(arguments, world.size());
        }
        const PlaceSignals place;
        Training training(mpi_info(), world, options, stop);
        training.run();
        stopped = training.stopped();
      });
  return code == 0 && stopped ? kStopped : code;
}

}  // namespace sluice
