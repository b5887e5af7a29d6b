#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/engine/steady_seconds.hpp"
#include "runtime/gradients/bucketed_sums.hpp"
#include "runtime/gradients/gradients.hpp"
#include "runtime/gradients/replica_check.hpp"
#include "runtime/job/host_mirror.hpp"
#include "runtime/job/job_context.hpp"
#include "runtime/job/nccl_routes.hpp"
#include "runtime/pipeline/build_layout.hpp"
#include "runtime/pipeline/evaluation.hpp"
#include "runtime/pipeline/pipeline_access.hpp"

namespace sluice {
namespace {

// Sums a stage's batch statistics over its replicas, in a copy: a stage owns its memory.
class ReplicaSum : public Collective {
 public:
  ReplicaSum(Collectives& replicas, ComputeContext& compute, Interrupt* interrupt)
      : replicas_(replicas), mirror_(compute, interrupt) {}
  void sum(std::span<float> values) override {
    workspace_.resize(replicas_.ordered_sum_workspace(values.size()));
    const std::span<float> host = mirror_.read_back(values);
    sums_->assign(host.begin(), host.end());
    replicas_.ordered_sum(*sums_, workspace_, sums_);
    std::copy(sums_->begin(), sums_->end(), host.begin());
    mirror_.write_back();
  }

 private:
  Collectives& replicas_;
  HostMirror mirror_;
  std::vector<float> workspace_;
  std::shared_ptr<std::vector<float>> sums_ = std::make_shared<std::vector<float>>();
};

}  // namespace

struct Pipeline::Impl {
  Impl(Communicator& world, const PipelineOptions& options_in, const StageFactory& make_stage,
       const DataSource& source);

  // NCCL is destroyed first. After an error its kernels may wait for messages that never come, and
  // freeing a GPU's memory waits for kernels.
  ~Impl() {
    job.watch->set_progress_engine(nullptr);
    nccl.reset();
  }

  // Runs `body`. Where the memory of the device, or of the host, is not enough, the Error names
  // `who` and the plan's table.
  template <typename Body>
  void rethrow_oom_with_plan(const std::string& who, const Body& body) const;
  // The same for every error of this rank's device: libraries do not say that memory was the
  // reason. Errors of other ranks are not changed.
  template <typename Body>
  void rethrow_device_error_with_plan(const std::string& who, const Body& body) const;
  [[noreturn]] void throw_with_plan(const std::string& who, const Error& error) const;
  void take_memory();
  void prepare_stages();
  void make_nccl();
  void prepare_training(const DataSource& source);
  // Only a training engine records traces and CUDA graphs.
  std::unique_ptr<Engine> make_engine(const Plan& plan, bool training);
  double count_targets(const BatchLoader::Batch& batch);
  StepReport train_step();
  void set_learning_rate(const LearningRate& rate);
  // Of the last step.
  [[nodiscard]] bool refuses_step() const {
    const StepTotals& totals = gradients->totals();
    return totals.other_rate_rank >= 0 || (totals.finite == 0 && !options.training.skip_nonfinite);
  }
  double evaluate(std::int64_t samples);
  std::span<const Tensor> infer(std::span<const Tensor> inputs);
  void close();
  void require_open() const;
  // Collective. What each rank passes.
  std::vector<std::int64_t> gather_from_ranks(std::int64_t mine);
  void require_inference(std::span<const Tensor> inputs);
  StepReport report_of(double seconds) const;

