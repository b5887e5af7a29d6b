#include "runtime/pipeline/training_steps.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "comm/base/index.hpp"
#include "comm/base/steady_seconds.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/data/batch_shape.hpp"
#include "runtime/group/configuration.hpp"
#include "stages/compute/thread_team.hpp"

namespace sluice {

TrainingSteps::TrainingSteps(PipelineParts& parts, PipelineCalls& calls)
    : parts_(parts), calls_(calls), step_(parts.step) {
  if (parts.options.training.inference) return;
  const ActivityScope setting_up(*parts.job.activity, Doing::kSettingUp);
  parts.job.guarded([&] {
    const ThreadTeam team(*parts.compute);
    prepare();
  });
}

void TrainingSteps::prepare() {
  if (parts_.batches.own == nullptr) {
    parts_.rethrow_oom_with_plan("the batches", [&] {
      loader_ = std::make_unique<BatchLoader>(
          *parts_.batches.source, Phase::kTrain, parts_.layout.plans.micro_batches,
          parts_.layout.owns(0), parts_.layout.owns(parts_.layout.plans.num_stages() - 1),
          parts_.compute->device());
    });
  }
  parts_.rethrow_oom_with_plan("the buffers of stages", [&] {
    stage_buffers_ = std::make_unique<StageBuffers>(parts_.job, *parts_.compute, *parts_.mirror,
                                                    parts_.bindings);
  });
  parts_.rethrow_oom_with_plan("the optimizer", [&] {
    gradients_ = std::make_unique<GradientSync>(
        parts_.job, parts_.layout, parts_.options, *parts_.compute, parts_.nccl.get(),
        *parts_.mirror, *parts_.tied, *stage_buffers_, parts_.bindings, step_);
  });
  gradients_->clear();
  parts_.compute->wait();
  parts_.job.world.collectives->barrier();
}

void TrainingSteps::require_training() const {
  calls_.require_open();
  if (parts_.options.training.inference) throw_usage("an inference pipeline does not train");
}

// All ranks throw it: they made the same calls before.
void TrainingSteps::require_no_gradients() const {
  if (!step_.gradients_ready) return;
  throw_usage(
      "a step is complete: optimizer_step() or drop_gradients() comes before other batches");
}

void TrainingSteps::cut_step() {
  const RankPlace& place = parts_.layout.place;
  const std::span<const std::int64_t> shares = parts_.feed->shares();
  const std::int64_t size = parts_.layout.wires.edges.largest().samples;
  const std::int64_t planned = parts_.layout.plans.train.micro_batches / place.shares;
  const std::int64_t most = *std::max_element(shares.begin(), shares.end());
  const std::int64_t pieces = (most + size - 1) / size;
  if (pieces > planned) {
    throw_usage(
        "a batch of {} samples for a {}; this pipeline was made for at most {}: {} micro-batches "
        "of {} (PipelineOptions::Shape){}",
        most, place.name_of_part(), planned * size, planned, size,
        place.shares == 1 ? "; accumulate() takes several batches a step" : "");
  }
  const auto least = std::min_element(shares.begin(), shares.end());
  if (*least < pieces) {
    throw_usage(
        "{0} {1} has {2} samples, but another one's {3} make {4} micro-batches of {5}; all need "
        "the same number of micro-batches",
        place.name_of_part(), least - shares.begin(), *least, most, pieces, size);
  }
  step_.ranges.clear();
  for (int i = 0; i < place.shares; ++i) {
    const SampleRange share = parts_.feed->share(place.here.replica * place.shares + i);
    cut_samples({step_.earlier.samples + share.first, share.count}, size, pieces, step_.ranges);
  }
  parts_.training.plan(static_cast<int>(step_.ranges.size()));
}

double TrainingSteps::count_targets(const BatchLoader::Batch& batch) {
  return parts_.check_batch(batch, step_.ranges, step_.earlier.samples, /*targets=*/true,
                            parts_.layout.place.shares);
}

// Each call brings samples of all virtual replicas, whose gradients stay apart until the step ends.
void TrainingSteps::require_accumulable() const {
  const RankPlace& place = parts_.layout.place;
  if (place.shares == 1) return;
  throw_usage(
      "accumulate() with {} virtual replicas on {} replica{}, each of which would need gradients "
      "of its own; legal: as many virtual replicas as replicas, or one batch a step",
      place.virtual_replicas(), place.topology.size.replica,
      place.topology.size.replica == 1 ? "" : "s");
}

StepReport TrainingSteps::train_step() {
  require_training();
  if (loader_ == nullptr) {
    throw_usage("this pipeline was made from a BatchSpec and has no source: pass a batch");
  }
  require_no_gradients();
  const BatchLoader::Batch* batch = nullptr;
  calls_.guarded([&] {
    const ActivityScope loading(*parts_.job.activity, Doing::kLoading);
    batch = &loader_->load(step_.done + 1, parts_.job.world.watch.get());
  });
  step_.ranges.assign(parts_.layout.plans.micro_batches.begin(),
                      parts_.layout.plans.micro_batches.end());
  for (SampleRange& range : step_.ranges) range.first += step_.earlier.samples;
  calls_.agree(Call::kTrainSource, nullptr, 0, [this, batch] {
    require_rate();
    step_.targets_here = count_targets(*batch);
  });
  return run_batch(*batch, BatchEnd::kUpdate);
}

StepReport TrainingSteps::train_on(Call call, const Batch& batch) {
  require_training();
  require_no_gradients();
  if (call == Call::kAccumulate) require_accumulable();
  if (call == Call::kGradients && parts_.layout.parameters.sums_each_micro_batch) {
    throw_usage(
        "forward_backward() with gradients in the order micro-batch, of which a replica has parts; "
        "legal: train_step(), or the order step (options.training.gradient_order)");
  }
  calls_.agree(call, &batch, 0, [&] { require_rate(); });
  cut_step();
  const BatchLoader::Batch* mine = nullptr;
  calls_.guarded("a batch", [&] {
    for (const SampleRange& range : step_.ranges) parts_.need_size({.samples = range.count});
    parts_.feed->distribute(batch, /*targets=*/true);
    mine = &parts_.feed->cut(step_.ranges, step_.ranges.front().first);
  });
  calls_.agree(Call::kValues, nullptr, 0,
               [this, mine] { step_.targets_here = count_targets(*mine); });
  const BatchEnd end = call == Call::kTrain        ? BatchEnd::kUpdate
                       : call == Call::kAccumulate ? BatchEnd::kAccumulate
                                                   : BatchEnd::kGradients;
  return run_batch(*mine, end);
}

StepReport TrainingSteps::run_batch(const BatchLoader::Batch& batch, BatchEnd end) {
  StepReport report;
  calls_.guarded([&] {
    use_device(parts_.compute->device());
    const double started = steady_seconds();
    const int micro_batches = static_cast<int>(step_.ranges.size());
    parts_.rethrow_oom_with_plan("messages",
                                 [&] { parts_.engine = &parts_.training.engine(micro_batches); });
    parts_.job.set_progress_engine(parts_.engine);
    step_.begin_batch(started, micro_batches, end);
    const StepRequest request{.phase = Phase::kTrain,
                              .step = step_.number,
                              .seed = parts_.options.training.seed,
                              .loss_scale = 1 / step_.divisor(parts_.feed->targets()),
                              .first_batch = step_.earlier.samples == 0,
                              .last_batch = end != BatchEnd::kAccumulate,
                              .micro_batches = step_.ranges,
                              .batch = &batch};
    if (step_.earlier.samples == 0) stage_buffers_->keep();
    gradients_->expect(parts_.engine->outcome());
    parts_.rethrow_oom_with_plan(fmt::format("step {}", step_.number),
                                 [&] { parts_.engine->run(request, gradients_.get()); });
    report = end_batch(end, started);
  });
  if (step_.refused() && !report.skipped) throw step_.refusal(parts_.layout);
  return report;
}

// In a guarded body.
StepReport TrainingSteps::end_batch(BatchEnd end, double started) {
  const bool refused = step_.refused();
  const bool skips = refused && step_.totals.finite == 0 && step_.totals.other_rate_rank < 0 &&
                     parts_.options.training.skip_nonfinite;
  const bool ends = refused || end == BatchEnd::kUpdate;
  step_.gradients_ready = !refused && end == BatchEnd::kGradients;
  if (!ends) {
    for (const std::int64_t share : parts_.feed->shares()) step_.earlier.samples += share;
    StepReport report = report_of(steady_seconds() - started);
    report.step = step_.number;
    return report;
  }
  if (refused) {
    stage_buffers_->restore();
  } else {
    stage_buffers_->join();
  }
  gradients_->clear();
  if (refused && !skips) return {};
  ++step_.done;
  StepReport report = report_of(steady_seconds() - started);
  parts_.job.activity->step_ended(report.seconds);
  if (parts_.options.checks.replicas_every > 0 &&
      step_.done % parts_.options.checks.replicas_every == 0) {
    const ActivityScope comparing(*parts_.job.activity, Doing::kComparing);
    parts_.rethrow_oom_with_plan(
        fmt::format("the comparison of replicas after step {}", step_.done), [&] {
          check_replicas(parts_.job, parts_.layout.parameters, *parts_.tied, parts_.bindings,
                         *parts_.mirror, step_.done);
        });
  }
  return report;
}

StepReport TrainingSteps::optimizer_step() {
  require_training();
  if (!step_.gradients_ready) throw_usage("optimizer_step() needs a forward_backward() before it");
  calls_.agree(Call::kUpdate, nullptr, 0, [&] { require_rate(); });
  StepReport report;
  calls_.guarded("the update", [&] {
    const double started = steady_seconds();
    gradients_->update(started);
    report = end_batch(BatchEnd::kUpdate, started);
  });
  if (step_.refused() && !report.skipped) throw step_.refusal(parts_.layout);
  return report;
}

void TrainingSteps::drop_gradients() {
  require_training();
  calls_.agree(Call::kDrop, nullptr);
  calls_.guarded([&] {
    use_device(parts_.compute->device());
    if (step_.open()) stage_buffers_->restore();
    gradients_->clear();
  });
}

void TrainingSteps::require_rate() const {
  require_sensible_at(step_.done + 1, parts_.options.training.learning_rate,
                      parts_.options.training.groups);
}

void TrainingSteps::set_learning_rate(const LearningRate& rate) {
  calls_.require_idle();
  require_sensible(rate, parts_.options.training.groups);
  parts_.options.training.learning_rate = rate;
}

StepReport TrainingSteps::report_of(double seconds) const {
  const StepTotals& totals = step_.totals;
  StepReport report;
  report.step = step_.done;
  report.loss = totals.loss;
  report.targets = totals.targets;
  report.skipped = totals.finite == 0;
  report.grad_norm = totals.grad_norm;
  report.learning_rate = parts_.options.training.learning_rate.at(step_.done);
  report.seconds = seconds;
  report.pipeline_seconds = totals.window_seconds;
  // The two times come from different clocks: a bubble near 0 may come out negative.
  report.bubble_measured =
      std::max(0.0, 1 - totals.busy_seconds /
                            (totals.window_seconds * parts_.layout.place.topology.ranks()));
  if (parts_.job.world.ranks->rank() == 0) {
    report.peak_in_flight = gradients_->record().peaks();
    report.peak_bytes.reserve(report.peak_in_flight.size());
    for (int rank = 0; rank < parts_.layout.place.topology.size.pipeline; ++rank) {
      const RankMemory& memory = parts_.layout.memory.of({.pipeline = rank});
      report.peak_bytes.push_back(static_cast<std::int64_t>(memory.total()));
    }
  }
  return report;
}

}  // namespace sluice
