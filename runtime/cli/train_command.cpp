// `sluice train`: data, pipeline, steps, validation, reports, weights, summary.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include <sluice/checkpoint.hpp>
#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>
#include <sluice/program.hpp>

#include "comm/base/cores.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/mpi/mpi_session.hpp"
#include "runtime/checkpoint/weights.hpp"
#include "runtime/cli/commands.hpp"
#include "runtime/cli/layout_report.hpp"
#include "runtime/cli/model_config.hpp"
#include "runtime/cli/schedule_choice.hpp"
#include "runtime/cli/train_options.hpp"
#include "runtime/files/atomic_file.hpp"
#include "runtime/files/writable.hpp"
#include "runtime/job/configuration.hpp"
#include "runtime/job/guard.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/options/process.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/report/metrics.hpp"
#include "runtime/report/timeline.hpp"
#include "stages/cpu/cpu_report.hpp"

namespace sluice {
namespace {

// Steps at the end of a run that go into the trace.
constexpr std::uint64_t kTracedSteps = 4;
// Windows of a validation between steps, unless --validation-samples is given.
constexpr std::int64_t kQuickValidation = 64;

struct Sums {
  double seconds = 0, tokens = 0, bubble = 0;
  std::uint64_t steps = 0;
};

class Training {
 public:
  Training(const MpiInfo& machine, Communicator& world, const TrainOptions& options)
      : machine_(machine), world_(world), options_(options) {}

  void run();

 private:
  [[nodiscard]] bool first() const { return world_.rank() == 0; }
  [[nodiscard]] const OptionValues& resolved() const {
    return options_.pipeline.checks.configuration;
  }
  void open_data(Communicator& comm, ControlChannel& control);
  void open_metrics();
  void plan_evaluations();
  void dry_run(ControlChannel& control);
  void make_pipeline();
  void require_a_batch() const;
  void require_writable_outputs() const;
  void require_steps_left(std::uint64_t done) const;
  [[nodiscard]] StageFactory stages() const;
  void describe(const JobLayout& layout) const;
  void steps();
  void one_step(Progress& progress);
  void validate(std::int64_t samples, Progress* progress);
  void save();
  void summarise();
  StepRecord record_of(const StepReport& report) const;