  PipelineOptions options;
  JobContext job;
  JobLayout layout;
  std::vector<std::unique_ptr<Stage>> stages;
  std::vector<StageBinding> bindings;
  std::unique_ptr<ComputeContext> compute;
  std::unique_ptr<HostMirror> mirror;
  std::unique_ptr<ReplicaSum> replica_sum;
  std::unique_ptr<NcclRoutes> nccl;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<BatchLoader> loader;
  std::deque<Evaluation> evaluations;
  std::unique_ptr<TiedUses> tied;
  std::unique_ptr<GradientSync> gradients;
  BatchLoader::Batch inference_batch;
  std::uint64_t step = 0;
  bool closed = false;
  std::vector<double> replica_targets;  // [replica]
};

Pipeline::Impl::Impl(Communicator& world, const PipelineOptions& options_in,
                     const StageFactory& make_stage, const DataSource& source)
    : options(options_in), job(world, options) {
  job.guarded([&] {
    rethrow_device_error_with_plan("the libraries", [&] {
      compute = std::make_unique<ComputeContext>(job.place.device(), options.devices.threads);
    });
    compute->set_tf32(options.devices.tf32);
    BuiltLayout built;
    // Libraries may take memory when they plan what the stages will ask of them.
    rethrow_oom_with_plan(
        "the layout", [&] { built = build_layout(job, options, *compute, make_stage, source); });
    layout = std::move(built.layout);
    stages = std::move(built.stages);
    take_memory();
    mirror = std::make_unique<HostMirror>(*compute, job.watch.get());
    replica_sum =
        std::make_unique<ReplicaSum>(*job.replicas.collectives, *compute, job.watch.get());
    replica_targets.resize(at(layout.place.topology.replicas));
    prepare_stages();
    // All ranks make new communicators, or those that do wait for ever: no rank may have failed.
    job.world.collectives->barrier();
    rethrow_device_error_with_plan("NCCL's communicators", [&] { make_nccl(); });
    rethrow_oom_with_plan("tied parameters", [&] {
      tied = std::make_unique<TiedUses>(job, layout.plans, layout.parameters, *compute, nccl.get(),
                                        *mirror, bindings);
    });
    rethrow_oom_with_plan("messages",
                          [&] { engine = make_engine(layout.plans.train, /*training=*/true); });
    job.watch->set_progress_engine(engine.get());
    for (const EvaluationPlan& plan : layout.plans.evaluations) {
      rethrow_oom_with_plan(fmt::format("evaluation of {} samples", plan.samples), [&] {
        evaluations.emplace_back(
            plan, source, layout,
            [this](const Plan& forward) { return make_engine(forward, /*training=*/false); },
            compute->device());
      });
    }
    if (!options.training.inference) prepare_training(source);
  });
}

void Pipeline::Impl::prepare_training(const DataSource& source) {
  rethrow_oom_with_plan("the batches", [&] {
    loader = std::make_unique<BatchLoader>(
        source, Phase::kTrain, layout.plans.micro_batches, layout.owns(0),
        layout.owns(layout.plans.num_stages() - 1), compute->device());
  });
  rethrow_oom_with_plan("the optimizer", [&] {
    gradients =
        std::make_unique<GradientSync>(job, layout, options, *compute, nccl.get(), *tied, bindings);
  });
  gradients->zero_grads();
  compute->stream().synchronize();
  job.world.collectives->barrier();
}

template <typename Body>
void Pipeline::Impl::rethrow_oom_with_plan(const std::string& who, const Body& body) const {
  try {
    body();
  } catch (const OutOfMemory& error) {
    throw_with_plan(who, error);
  }
}

template <typename Body>
void Pipeline::Impl::rethrow_device_error_with_plan(const std::string& who,
                                                    const Body& body) const {
  try {
    body();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDevice || error.rank() >= 0) throw;
    throw_with_plan(who, error);
  }
}

void Pipeline::Impl::throw_with_plan(const std::string& who, const Error& error) const {
  std::string plan = "not made yet";
  if (!layout.memory.ranks.empty()) plan = to_string(layout.memory.ranks[at(layout.place.rank)]);
  throw_error(ErrorCode::kDevice, "{} on {} of {}: {}; the plan of this rank: {}", who,
              to_string(job.place.device()), job.devices.ranks[at(job.world.ranks->rank())].host,
              error.what(), plan);
}

void Pipeline::Impl::take_memory() {
  rethrow_oom_with_plan("the plan", [&] {
    compute->memory().reserve(layout.memory.ranks[at(layout.place.rank)].arena());
    compute->reserve_workspace(layout.memory.operator_bytes);
  });
}

// A communicator takes hundreds of megabytes of a GPU: training and evaluations share one set.
void Pipeline::Impl::make_nccl() {
  if (!NcclRoutes::wanted(layout)) return;
  std::size_t open = 8 + TiedUses::most_open(layout.parameters);
  layout.plans.for_each_plan([&](const Plan& plan) {
    for (const BufferPool& pool : plan.ranks[at(layout.place.rank)].pools) open += at(pool.count);
  });
  const SumLoad sums = layout.wires.sums_by_nccl(layout.place.rank)
                           ? BucketedSums::load_of(bindings, options.devices.bucket_bytes)
                           : SumLoad{};
  nccl =
      std::make_unique<NcclRoutes>(job, layout, *compute, sums, open, options.devices.all_reduce);
}

