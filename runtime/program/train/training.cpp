#include "runtime/program/train/training.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include <sluice/checkpoint.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>

#include "comm/base/cores.hpp"
#include "comm/mpi/mpi_session.hpp"
#include "runtime/entry/command.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/group/activity.hpp"
#include "runtime/group/collective_costs.hpp"
#include "runtime/group/configuration.hpp"
#include "runtime/group/guard.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/process/process.hpp"
#include "runtime/program/train/fit_table.hpp"
#include "runtime/program/train/run_start.hpp"
#include "runtime/program/train/schedule_choice.hpp"
#include "runtime/program/train/step_reports.hpp"
#include "runtime/program/train/train_data.hpp"
#include "runtime/program/train/train_options.hpp"
#include "runtime/report/layout_report.hpp"
#include "runtime/report/timeline.hpp"
#include "stages/cpu/cpu_report.hpp"

namespace sluice {
namespace {

// A request to stop by a signal, which may come before there is a saver.
// Without begin(), signals have their default action.
class StopRequest {
 public:
  StopRequest() = default;
  ~StopRequest() { signals_.reset(); }  // before what its handler uses
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  void begin() {
    signals_.emplace([this]() noexcept {
      ActivityBoard::for_each([](ActivityBoard& board, void*) noexcept { board.expect_end(); },
                              nullptr);
      if (Checkpointer* saver = saver_) saver->request_stop();
    });
  }
  // Null before the saver goes.
  void set_saver(Checkpointer* saver) {
    saver_ = saver;
    if (saver != nullptr && asked()) saver->request_stop();
  }
  [[nodiscard]] bool asked() const { return signals_ && signals_->requested(); }
  void describe(std::uint64_t step, const std::filesystem::path& save) {
    if (signals_) signals_->describe(step, save);
  }

 private:
  std::atomic<Checkpointer*> saver_ = nullptr;
  std::optional<StopSignals> signals_;
};

class Training {
 public:
  // `world`, `options` and `stop` outlive this.
  Training(Communicator& world, const TrainOptions& options, StopRequest& stop);
  ~Training();
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  void run();
  // Whether the run was asked to stop before its last step. The same on all ranks.
  [[nodiscard]] bool stopped() const { return stopped_; }

 private:
  [[nodiscard]] bool first() const { return world_.rank() == 0; }
  [[nodiscard]] int job_ranks() const;
  [[nodiscard]] int pipeline_depth() const;
  [[nodiscard]] bool keeps_replicas_together() const;
  [[nodiscard]] LayerTable layers() const;
  [[nodiscard]] LayerTable layers_of_profile();
  [[nodiscard]] StageFactory stages(const TransformerConfig& model) const;
  void require_same_options(Collectives& job) const;
  bool prepare();
  void plan_pipeline();
  [[nodiscard]] JobLayout planned(const TransformerConfig& model, const PipelineOptions& options,
                                  MemoryLimit limit);
  void choose_what_fits();
  void dry_run(Communicator& comm, ControlChannel& control);
  void make_pipeline();
  void open_metrics();
  void open_saver();
  [[nodiscard]] std::string describe_ranks(Collectives& job, const JobLayout& layout) const;
  void describe(const JobLayout& layout, const std::string& ranks) const;
  void steps();
  void one_step();
  [[nodiscard]] std::filesystem::path last_resumable() const;
  [[nodiscard]] bool asked_anywhere();
  void validate(std::int64_t samples);
  // On rank 0, at the end.
  void print_summary() const;
  void print_head() const;
  void print_losses() const;
  void print_speed() const;
  void print_files() const;

