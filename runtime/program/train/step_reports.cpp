#include "runtime/program/train/step_reports.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "comm/base/cores.hpp"
#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/process/process.hpp"

namespace sluice {
namespace {

constexpr std::uint64_t kLastSteps = 4;

}  // namespace

StepReports::StepReports(Pipeline& pipeline, Communicator& world, const TrainOptions& options,
                         std::vector<std::uint64_t> skipped)
    : pipeline_(pipeline), world_(world), options_(options), skipped_(std::move(skipped)) {}

void StepReports::open_metrics(const std::string& run, std::optional<std::uint64_t> resumed) {
  metrics_.emplace(options_.metrics, run, resumed);
}

void StepReports::begin(const std::filesystem::path& save) {
  if (first()) progress_.emplace(pipeline_.step() + 1, options_.steps, terminal_output());
  std::vector<int> work = work_of_ranks();
  PipelineAccess::guarded(pipeline_, [&] {
    const RankPlace& place = PipelineAccess::layout(pipeline_).place;
    gpus_.emplace(PipelineAccess::world(pipeline_), place.devices[at(place.here.pipeline)].machine,
                  place.device());
  });
  if (!first()) return;
  stragglers_.emplace(std::move(work));
  events_.start(pipeline_.step(), save);
}

// Collective. What Stragglers compare: a rank's place in its pipeline.
std::vector<int> StepReports::work_of_ranks() {
  std::vector<int> work;
  PipelineAccess::guarded(pipeline_, [&] {
    const int needed = world_.local_size() * options_.pipeline.devices.threads;
    const bool shares = needed > host_cores();
    const Topology& topology = PipelineAccess::layout(pipeline_).place.topology;
    const auto all = PipelineAccess::world(pipeline_).all_gather_strings(shares ? "shares" : "");
    for (int rank = 0; rank < world_.size(); ++rank) {
      work.push_back(all[at(rank)].empty() ? topology.place_of(rank).pipeline
                                           : Stragglers::kShared);
    }
  });
  return work;
}

void StepReports::step(const StepReport& report) {
  look_for_stragglers();
  read_gpus(report.step);
  if (!report.skipped) train_loss_ = report.loss;
  if (first()) {
    const StepRecord record = record_of(report);
    sums_.seconds += record.seconds;
    sums_.tokens += record.targets;
    sums_.bubble += record.bubble_measured;
    ++sums_.steps;
    progress_->step(record);
    if (metrics_) metrics_->step(record);
    events_.step(record.step, record.seconds);
  }
  if (report.skipped) count_skip(report.step);
}

void StepReports::look_for_stragglers() {
  if (!first()) return;
  for (const Straggler& each : stragglers_->step(PipelineAccess::busy_seconds(pipeline_))) {
    note(fmt::format(
        "rank {} on {} is slow: its actions take {:.2f} times as long as {}, over {} "
        "steps",
        each.rank, PipelineAccess::hosts(pipeline_)[at(each.rank)], each.factor,
        each.of_replicas ? "those of the same stages in other replicas" : "in its first steps",
        Stragglers::kWindow));
  }
}

// After every tenth step of a run with metrics: a driver's answers take a while.
void StepReports::read_gpus(std::uint64_t step) {
  constexpr std::uint64_t kEvery = 10;
  gpu_states_.clear();
  if (options_.metrics.empty() || step % kEvery != 0) return;
  PipelineAccess::guarded(pipeline_, [&] { gpu_states_ = gpus_->read(); });
}

void StepReports::count_skip(std::uint64_t step) {
  skipped_.push_back(step);
  const auto most = static_cast<std::size_t>(options_.max_skips);
  if (skipped_.size() > most) {
    throw_error(ErrorCode::kNumeric,
                "step {}: the loss or a gradient is not finite, and {} steps have been skipped "
                "already, which is all that --max-skips {} allows",
                step, most, most);
  }
  note(fmt::format("step {}: skipped, the loss or a gradient is not finite ({} of at most {})",
                   step, skipped_.size(), most));
}

StepRecord StepReports::record_of(const StepReport& report) const {
  StepRecord record;
  static_cast<StepReport&>(record) = report;
  record.tokens_per_second = report.targets / report.seconds;
  record.flops = record.tokens_per_second * training_flops(options_.model) / options_.model.context;
  const double peak = gpus_->peak(options_.precision);
  if (peak > 0) record.share_of_peak = record.flops / peak;
  record.bubble_ideal = PipelineAccess::layout(pipeline_).plans.bubble_ideal;
  record.stragglers = stragglers_->now();
  record.gpus = gpu_states_;
  return record;
}

void StepReports::steps_done() { progress_.reset(); }

void StepReports::saved(const std::filesystem::path& save) {
  if (first()) events_.save(save);
}

void StepReports::end() {
  if (first()) events_.end(pipeline_.step());
}

void StepReports::note(const std::string& line) {
  if (!first()) return;
  if (progress_) return progress_->note(line);
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

void StepReports::validation(std::int64_t done, std::int64_t samples) {
  if (!first()) return;
  if (!progress_) progress_.emplace(options_.steps, options_.steps, terminal_output());
  progress_->validation(done, samples);
}

void StepReports::validated(std::optional<double> loss, std::int64_t samples) {
  if (!first()) return;
  validation_loss_ = loss;
  const bool last = pipeline_.step() == options_.steps;
  if (last) steps_done();
  if (!loss) return note("validation stopped as asked");
  if (metrics_) metrics_->validation(pipeline_.step(), *loss);
  if (last) return;
  note(fmt::format("step {}: validation loss {:.4f} over {} windows", pipeline_.step(), *loss,
                   samples));
}

LastSteps::LastSteps(Pipeline& pipeline, const TrainOptions& options)
    : pipeline_(pipeline),
      options_(options),
      first_(std::max(pipeline.step(), options.steps - std::min(options.steps, kLastSteps)) + 1) {}

void LastSteps::before_step() {
  if (pipeline_.step() + 1 != first_) return;
  if (!options_.trace.empty()) timeline_.begin(pipeline_);
  if (options_.profile_operators) pipeline_.compute().profile_operators(true);
}

void LastSteps::after_step(const StepReport& step) {
  if (step.step < first_) return;
  if (!options_.trace.empty()) timeline_.add(pipeline_);
  if (!options_.profile_operators) return;
  ++profiled_steps_;
  profiled_seconds_ += step.seconds;
}

void LastSteps::sum_operators() {
  if (!options_.profile_operators) return;
  PipelineAccess::guarded(pipeline_, [&] {
    operators_ =
        sum_operator_times(PipelineAccess::world(pipeline_), pipeline_.compute().operator_times());
    pipeline_.compute().profile_operators(false);
  });
}

void LastSteps::write_timeline(const LayerTable& layers) {
  clock_error_ = timeline_.write(pipeline_, options_.trace, layers);
}

std::string LastSteps::operators(std::optional<CardPeaks> card) const {
  if (profiled_steps_ == 0) return "";
  const int ranks = PipelineAccess::layout(pipeline_).place.topology.ranks();
  return fmt::format("\nOperators (ranks: {}, last steps: {})\n{}", ranks, profiled_steps_,
                     operator_table(operators_, {.steps = profiled_steps_,
                                                 .rank_seconds = profiled_seconds_ * ranks,
                                                 .precision = options_.precision,
                                                 .card = card}));
}

}  // namespace sluice
