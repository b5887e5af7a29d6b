#include "runtime/train/training.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "comm/mpi/mpi_session.hpp"
#include "runtime/job/configuration.hpp"
#include "runtime/options/process.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/report/layout_report.hpp"
#include "runtime/report/rank_table.hpp"
#include "runtime/train/run_files.hpp"
#include "runtime/train/run_summary.hpp"
#include "runtime/train/validation.hpp"
#include "stages/cpu/cpu_report.hpp"

namespace sluice {
namespace {

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

}  // namespace

Training::Training(Communicator& world, const TrainOptions& options, StopRequest& stop)
    : world_(world), options_(options), stop_(stop) {}

Training::~Training() { stop_.set_saver(nullptr); }

void Training::run() {
  if (!prepare()) return;
  make_pipeline();
  steps();
  if (!stopped_) {
    last_steps_->sum_operators();
    if (data_.last_validation > 0) validate(data_.last_validation);
    last_steps_->write_timeline(layers());
  }
  pipeline_->close();
  if (!first()) return;
  print_summary({.options = options_,
                 .data = data_,
                 .choice = choice_,
                 .reports = *reports_,
                 .last_steps = *last_steps_,
                 .world = world_,
                 .pipeline = *pipeline_,
                 .stopped = stopped_,
                 .save = saver_ ? std::optional(saver_->last_save()) : std::nullopt});
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
  if (!options_.dry_run) return true;
  dry_run(*comm, control);
  require_stdout();
  return false;
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

// Whether a host's directory must hold whole stages.
bool Training::keeps_replicas_together() const {
  return options_.checkpoint.local && options_.pipeline.shape.replicas > 1;
}

LayerTable Training::layers() const {
  return {choice_.partition.first, layer_times(options_.model)};
}

StageFactory Training::stages() const {
  return [this, model = Transformer(options_.model)](int stage, int) {
    return model.stage_of(choice_.partition, stage);
  };
}

void Training::require_same_options(Collectives& job) const {
  OptionValues values = options_.pipeline.checks.configuration;
  if (options_.resume.automatic) {
    values.emplace_back("saves in " + options_.save, options_.resume.from ? "found" : "none");
  }
  require_same_configuration(job, values);
}

void Training::plan_pipeline() {
  pipeline_options_ = options_.pipeline;
  pipeline_options_.training.evaluations = evaluation_sizes(options_, data_);
  pipeline_options_.order.given = choice_.order;
  pipeline_options_.shape.pipeline = pipeline_depth();
  set_traffic(pipeline_options_.shape, options_.model, job_ranks());
  if (keeps_replicas_together()) keep_replicas_together(pipeline_options_.shape);
  if (first() && !choice_.remark.empty()) fmt::print("{}\n", choice_.remark);
}

void Training::dry_run(Communicator& comm, ControlChannel& control) {
  const JobLayout layout =
      PipelineAccess::plan_layout(world_, pipeline_options_, stages(), *data_.source);
  std::string ranks;
  guarded(control, world_.rank(), [&] {
    Collectives job(comm, 0, &control);
    ranks = describe_ranks(job, layout);
    if (first()) require_room(options_, layout);
    start_ = plan_start(layout, options_, data_.identity, /*reads_save=*/first());
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
  pipeline_ = std::make_unique<Pipeline>(world_, pipeline_options_, stages(), *data_.source);
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
    for (const auto& [key, value] : options_.pipeline.checks.configuration) {
      run["options"][key] = value;
    }
    run["layers"] = nlohmann::ordered_json::parse(to_json_text(layers()));
    run["ranks"] = world_.size();
    run["kernels"] = kernel_set();
    run["matmul"] = matmul_library();
    run["mpi"] = mpi_info().library;
    reports_->open_metrics(run.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
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
  fmt::print("{}{}{}{}", describe_configuration(options_.pipeline.checks.configuration),
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
  reports_->validated(
      sluice::validate(*pipeline_, *data_.source, samples, part_of_validation(options_), goes_on),
      samples);
}

}  // namespace sluice