void Pipeline::Impl::prepare_stages() {
  const std::vector<int>& mine = layout.plans.placement().stages_of(layout.place.rank);
  const bool splits = layout.plans.splits_backward();
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const int index = mine[i];
    StageBinding binding{.index = index,
                         .stage = stages[i].get(),
                         .split = dynamic_cast<SplitBackward*>(stages[i].get()),
                         .loss = nullptr};
    if (splits && binding.split == nullptr) {
      throw_usage("schedule '{}' splits the backward pass, but stage {} is not a SplitBackward",
                  options.order.schedule, index);
    }
    if (index + 1 == layout.plans.num_stages()) {
      binding.loss = dynamic_cast<LossStage*>(stages[i].get());
      if (binding.loss == nullptr) {
        throw_usage("stage {} is the last one, but is not a LossStage", index);
      }
    }
    StageSetup setup{.compute = compute.get(),
                     .slots = layout.plans.slots_of(index),
                     .split_backward = splits,
                     .seed = options.training.seed,
                     .input_sizes = {}};
    for (const std::int64_t size : layout.wires.edges.sizes()) {
      std::vector<TensorSpec>& specs = setup.input_sizes.emplace_back();
      for (const EdgeTensor& tensor : layout.wires.edges.inputs(size, index))
        specs.push_back(tensor.spec);
    }
    rethrow_device_error_with_plan(fmt::format("stage {}", index),
                                   [&] { stages[i]->prepare(setup); });
    bindings.push_back(binding);
  }
}

std::unique_ptr<Engine> Pipeline::Impl::make_engine(const Plan& plan, bool training) {
  const RankPlan& mine = plan.ranks[at(layout.place.rank)];
  return std::make_unique<Engine>(
      EngineConfig{.plan = &plan,
                   .rank = layout.place.rank,
                   .edges = &layout.wires.edges,
                   .stages = bindings,
                   .compute = compute.get(),
                   .communicator = job.messages.get(),
                   .interrupt = job.control.get(),
                   .piece_bytes = job.piece_bytes(),
                   .nccl = nccl.get(),
                   .routes = layout.wires.routes,
                   .collective = plan.forward_only ? nullptr : replica_sum.get(),
                   .progress_in_actions = options.devices.progress_in_actions,
                   .cuda_graphs = training && options.devices.cuda_graphs,
                   .trace_events = training && options.checks.trace ? mine.ops.size() : 0});
}

// The number of targets in the global batch, which the mean loss is taken over. On the last stage's
// ranks, with one exchange between replicas; elsewhere 1.
double Pipeline::Impl::count_targets(const BatchLoader::Batch& batch) {
  if (!layout.owns(layout.plans.num_stages() - 1)) return 1;
  double mine = 0;
  for (const std::vector<Tensor>& targets : batch.targets) {
    mine += bindings.back().loss->target_weight(targets);
  }
  job.replicas.collectives->all_gather(std::as_bytes(std::span(&mine, 1)),
                                       std::as_writable_bytes(std::span(replica_targets)));
  double total = 0;
  for (const double count : replica_targets) total += count;
  if (total <= 0) {
    throw_error(ErrorCode::kData, "step {} has no target that counts", step + 1);
  }
  return total;
}

StepReport Pipeline::Impl::train_step() {
  require_open();
  if (options.training.inference) throw_usage("an inference pipeline does not train");
  StepReport report;
  job.guarded([&] {
    use_device(compute->device());
    const double started = steady_seconds();
    const std::uint64_t number = step + 1;
    const BatchLoader::Batch& batch = loader->load(number);
    const StepRequest request{.phase = Phase::kTrain,
                              .step = number,
                              .seed = options.training.seed,
                              .loss_scale = 1 / count_targets(batch),
                              .micro_batches = layout.plans.micro_batches,
                              .batch = &batch};
    gradients->begin(number, started, engine->outcome());
    rethrow_oom_with_plan(fmt::format("step {}", number),
                          [&] { engine->run(request, gradients.get()); });
    gradients->zero_grads();
    if (refuses_step()) return;
    step = number;
    report = report_of(steady_seconds() - started);
    if (options.checks.replicas_every > 0 && step % options.checks.replicas_every == 0) {
      rethrow_oom_with_plan(fmt::format("the comparison of replicas after step {}", step),
                            [&] { check_replicas(job, *tied, bindings, *mirror, step); });
    }
  });
  // Not guarded: all ranks throw it, and the control channel keeps what it reports for good.
  if (refuses_step()) throw gradients->refusal();
  return report;
}

void Pipeline::Impl::set_learning_rate(const LearningRate& rate) {
  for (const double value : {rate.peak, rate.final_share}) {
    if (std::isfinite(value) && value >= 0) continue;
    throw_usage("a learning rate of {} (final share {}); legal are numbers from 0", rate.peak,
                rate.final_share);
  }
  options.training.learning_rate = rate;
}

