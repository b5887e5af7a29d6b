// The members of Pipeline and PipelineAccess: each calls the part that it belongs to.
#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/pipeline.hpp>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/group/communicator.hpp"
#include "runtime/data/batch_shape.hpp"
#include "runtime/data/named_calls.hpp"
#include "runtime/group/configuration.hpp"
#include "runtime/pipeline/call.hpp"
#include "runtime/pipeline/forward_calls.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/pipeline/pipeline_calls.hpp"
#include "runtime/pipeline/pipeline_parts.hpp"
#include "runtime/pipeline/training_steps.hpp"
#include "runtime/planning/build_layout.hpp"
#include "stages/compute/thread_team.hpp"

namespace sluice {

struct Pipeline::Impl {
  Impl(Communicator& world, const PipelineOptions& options, const StageFactory& make_stage,
       PipelineParts::Batches batches)
      : parts(world, options, make_stage, std::move(batches)) {}
  ~Impl() { parts.end(); }

  PipelineParts parts;
  PipelineCalls calls{parts};
  ForwardCalls forward{parts, calls};
  TrainingSteps steps{parts, calls};
};

Pipeline::Pipeline(World& world, const StageFactory& make_stage, const DataSource& source,
                   const PipelineOptions& options)
    : impl_(std::make_unique<Impl>(communicator_of(world), options, make_stage,
                                   PipelineParts::Batches{nullptr, &source})) {}
Pipeline::Pipeline(World& world, const StageFactory& make_stage, const BatchSpec& batches,
                   const PipelineOptions& options) {
  PipelineParts::Batches from{
      .own = make_batch_shapes(batches), .source = nullptr, .feed = batches.feed};
  from.source = from.own.get();
  PipelineOptions compared = options;
  compared.expert.configuration.emplace_back("BatchSpec", to_text(batches));
  impl_ = std::make_unique<Impl>(communicator_of(world), compared, make_stage, std::move(from));
}
Pipeline::~Pipeline() = default;

JobLayout PipelineAccess::plan_layout(Communicator& world, const PipelineOptions& options,
                                      const StageFactory& make_stage, const DataSource& source,
                                      MemoryLimit limit) {
  const bool planned =
      world.size() == 1 &&
      std::max({options.shape.pipeline, options.shape.replicas, options.shape.tensor}) > 1;
  JobContext job(world, options, planned ? JobSize::kPlanned : JobSize::kStarted);
  JobLayout layout;
  job.guarded([&] {
    ComputeContext compute(job.place.device(), options.devices.threads);
    const ThreadTeam team(compute);
    compute.set_tf32(options.devices.tf32);
    layout = build_layout(job, options, compute, make_stage, source, /*any_size=*/false).layout;
    if (limit == MemoryLimit::kHolds) require_memory(job, options, layout);
  });
  return layout;
}

StepReport Pipeline::train_step() { return impl_->steps.train_step(); }
StepReport Pipeline::train_step(const Batch& batch) {
  return impl_->steps.train_on(Call::kTrain, batch);
}
StepReport Pipeline::accumulate(const Batch& batch) {
  return impl_->steps.train_on(Call::kAccumulate, batch);
}
StepReport Pipeline::forward_backward(const Batch& batch) {
  return impl_->steps.train_on(Call::kGradients, batch);
}
StepReport Pipeline::optimizer_step() { return impl_->steps.optimizer_step(); }
void Pipeline::drop_gradients() { impl_->steps.drop_gradients(); }
EvaluationReport Pipeline::evaluate(const Batch& batch) { return impl_->forward.evaluate(batch); }
EvaluationReport Pipeline::evaluate(const DataSource& source, std::int64_t samples) {
  return impl_->forward.evaluate(source, samples);
}
std::span<const Tensor> Pipeline::infer(const Batch& batch, const InferOptions& options) {
  return impl_->forward.infer(batch, options);
}
BatchShare Pipeline::share() const { return impl_->parts.feed->passed(); }
bool Pipeline::usable() const { return impl_->calls.usable(); }
const Error* Pipeline::failure() const { return impl_->calls.failure(); }
void Pipeline::set_learning_rate(double rate) { impl_->steps.set_learning_rate({.peak = rate}); }
void Pipeline::set_learning_rate(const LearningRate& rate) { impl_->steps.set_learning_rate(rate); }
void Pipeline::close() { impl_->calls.close(); }
std::uint64_t Pipeline::step() const { return impl_->parts.step.done; }
void Pipeline::set_step(std::uint64_t step) {
  impl_->calls.require_idle();
  if (step > kMostSteps) throw_usage("set_step({}); legal are 0 to {}", step, kMostSteps);
  if (impl_->parts.step.open()) {
    throw_usage(
        "set_step() in the middle of a step: optimizer_step() or drop_gradients() comes before");
  }
  impl_->parts.step.done = step;
}
const JobLayout& PipelineAccess::layout(const Pipeline& pipeline) {
  return pipeline.impl_->parts.layout;
}

std::vector<Pipeline::Owned> Pipeline::parameters() {
  std::vector<Owned> owned;
  for (const StageBinding& binding : impl_->parts.bindings) {
    ParameterSet* set = binding.parameters;
    if (set == nullptr) continue;
    int index = 0;
    for (Parameter* parameter : set->all()) {
      owned.push_back({.stage = binding.index,
                       .owner = impl_->parts.layout.parameters.is_owner(binding.index, index++),
                       .parameter = parameter});
    }
  }
  return owned;
}

std::vector<std::string> Pipeline::notes() const {
  std::vector<std::string> notes;
  for (const StageEntry& stage : impl_->parts.layout.parameters.stages) notes.push_back(stage.note);
  return notes;
}

DataLoader Pipeline::loader(std::shared_ptr<const Dataset> data, LoaderOptions how) {
  std::optional<DataLoader> made;
  impl_->calls.run_call(Call::kLoader, "a loader", [&] {
    Collectives& world = *impl_->parts.job.world.collectives;
    on_all_ranks(world, [&] {
      if (data != nullptr) impl_->parts.feed->require_items(spec_of(*data));
      how.share = impl_->parts.feed->passed();
      made.emplace(data, how);
    });
    require_same_or_refuse(world, {{"size of the data set", fmt::format("{}", size_of(*data))},
                                   {"LoaderOptions::batch_size", fmt::format("{}", how.batch_size)},
                                   {"LoaderOptions::shuffle", fmt::format("{}", how.shuffle)},
                                   {"LoaderOptions::seed", fmt::format("{}", how.seed)},
                                   {"LoaderOptions::drop_last", fmt::format("{}", how.drop_last)}});
  });
  return std::move(*made);
}

std::vector<Pipeline::Owned> Pipeline::buffers() {
  std::vector<Owned> owned;
  for (const StageBinding& binding : impl_->parts.bindings) {
    ParameterSet* set = binding.parameters;
    if (set == nullptr) continue;
    for (Parameter* buffer : set->buffers()) {
      owned.push_back({.stage = binding.index, .owner = true, .parameter = buffer});
    }
  }
  return owned;
}

void Pipeline::values_changed() {
  impl_->calls.run_call(Call::kValuesChanged, "tied parameters", [&] {
    PipelineAccess::drop_others(*this);
    impl_->parts.tied->mark_values_changed();
    impl_->parts.tied->broadcast_tied_values();
  });
}

std::vector<OptimizerState> Pipeline::optimizer_state() {
  if (PipelineAccess::offloaded_state(*this) != nullptr) {
    throw_usage(
        "optimizer_state() of state that is offloaded (options.offload.optimizer); legal: a save, "
        "which has it, or no offload of the optimizer");
  }
  return PipelineAccess::optimizer_state(*this);
}
std::vector<OptimizerState> PipelineAccess::optimizer_state(Pipeline& pipeline) {
  Pipeline::Impl& impl = *pipeline.impl_;
  if (impl.steps.gradients() == nullptr) return {};
  const PipelineCalls::InCall in_call(impl.calls);
  return impl.steps.gradients()->optimizer_state();
}
OffloadedState* PipelineAccess::offloaded_state(Pipeline& pipeline) {
  const auto* gradients = pipeline.impl_->steps.gradients();
  return gradients == nullptr ? nullptr : gradients->offloaded_state();
}

void PipelineAccess::require_idle(const Pipeline& pipeline) {
  pipeline.impl_->calls.require_idle();
}
namespace {

// Calls visit(values, entry) where replicas have parts of the parameter, which is this rank's.
template <typename Visit>
void with_sharded(PipelineParts& parts, const Parameter& parameter, const Visit& visit) {
  if (parts.sharded == nullptr) return;
  for (const StageBinding& binding : parts.bindings) {
    if (binding.parameters == nullptr) continue;
    const std::vector<Parameter*> all = binding.parameters->all();
    const auto found = std::ranges::find(all, &parameter);
    if (found == all.end()) continue;
    const auto index = static_cast<std::size_t>(found - all.begin());
    return visit(*parts.sharded,
                 parts.layout.parameters.stages[at(binding.index)].parameters[index]);
  }
}

}  // namespace

void PipelineAccess::lend(Pipeline& pipeline, const Parameter& parameter) {
  with_sharded(
      pipeline.impl_->parts, parameter,
      [&](ShardedValues& values, const ParameterEntry& entry) { values.lend(parameter, entry); });
}
void PipelineAccess::give_back(Pipeline& pipeline, const Parameter& parameter) {
  with_sharded(pipeline.impl_->parts, parameter,
               [&](ShardedValues& values, const ParameterEntry& entry) {
                 if (!entry.ends.empty()) values.drop_others(parameter);
               });
}
Tensor PipelineAccess::at_rest(Pipeline& pipeline, const Parameter& parameter) {
  Tensor values = parameter.value;
  with_sharded(pipeline.impl_->parts, parameter, [&](ShardedValues&, const ParameterEntry& entry) {
    const int replica = layout(pipeline).place.here.replica;
    values = elements_of(values, entry.part_at_rest(replica));
  });
  return values;
}
void PipelineAccess::drop_others(Pipeline& pipeline) {
  if (pipeline.impl_->parts.sharded != nullptr) pipeline.impl_->parts.sharded->drop_all();
}
Collectives& PipelineAccess::world(Pipeline& pipeline) {
  return *pipeline.impl_->parts.job.world.collectives;
}
Collectives& PipelineAccess::tensor_ranks(Pipeline& pipeline) {
  return *pipeline.impl_->parts.job.group(Axis::kTensor).collectives;
}
std::size_t PipelineAccess::collective_bytes(const Pipeline& pipeline) {
  const PipelineParts& parts = pipeline.impl_->parts;
  std::size_t bytes = 0;
  for (const Axis axis : kAxes) bytes += parts.job.group(axis).collectives->sums().bytes_held();
  for (const auto* each : {parts.over_replicas.get(), parts.over_tensor_ranks.get()}) {
    if (each != nullptr) bytes += each->bytes_held();
  }
  return bytes;
}
void PipelineAccess::guarded(Pipeline& pipeline, const std::function<void()>& body) {
  pipeline.impl_->calls.guarded(body);
}
void PipelineAccess::guarded(Pipeline& pipeline, const std::string& who,
                             const std::function<void()>& body) {
  pipeline.impl_->calls.guarded(who, body);
}

void PipelineAccess::run_call(Pipeline& pipeline, Call call, const std::string& who,
                              const std::function<void()>& body) {
  pipeline.impl_->calls.run_call(call, who, body);
}

Tensor PipelineAccess::before_open_step(const Pipeline& pipeline, const Tensor& value) {
  return pipeline.impl_->parts.step.open() ? pipeline.impl_->steps.kept(value) : value;
}

void PipelineAccess::saved(Pipeline& pipeline, std::uint64_t step) {
  pipeline.impl_->parts.job.activity->saved(step);
}
const std::vector<std::string>& PipelineAccess::hosts(const Pipeline& pipeline) {
  return pipeline.impl_->parts.job.hosts;
}
std::span<const double> PipelineAccess::busy_seconds(const Pipeline& pipeline) {
  if (pipeline.impl_->steps.gradients() == nullptr) return {};
  return pipeline.impl_->steps.gradients()->record().busy_seconds();
}

void PipelineAccess::set_step_flags(Pipeline& pipeline, std::function<std::uint32_t()> mine) {
  if (pipeline.impl_->steps.gradients() != nullptr) {
    pipeline.impl_->steps.gradients()->record().set_flags(std::move(mine));
  }
}
std::uint32_t PipelineAccess::step_flags(const Pipeline& pipeline) {
  return static_cast<std::uint32_t>(pipeline.impl_->parts.step.totals.flags);
}

std::vector<TraceEvent> PipelineAccess::trace(const Pipeline& pipeline) {
  if (pipeline.impl_->parts.engine == nullptr) return {};
  const auto events = pipeline.impl_->parts.engine->trace();
  return {events.begin(), events.end()};
}

ComputeContext& Pipeline::compute() { return *impl_->parts.compute; }
const StepOutcome& PipelineAccess::last_outcome(const Pipeline& pipeline) {
  return pipeline.impl_->parts.engine->outcome();
}

}  // namespace sluice