  const MpiInfo& machine_;
  Communicator& world_;
  const TrainOptions& options_;
  ScheduleChoice choice_;
  std::shared_ptr<TokenFile> file_;
  std::unique_ptr<DataSource> source_;
  PipelineOptions pipeline_options_;
  std::unique_ptr<Pipeline> pipeline_;
  std::optional<MetricsWriter> metrics_;
  Timeline timeline_;
  std::int64_t quick_samples_ = 0, all_samples_ = 0;
  std::optional<double> validation_loss_;
  double train_loss_ = 0;
  Sums sums_;
};

void Training::run() {
  {
    const std::unique_ptr<Communicator> comm = world_.duplicate();
    ControlChannel control(*comm);
    guarded(control, world_.rank(), [&] {
      Collectives collectives(*comm, 0, &control);
      require_same_configuration(collectives, resolved());
      const PipelineOptions::Shape& shape = options_.pipeline.shape;
      const Topology topology = make_topology(
          world_.size(),
          shape.pipeline > 0 ? shape.pipeline : std::max(world_.size() / shape.replicas, 1),
          shape.replicas, shape.rank_order);
      choice_ = choose_schedule(options_, topology.pipeline, collectives);
    });
    open_data(*comm, control);
    guarded(control, world_.rank(), [&] { require_writable_outputs(); });
    plan_evaluations();
    if (options_.dry_run) return dry_run(control);
  }
  make_pipeline();
  steps();
  if (!options_.save.empty()) save();
  if (!options_.trace.empty()) timeline_.write(*pipeline_, options_.trace);
  pipeline_->close();
  if (first()) summarise();
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
    if (file_->train_size() == file_->size() &&
        (options_.validation_samples > 0 || options_.validate_every > 0)) {
      throw_usage(
          "option --validation-share: {} of {} tokens leaves nothing for "
          "--validation-samples or --validate-every; give a larger share or "
          "leave them out",
          options_.validation_share, file_->size());
    }
    source_ = make_token_source(file_, options_.model.context, options_.model.vocabulary,
                                options_.pipeline.training.seed);
    require_a_batch();
    all_samples_ = options_.validation_samples > 0
                       ? options_.validation_samples
                       : validation_samples(*file_, options_.model.context);
    quick_samples_ =
        options_.validation_samples > 0 ? all_samples_ : std::min(all_samples_, kQuickValidation);
  });
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

// Called before anything is computed. It changes no file, because the run may still be refused.
void Training::require_writable_outputs() const {
  if (!first()) return;
  if (!options_.trace.empty()) require_writable_file(options_.trace);
  if (!options_.metrics.empty()) require_writable_file(options_.metrics);
  if (!options_.save.empty()) require_writable_directory(options_.save);
}

void Training::open_metrics() {
  PipelineAccess::guarded(*pipeline_, [&] {
    if (!first() || options_.metrics.empty()) return;
    nlohmann::ordered_json run;
    for (const auto& [key, value] : resolved()) run["options"][key] = value;
    run["ranks"] = world_.size();
    run["kernels"] = kernel_set();
    run["matmul"] = matmul_library();
    run["mpi"] = machine_.library;
    metrics_.emplace(options_.metrics,
                     run.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
                     !options_.resume.empty());
  });
}

void Training::plan_evaluations() {
  std::vector<std::int64_t> evaluations;
  if (all_samples_ > 0) {
    evaluations.push_back(all_samples_);
    if (options_.validate_every > 0 && quick_samples_ != all_samples_) {
      evaluations.push_back(quick_samples_);
    }
  }
  pipeline_options_ = options_.pipeline;
  pipeline_options_.training.evaluations = std::move(evaluations);
  pipeline_options_.order.given = choice_.order;
  if (first() && !choice_.remark.empty()) fmt::print("{}\n", choice_.remark);
}

StageFactory Training::stages() const {
  return [this](int stage, int) {
    return make_transformer_stage(options_.model, choice_.partition, stage);
  };
}

// Nothing is printed before this, so a job that is refused prints only its error.
void Training::describe(const JobLayout& layout) const {
  fmt::print("{}{}", describe_configuration(resolved()),
             describe_layout(layout, choice_.partition));
  std::fflush(stdout);
}

void Training::dry_run(ControlChannel& control) {
  const JobLayout layout =
      PipelineAccess::plan_layout(world_, pipeline_options_, stages(), *source_);
  guarded(control, world_.rank(), [&] {
    if (!first() || options_.resume.empty()) return;
    require_steps_left(require_fitting_checkpoint(layout, options_.resume));
  });
  if (first()) describe(layout);
}

void Training::make_pipeline() {
  pipeline_ = std::make_unique<Pipeline>(world_, pipeline_options_, stages(), *source_);
  if (!options_.resume.empty()) {
    load_checkpoint(*pipeline_, options_.resume);
    PipelineAccess::guarded(*pipeline_, [&] { require_steps_left(pipeline_->step()); });
  }
  open_metrics();
  if (first()) describe(PipelineAccess::layout(*pipeline_));
}

void Training::require_steps_left(std::uint64_t done) const {
  if (done < options_.steps) return;
  throw_usage(
      "option --steps: '{}' has done {} steps already, --steps {} leaves "
      "nothing to do; choose at least {}",
      options_.resume, done, options_.steps, done + 1);
}

void Training::steps() {
  Progress progress(pipeline_->step() + 1, options_.steps, terminal_output());
  while (pipeline_->step() < options_.steps) {
    one_step(progress);
    const std::uint64_t step = pipeline_->step();
    const bool last = step == options_.steps;
    if (options_.validate_every > 0 && step % options_.validate_every == 0 && !last) {
      validate(quick_samples_, first() ? &progress : nullptr);
    }
    if (options_.save_every > 0 && step % options_.save_every == 0 && !last) save();
  }
  if (first()) progress.finish();
  if (all_samples_ > 0) validate(all_samples_, nullptr);
}

void Training::one_step(Progress& progress) {
  const StepReport report = pipeline_->train_step();
  if (!options_.trace.empty() && report.step + kTracedSteps > options_.steps) {
    timeline_.add(*pipeline_);
  }
  train_loss_ = report.loss;
  if (!first()) return;
  const StepRecord record = record_of(report);
  sums_.seconds += record.seconds;
  sums_.tokens += static_cast<double>(record.tokens);
  sums_.bubble += record.bubble_measured;
  ++sums_.steps;
  progress.step(record);
  if (metrics_) metrics_->step(record);
}

StepRecord Training::record_of(const StepReport& report) const {
  StepRecord record;
  record.step = report.step;
  record.loss = report.loss;
  record.tokens = static_cast<std::int64_t>(report.targets);
  record.seconds = report.seconds;
  record.tokens_per_second = report.targets / report.seconds;
  record.grad_norm = report.grad_norm;
  record.learning_rate = report.learning_rate;
  record.bubble_measured = report.bubble_measured;
  record.bubble_ideal = PipelineAccess::layout(*pipeline_).plans.bubble_ideal;
  record.peak_in_flight = report.peak_in_flight;
  record.peak_bytes = report.peak_bytes;
  return record;
}

void Training::validate(std::int64_t samples, Progress* progress) {
  validation_loss_ = pipeline_->evaluate(samples);
  if (!first()) return;
  if (metrics_) metrics_->validation(pipeline_->step(), *validation_loss_);
  if (progress != nullptr) {
    progress->note(fmt::format("step {}: validation loss {:.4f} over {} windows", pipeline_->step(),
                               *validation_loss_, samples));
  }
}

void Training::save() {
  save_checkpoint(*pipeline_, options_.save, model_config_text(options_.model, resolved()));
  PipelineAccess::guarded(*pipeline_, [&] {
    if (!first()) return;
    AtomicFile file(std::filesystem::path(options_.save) / "options.conf");
    file.write(to_config_text(resolved()));
    file.commit();
  });
}

void Training::summarise() {
  const bool bytes = file_->format() == TokenFormat::kText;
  const char* unit = bytes ? "byte" : "token";
  const auto line = [&](const char* name, double nats) {
    fmt::print("  {:<18} {:.4f} nats, {:.4f} bits per {}\n", name, nats, nats / std::log(2.0),
               unit);
  };
  fmt::print("\nDone: {} step{}\n", options_.steps, options_.steps == 1 ? "" : "s");
  if (sums_.steps > 0) line("training loss", train_loss_);
  if (validation_loss_) line("validation loss", *validation_loss_);
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
  }
  const auto path = [](const char* name, const std::string& where) {
    if (!where.empty()) fmt::print("  {:<18} {}\n", name, where);
  };
  path("weights", options_.save);
  path("metrics", options_.metrics);
  path("trace", options_.trace.empty() ? "" : options_.trace + " (open it at ui.perfetto.dev)");
}

}  // namespace

int train_command(int argc, char** argv) {
  TrainOptions options;
  return run_command(
      "train", argc, argv,
      [&] {
        options = parse_train_options({argv, argv + argc});
        return options.help;
      },
      [&](Communicator& world) { Training(mpi_info(), world, options).run(); });
}

}  // namespace sluice