void Pipeline::Impl::close() {
  job.guarded([&] {
    if (std::exchange(closed, true)) return;
    use_device(compute->device());
    job.watch->set_progress_engine(nullptr);
    if (nccl != nullptr) nccl->finalize();
    job.world.collectives->barrier();
  });
}

// Not guarded: the answer is the same on all ranks, and some may still be closing.
void Pipeline::Impl::require_open() const {
  if (closed) throw_usage("the pipeline is closed");
}

std::vector<std::int64_t> Pipeline::Impl::gather_from_ranks(std::int64_t mine) {
  std::vector<std::int64_t> all(at(job.world.ranks->size()));
  job.guarded([&] {
    job.world.collectives->all_gather(std::as_bytes(std::span(&mine, 1)),
                                      std::as_writable_bytes(std::span(all)));
  });
  return all;
}

// Not guarded: the answer is the same on all ranks.
void Pipeline::Impl::require_inference(std::span<const Tensor> inputs) {
  if (!options.training.inference) throw_usage("a training pipeline does not infer");
  if (layout.plans.micro_batches.size() != 1) {
    throw_usage("inference takes one micro-batch, not {}", layout.plans.micro_batches.size());
  }
  const auto expected = layout.wires.edges.inputs(layout.plans.micro_batches[0].count, 0);
  bool fits = inputs.size() == expected.size();
  for (std::size_t i = 0; fits && i < inputs.size(); ++i) fits = inputs[i].spec == expected[i].spec;
  const std::vector<std::int64_t> all = gather_from_ranks(fits ? 1 : 0);
  const auto other = std::find(all.begin(), all.end(), 0);
  if (other != all.end()) {
    throw_usage("inference needs {} input tensors, the first {}; rank {} passes others",
                expected.size(), expected.empty() ? "none" : to_string(expected[0].spec),
                other - all.begin());
  }
}

StepReport Pipeline::Impl::report_of(double seconds) const {
  const StepTotals& totals = gradients->totals();
  StepReport report;
  report.step = step;
  report.loss = totals.loss;
  report.targets = totals.targets;
  report.skipped = totals.finite == 0;
  report.grad_norm = totals.grad_norm;
  report.learning_rate = options.training.learning_rate.at(step);
  report.seconds = seconds;
  report.pipeline_seconds = totals.window_seconds;
  // The two times come from different clocks: a bubble near 0 may come out negative.
  report.bubble_measured = std::max(
      0.0, 1 - totals.busy_seconds / (totals.window_seconds * layout.place.topology.ranks()));
  if (job.world.ranks->rank() == 0) {
    report.peak_in_flight = gradients->peaks();
    report.peak_bytes.reserve(layout.memory.ranks.size());
    for (const RankMemory& memory : layout.memory.ranks) {
      report.peak_bytes.push_back(static_cast<std::int64_t>(memory.total()));
    }
  }
  return report;
}

double Pipeline::Impl::evaluate(std::int64_t samples) {
  require_open();
  const std::vector<std::int64_t> asked = gather_from_ranks(samples);
  for (std::size_t rank = 1; rank < asked.size(); ++rank) {
    if (asked[rank] == asked[0]) continue;
    throw_usage("evaluation of {} samples on rank 0 and of {} on rank {}", asked[0], asked[rank],
                rank);
  }
  const auto found = std::find_if(evaluations.begin(), evaluations.end(),
                                  [&](const Evaluation& e) { return e.samples() == samples; });
  if (found == evaluations.end()) {
    throw_usage("evaluation of {} samples is not one of the options' evaluations", samples);
  }
  double mean = 0;
  job.guarded([&] {
    use_device(compute->device());
    LossResult loss;
    rethrow_oom_with_plan(fmt::format("evaluation of {} samples", samples),
                          [&] { loss = found->run(options.training.seed); });
    const std::array<double, 2> mine = {loss.sum, loss.weight};
    std::vector<double> all(2 * at(job.world.ranks->size()));
    job.world.collectives->all_gather(std::as_bytes(std::span(mine)),
                                      std::as_writable_bytes(std::span(all)));
    std::array<double, 2> total = {0, 0};
    for (int r = 0; r < layout.place.topology.replicas; ++r) {
      const std::size_t rank = at(layout.place.topology.rank_of(r, layout.plans.last_rank()));
      total[0] += all[2 * rank];
      total[1] += all[2 * rank + 1];
    }
    mean = total[0] / total[1];
  });
  return mean;
}