  Communicator& world_;
  const TrainOptions& options_;
  StopRequest& stop_;
  ScheduleChoice choice_;
  TransformerConfig model_;  // that of the options, with what --recompute auto chose
  TrainData data_;
  PipelineOptions pipeline_options_;
  std::unique_ptr<Pipeline> pipeline_;
  RunStart start_;
  std::optional<StepReports> reports_;
  std::optional<LastSteps> last_steps_;
  std::optional<Checkpointer> saver_;
  bool stopped_ = false;
};

// A step's messages between stages, [samples, context, width] there and back, and a rank's part of
// the gradients.
void set_traffic(PipelineOptions& options, const TransformerConfig& model, int ranks) {
  const PipelineOptions::Shape& shape = options.shape;
  const double samples = static_cast<double>(shape.batch_size) / shape.replicas;
  options.expert.edge_bytes = 2 * static_cast<double>(size_of(model.stream_precision)) * samples *
                              model.context * model.width;
  options.expert.gradient_bytes =
      sizeof(float) * static_cast<double>(parameter_count(model)) * shape.replicas / ranks;
}

// Sizes that always give the same order, in which a host's ranks hold whole stages if they can.
void keep_replicas_together(PipelineOptions::Expert& expert) {
  expert.edge_bytes = 0;
  expert.gradient_bytes = 1;
}

void print_row(const char* name, const std::string& text) {
  fmt::print("  {:<18} {}\n", name, text);
}

void Training::print_head() const {
  if (!stopped_) {
    fmt::print("\nDone: {} step{}\n", options_.steps, options_.steps == 1 ? "" : "s");
    return;
  }
  std::string saved;
  if (!saver_) {
    saved = "; nothing is saved";
  } else if (!options_.checkpoint.weights_only) {
    saved = fmt::format("; resume with --resume {} (or auto)", options_.save);
  }
  fmt::print("\nstopped as asked after step {}{}\n", pipeline_->step(), saved);
}

void Training::print_losses() const {
  const char* unit = data_.file->format() == TokenFormat::kText ? "byte" : "token";
  const auto in_units = [&](double nats) {
    return fmt::format("{:.4f} nats, {:.4f} bits per {}", nats, nats / std::log(2.0), unit);
  };
  if (reports_->sums().steps > 0) print_row("training loss", in_units(reports_->train_loss()));
  if (reports_->validation_loss() && !stopped_) {
    const std::int64_t samples = data_.last_validation, windows = data_.windows;
    print_row("validation loss",
              in_units(*reports_->validation_loss()) +
                  (samples < windows ? fmt::format(" ({} of {} windows)", samples, windows) : ""));
  }
  if (!reports_->skipped().empty()) {
    print_row("skipped steps",
              fmt::format("{}: the loss or a gradient was not finite", reports_->skipped().size()));
  }
}

// Beside what the run measured.
void print_promise(const StepPromise& promise, const StepReports::Sums& sums) {
  const auto steps = static_cast<double>(sums.steps);
  std::string text = fmt::format("bubble {:.1f} % promised by {}, {:.1f} % measured",
                                 100 * promise.bubble, promise.source, 100 * sums.bubble / steps);
  if (promise.milliseconds > 0) {
    text += fmt::format("; step {:.4g} ms promised, {:.4g} ms measured", promise.milliseconds,
                        1000 * sums.seconds / steps);
  }
  print_row("schedule", text);
}

void Training::print_speed() const {
  const StepReports::Sums& sums = reports_->sums();
  if (sums.steps == 0) return;
  print_row("speed", fmt::format("{:.0f} tokens/s", sums.tokens / sums.seconds));
  const int ranks = world_.local_size(), cores = host_cores();
  const bool sliced = ranks > cores;
  print_row("bubble",
            fmt::format("{:.1f} % measured, {:.1f} % ideal{}",
                        100 * sums.bubble / static_cast<double>(sums.steps),
                        100 * PipelineAccess::layout(*pipeline_).plans.bubble_ideal,
                        sliced ? fmt::format(" (measured includes time-slicing: {} ranks share {} "
                                             "cores)",
                                             ranks, cores)
                               : ""));
  if (choice_.promise) print_promise(*choice_.promise, sums);
}

void Training::print_files() const {
  if (saver_) {
    print_row("weights",
              (std::filesystem::path(options_.save) / saver_->last_save().filename()).string());
    if (!options_.checkpoint.weights_only && !stopped_) {
      print_row("to go on", fmt::format("train --resume {} --steps N (N above {})", options_.save,
                                        options_.steps));
    }
  }
  if (!options_.metrics.empty()) print_row("metrics", options_.metrics);
  if (stopped_ || options_.trace.empty()) return;
  print_row("trace", options_.trace + " (open it at ui.perfetto.dev)");
  if (world_.size() == 1) return;
  print_row("trace clock", fmt::format("ranks agree with rank 0 within {:.0f} us",
                                       std::ceil(last_steps_->clock_error() * 1e6)));
}

void Training::print_summary() const {
  print_head();
  print_losses();
  print_speed();
  print_files();
  if (stopped_) return;
  fmt::print("{}", last_steps_->operators(reports_->card()));
}

Training::Training(Communicator& world, const TrainOptions& options, StopRequest& stop)
    : world_(world), options_(options), stop_(stop), model_(options.model) {}

Training::~Training() { stop_.set_saver(nullptr); }

void Training::run() {
  if (!prepare()) return;
  make_pipeline();
  steps();
  if (!stopped_) {
    last_steps_->sum_operators();
    if (data_.last_validation > 0) validate(data_.last_validation);
    if (!options_.trace.empty()) last_steps_->write_timeline(layers_of_profile());
  }
  pipeline_->close();
  if (first()) print_summary();
}

// Whether there is something to train. All that can be refused before memory is taken is.
bool Training::prepare() {
  const std::unique_ptr<Communicator> comm = world_.duplicate();
  ControlChannel control(*comm);
  bool complete = false;
  guarded(control, world_.rank(), [&] {
    Collectives job(*comm, 0, &control);
    require_same_options(job);
    complete = already_complete(options_, job);
    if (complete) {
      if (first()) tidy_complete_run(options_);
      return;
    }
    if (options_.resume.from) require_steps_left(options_, options_.resume.from->step);
    choice_ = choose_schedule(options_, pipeline_depth(), job);
  });
  if (complete) {
    if (first()) {
      fmt::print("already complete: {} has done all {} steps\n", options_.save, options_.steps);
    }
    return false;
  }
  guarded(control, world_.rank(), [&] {
    Collectives job(*comm, 0, &control);
    data_ = open_data(options_, job);
  });
  guarded(control, world_.rank(), [&] {
    if (first()) require_writable_outputs(options_);
  });
  plan_pipeline();
  if (options_.recompute.automatic) guarded(control, world_.rank(), [&] { choose_what_fits(); });
  if (!options_.dry_run) return true;
  dry_run(*comm, control);
  require_stdout();
  return false;
}

// One process plans the job that the options say.
int Training::job_ranks() const {
  const PipelineOptions::Shape& shape = options_.pipeline.shape;
  if (!options_.dry_run || world_.size() > 1) return world_.size();
  const std::int64_t most = std::numeric_limits<int>::max();
  const std::int64_t ranks = std::int64_t{std::max(shape.pipeline, 1)} * shape.replicas;
  return static_cast<int>(std::min(std::min(ranks, most) * shape.tensor, most));
}

// A size that cannot work ends here.
int Training::pipeline_depth() const {
  const PipelineOptions::Shape& shape = options_.pipeline.shape;
  const int depth = shape.pipeline > 0 ? shape.pipeline
                                       : std::max(job_ranks() / shape.replicas / shape.tensor, 1);
  if (job_ranks() == world_.size()) {
    (void)make_topology(world_.size(),
                        {.pipeline = depth, .replica = shape.replicas, .tensor = shape.tensor},
                        shape.rank_order);
  }
  return depth;
}

// Whether a host's directory must hold whole stages.
bool Training::keeps_replicas_together() const {
  return options_.checkpoint.local && options_.pipeline.shape.replicas > 1;
}

LayerTable Training::layers() const { return {choice_.partition.first, layer_times(model_)}; }

LayerTable Training::layers_of_profile() {
  const RankPlace& place = PipelineAccess::layout(*pipeline_).place;
  const PipelineOptions::Shape& shape = options_.pipeline.shape;
  LayerTable table = layers();
  table.tensor_ranks = place.topology.size.tensor;
  table.tensor_shards = place.shards;
  PipelineAccess::guarded(*pipeline_, [&] {
    table.collectives =
        layer_collectives(model_, place.shards, shape.sequence_parallel,
                          data_.source->input_specs(shape.micro_batch_size), pipeline_->compute());
  });
  return table;
}

StageFactory Training::stages(const TransformerConfig& config) const {
  return [this, model = Transformer(config)](const StagePlace& place) {
    return model.stage_of(choice_.partition, place.stage, place.shards_here());
  };
}

void Training::require_same_options(Collectives& job) const {
  OptionValues values = options_.pipeline.expert.configuration;
  if (options_.resume.automatic) {
    values.emplace_back("saves in " + options_.save, options_.resume.from ? "found" : "none");
  }
  require_same_configuration(job, values);
}

void Training::plan_pipeline() {
  pipeline_options_ = options_.pipeline;
  pipeline_options_.expert.evaluations = evaluation_sizes(options_, data_);
  pipeline_options_.order.given = choice_.order;
  pipeline_options_.shape.pipeline = pipeline_depth();
  set_traffic(pipeline_options_, options_.model, job_ranks());
  if (keeps_replicas_together()) keep_replicas_together(pipeline_options_.expert);
  if (first() && !choice_.remark.empty()) fmt::print("{}\n", choice_.remark);
}

// Collective.
JobLayout Training::planned(const TransformerConfig& model, const PipelineOptions& options,
                            MemoryLimit limit) {
  return PipelineAccess::plan_layout(world_, options, stages(model), *data_.source, limit);
}

void Training::choose_what_fits() {
  RecomputeChoice chosen =
      choose_recompute(model_, choice_.partition, pipeline_options_,
                       [&](const TransformerConfig& model, const PipelineOptions& options) {
                         return planned(model, options, MemoryLimit::kIsIgnored);
                       });
  model_ = std::move(chosen.model);
  pipeline_options_.offload = std::move(chosen.offload);
  if (first()) fmt::print("{}\n", chosen.remark);
}

// Collective. Of the slowest group of tensor ranks; all 0 where none shares a stage.
CollectiveCosts measure_tensor_ranks(Collectives& job, const RankPlace& place, int threads,
                                     ControlChannel& control) {
  CollectiveCosts slowest;
  if (place.topology.size.tensor == 1) return slowest;
  const auto group = job.communicator().split(
      place.topology.group_number(Axis::kTensor, place.here), place.here.tensor);
  Collectives ranks(*group, 0, &control);
  ranks.sums().set_hosts(place.hosts_of(place.topology.group(Axis::kTensor, place.here)));
  std::vector<CollectiveCosts> all(static_cast<std::size_t>(job.communicator().size()));
  ComputeContext compute(Device{}, threads);
  job.all_gather(measure_collectives(job, ranks, compute, kCollectiveSeconds), all);
  for (const CollectiveCosts& each : all) slowest = slower(slowest, each);
  return slowest;
}

void Training::dry_run(Communicator& comm, ControlChannel& control) {
  // What does not fit is refused below, after what would.
  const JobLayout layout = planned(model_, pipeline_options_, MemoryLimit::kIsIgnored);
  const std::string fit =
      describe_fit(model_, pipeline_options_, layout,
                   [&](const TransformerConfig& model, const PipelineOptions& options) {
                     return planned(model, options, MemoryLimit::kIsIgnored);
                   });
  std::string ranks;
  CollectiveCosts costs;
  guarded(control, world_.rank(), [&] {
    Collectives job(comm, 0, &control);
    ranks = describe_ranks(job, layout);
    if (job_ranks() == world_.size() && !uses_nccl(layout.wires.tensor)) {
      // It measures the host's.
      costs = measure_tensor_ranks(job, layout.place, options_.pipeline.devices.threads, control);
    }
    if (first()) require_room(options_, layout);
    start_ = plan_start(layout, options_, data_.identity, /*reads_save=*/first());
  });
  if (first()) {
    describe(layout, ranks);
    fmt::print("{}{}", describe_shared_calls(layout, costs), fit);
    std::fflush(stdout);
  }
  (void)planned(model_, pipeline_options_, MemoryLimit::kHolds);
  if (!first()) return;
  if (job_ranks() == world_.size()) return;
  fmt::print(
      "planned in one process: {} ranks, each with a device like this one's; memory of hosts was "
      "not compared\n",
      job_ranks());
}

void Training::make_pipeline() {
  pipeline_ = std::make_unique<Pipeline>(world_, stages(model_), *data_.source, pipeline_options_);
  start_ = load_start(*pipeline_, options_, data_.identity);
  reports_.emplace(*pipeline_, world_, options_, start_.skipped);
  open_metrics();
  open_saver();
  const JobLayout& layout = PipelineAccess::layout(*pipeline_);
  const std::string ranks = describe_ranks(PipelineAccess::world(*pipeline_), layout);
  if (first()) describe(layout, ranks);
}

void Training::open_metrics() {
  PipelineAccess::guarded(*pipeline_, [&] {
    if (!first() || options_.metrics.empty()) return;
    nlohmann::ordered_json run;
    for (const auto& [key, value] : options_.pipeline.expert.configuration) {
      run["options"][key] = value;
    }
    run["layers"] = parse_ordered_json(to_json_text(layers()));
    run["ranks"] = world_.size();
    run["kernels"] = kernel_set();
    run["matmul"] = matmul_library();
    run["mpi"] = mpi_info().library;
    reports_->open_metrics(dump_json(run, -1, InvalidUtf8::replace),
                           start_.resumed ? std::optional(start_.resumed->step) : std::nullopt);
  });
}

void Training::open_saver() {
  if (options_.save.empty()) {
    PipelineAccess::set_step_flags(*pipeline_, [this] { return stop_.asked() ? 1U : 0U; });
    return;
  }
  CheckpointOptions checkpoint;
  PipelineAccess::guarded(*pipeline_, [&] {
    checkpoint = checkpoint_options(options_, data_, start_, /*writes=*/first());
  });
  saver_.emplace(*pipeline_, std::move(checkpoint),
                 [this](const std::string& line) { reports_->note(line); });
  stop_.set_saver(&*saver_);
  PipelineAccess::guarded(*pipeline_, [&] {
    const std::string remark = first() ? write_options(options_) : "";
    if (!remark.empty()) reports_->note(remark);
  });
}

// Collective. Where each rank runs, and its place; empty for one rank.
std::string Training::describe_ranks(Collectives& job, const JobLayout& layout) const {
  if (world_.size() == 1) return "";
  const std::string reason = keeps_replicas_together() && !layout.place.order_reason.empty()
                                 ? "the replicas of a stage share hosts, as --save-local needs"
                                 : layout.place.order_reason;
  return (reason.empty() ? "" : fmt::format("  order of ranks: {}\n", reason)) +
         gather_rank_table(job, layout, options_.pipeline.devices.threads, "  ");
}

// A job that is refused has not come here, and prints only its error.
void Training::describe(const JobLayout& layout, const std::string& ranks) const {
  fmt::print("{}{}{}{}", describe_configuration(options_.pipeline.expert.configuration),
             describe_layout(layout, choice_.partition), ranks, describe_start(start_, options_));
  if (options_.save.empty() && !options_.dry_run) fmt::print("nothing is saved: give --save DIR\n");
  std::fflush(stdout);
}

// The newest save that a run can go on from, where this rank knows it.
std::filesystem::path Training::last_resumable() const {
  return saver_ && !options_.checkpoint.weights_only ? saver_->last_save()
                                                     : std::filesystem::path();
}

void Training::steps() {
  reports_->begin(last_resumable());
  last_steps_.emplace(*pipeline_, options_);
  while (pipeline_->step() < options_.steps && !stopped_) one_step();
  reports_->steps_done();
  if (saver_) saver_->save_now();
  reports_->saved(last_resumable());
  reports_->end();
}

void Training::one_step() {
  stop_.describe(pipeline_->step() + 1, saver_ ? saver_->last_save() : std::filesystem::path());
  last_steps_->before_step();
  const StepReport step = pipeline_->train_step();
  last_steps_->after_step(step);
  reports_->step(step);
  const bool last = step.step == options_.steps;
  if (options_.validate_every > 0 && step.step % options_.validate_every == 0 && !last) {
    validate(data_.between_validation);
  }
  if (saver_) {
    saver_->after_step(step);
    reports_->saved(last_resumable());
  }
  const bool asked =
      saver_ ? saver_->stop_requested() : PipelineAccess::step_flags(*pipeline_) != 0;
  stopped_ = asked && !last;
}

// Collective. Whether a signal asked any rank to stop.
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
  const auto goes_on = [&](std::int64_t done) {
    const bool stop = asked_anywhere();
    reports_->validation(stop ? samples : done, samples);
    return !stop;
  };
  reports_->validated(sluice::validate(*pipeline_, *data_.source, samples,
                                       validation_part(options_.pipeline.shape), goes_on),
                      samples);
}

}  // namespace

int train_command(const std::vector<std::string>& arguments) {
  constexpr int kStopped = 12;  // the exit code of a run that was asked to stop
  TrainOptions options;
  bool stopped = false;
  StopRequest stop;
  const int code = run_command(
      "train",
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
        Training training(world, options, stop);
        training.run();
        stopped = training.stopped();
      });
  return code == 0 && stopped ? kStopped : code;
}

}  // namespace sluice