std::span<const Tensor> Pipeline::Impl::infer(std::span<const Tensor> inputs) {
  require_open();
  require_inference(inputs);
  std::span<const Tensor> outputs;
  job.guarded([&] {
    use_device(compute->device());
    inference_batch.inputs.assign(1, {inputs.begin(), inputs.end()});
    inference_batch.targets.resize(1);
    const StepRequest request{.phase = Phase::kGenerate,
                              .step = ++step,
                              .seed = options.training.seed,
                              .micro_batches = layout.plans.micro_batches,
                              .batch = &inference_batch};
    rethrow_oom_with_plan("inference", [&] { engine->run(request, nullptr); });
    outputs = engine->outputs();
  });
  return outputs;
}

Pipeline::Pipeline(Communicator& world, const PipelineOptions& options,
                   const StageFactory& make_stage, const DataSource& source)
    : impl_(std::make_unique<Impl>(world, options, make_stage, source)) {}
Pipeline::~Pipeline() = default;

JobLayout PipelineAccess::plan_layout(Communicator& world, const PipelineOptions& options,
                                      const StageFactory& make_stage, const DataSource& source) {
  JobContext job(world, options);
  JobLayout layout;
  job.guarded([&] {
    ComputeContext compute(job.place.device(), options.devices.threads);
    compute.set_tf32(options.devices.tf32);
    layout = build_layout(job, options, compute, make_stage, source).layout;
  });
  return layout;
}

StepReport Pipeline::train_step() { return impl_->train_step(); }
double Pipeline::evaluate(std::int64_t samples) { return impl_->evaluate(samples); }
std::span<const Tensor> Pipeline::infer(std::span<const Tensor> inputs) {
  return impl_->infer(inputs);
}
void Pipeline::set_learning_rate(double rate) { impl_->set_learning_rate({.peak = rate}); }
void Pipeline::set_learning_rate(const LearningRate& rate) { impl_->set_learning_rate(rate); }
void Pipeline::close() { impl_->close(); }
std::uint64_t Pipeline::step() const { return impl_->step; }
void Pipeline::set_step(std::uint64_t step) { impl_->step = step; }
const JobLayout& PipelineAccess::layout(const Pipeline& pipeline) { return pipeline.impl_->layout; }

std::vector<Pipeline::Owned> Pipeline::parameters() {
  std::vector<Owned> owned;
  for (const StageBinding& binding : impl_->bindings) {
    ParameterSet* set = binding.stage->parameters();
    if (set == nullptr) continue;
    int index = 0;
    for (Parameter* parameter : set->all()) {
      owned.push_back({.stage = binding.index,
                       .owner = impl_->layout.parameters.is_owner(binding.index, index++),
                       .parameter = parameter});
    }
  }
  return owned;
}

void Pipeline::values_changed() {
  impl_->require_open();
  impl_->job.guarded([&] {
    use_device(impl_->compute->device());
    impl_->rethrow_oom_with_plan("tied parameters", [&] { impl_->tied->broadcast_tied_values(); });
  });
}

std::vector<OptimizerState> Pipeline::optimizer_state() {
  if (impl_->gradients == nullptr) return {};
  return impl_->gradients->optimizer_state().state();
}

Collectives& PipelineAccess::world(Pipeline& pipeline) {
  return *pipeline.impl_->job.world.collectives;
}
void PipelineAccess::guarded(Pipeline& pipeline, const std::function<void()>& body) {
  pipeline.impl_->job.guarded(body);
}
void PipelineAccess::guarded(Pipeline& pipeline, const std::string& who,
                             const std::function<void()>& body) {
  pipeline.impl_->job.guarded([&] { pipeline.impl_->rethrow_oom_with_plan(who, body); });
}

void PipelineAccess::set_step_flags(Pipeline& pipeline, std::function<std::uint32_t()> mine) {
  if (pipeline.impl_->gradients != nullptr) pipeline.impl_->gradients->set_flags(std::move(mine));
}
std::uint32_t PipelineAccess::step_flags(const Pipeline& pipeline) {
  if (pipeline.impl_->gradients == nullptr) return 0;
  return static_cast<std::uint32_t>(pipeline.impl_->gradients->totals().flags);
}

std::vector<TraceEvent> PipelineAccess::trace(const Pipeline& pipeline) {
  const auto events = pipeline.impl_->engine->trace();
  return {events.begin(), events.end()};
}

ComputeContext& Pipeline::compute() { return *impl_->compute; }
const StepOutcome& PipelineAccess::last_outcome(const Pipeline& pipeline) {
  return pipeline.impl_->engine->outcome();
}

}  // namespace sluice
