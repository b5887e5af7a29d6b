#include "stages/network/network_stage.hpp"

#include <algorithm>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/operators.hpp>

#include "comm/base/byte_sums.hpp"
#include "comm/base/throw_error.hpp"
#include "stages/network/converted.hpp"
#include "stages/network/specs.hpp"
#include "stages/tensor/stale_gradients.hpp"

namespace sluice::nn {

NetworkStage::NetworkStage(StageLayers parts)
    : run_(std::move(parts.layers), {.outermost = true,
                                     .precision = parts.precision,
                                     .shards = parts.shards,
                                     .rounds = true,
                                     .skips = std::move(parts.skips),
                                     .begin = parts.begin}),
      model_(std::move(parts.model)),
      entry_(parts.begin == 0 ? parts.precision : Precision{}),
      trusted_(std::all_of(run_.layers().begin(), run_.layers().end(),
                           [](const NumberedLayer& each) { return each.forward_watched; })) {
  run_.add_parameters(parameters_);
}

std::vector<TensorSpec> NetworkStage::taken(std::span<const TensorSpec> inputs) const {
  std::vector<TensorSpec> specs(inputs.begin(), inputs.end());
  specs[0] = at_entry(specs[0], entry_);
  return specs;
}

std::size_t NetworkStage::entry_bytes(const TensorSpec& input) const {
  const TensorSpec spec = at_entry(input, entry_);
  return spec == input ? 0 : round_up(spec.bytes(), kBufferAlignment);
}

ParameterSet* NetworkStage::parameters() {
  return parameters_.size() == 0 && parameters_.buffers().empty() ? nullptr : &parameters_;
}

StageDescription NetworkStage::describe(std::span<const TensorSpec> inputs,
                                        ComputeContext& compute) const {
  const StageSkips& skips = run_.skips();
  if (inputs.size() != skips.inputs()) {
    throw_usage("these layers take {} tensors, got {}; pass_through() hands others past them",
                skips.inputs(), inputs.size());
  }
  const Plan& plan = run_.plan_of(taken(inputs), compute);
  const LayerNeeds& needs = plan.needs;
  StageDescription description;
  description.outputs = run_.outputs_of(plan);
  description.state_bytes_until_input = needs.memory.until_input;
  description.state_bytes_until_weight =
      sum_of_bytes({needs.memory.until_weight, needs.memory.lasting, entry_bytes(inputs[0])});
  description.gradient_bytes_until_weight = needs.memory.gradients;
  description.shared_gradient_bytes = plan.shared_gradients;
  description.workspace_bytes =
      std::max(needs.memory.scratch, other_scratch(description.outputs[0], compute));
  description.state_moves = description.uses_units = true;
  description.weight_reads = !trusted_;
  description.copy_bytes = parameters_.bf16_copy_bytes(compute.device().kind);
  description.operator_bytes = needs.operator_bytes;
  description.table_bytes = needs.table_bytes;
  description.note = needs.note;
  description.model = model_;
  description.collectives = needs.collectives;
  description.recomputes = run_.recomputes_first();
  if (description.recomputes) {  // its collectives are the first ones of the backward
    std::vector<PlannedCollective>& backward = description.collectives.backward_input;
    const auto end = backward.begin() + std::ssize(*plan.places.back().needs.again);
    description.collectives.recompute.assign(backward.begin(), end);
    backward.erase(backward.begin(), end);
  }
  for (const TensorSpec& input : inputs) {
    description.input_gradients.push_back(is_float(input.dtype));
  }
  for (const StageSkips::Source& source : skips.sources()) {
    if (source.from < 0 && source.input > 0) {  // the model's input
      description.input_gradients[static_cast<std::size_t>(source.input)] = false;
    }
  }
  return description;
}

void NetworkStage::check_inputs(std::span<const Tensor> inputs) const {
  run_.check_inputs(inputs[0]);
}

void NetworkStage::prepare(const StageSetup& setup) {
  split_ = setup.split_backward;
  trains_ = setup.trains;
  trial_ = setup.state;
  prepared_.clear();
  std::size_t gradients = 0, scratch = 0;
  for (const std::vector<TensorSpec>& inputs : setup.input_sizes) {
    const Plan& plan = run_.plan_of(taken(inputs), *setup.compute);
    inputs_.reserve(inputs.size());
    prepared_.push_back(&plan);
    if (!split_) gradients = std::max(gradients, plan.shared_gradients);
    scratch = std::max(
        {scratch, plan.needs.memory.scratch, other_scratch(plan.specs.back(), *setup.compute)});
  }
  allocate(setup, gradients, scratch);
  // On a CPU they have pages of their own from the first step on.
  std::optional<GradientsAside> aside;
  const bool on_cpu = setup.compute->device().kind == DeviceKind::kCpu;
  if (on_cpu && trains_) aside.emplace(parameters_, setup.compute->memory());
  for (const Plan* plan : std::vector(prepared_)) warm_up_size(*setup.compute, *plan);
  if (!on_cpu) parameters_.zero_grads(setup.compute->stream());
}

void NetworkStage::allocate(const StageSetup& setup, std::size_t gradients, std::size_t scratch) {
  const DeviceMemory& memory = setup.compute->memory();
  gradients_ = memory.allocate(gradients);
  scratch_ = memory.allocate(scratch);
  for (const Buffer* buffer : {&gradients_, &scratch_}) {
    // Touches every page before the first step.
    fill_zero_async(buffer->data(), buffer->size(), setup.compute->stream());
  }
  if (parameters() == nullptr) return;
  parameters_.require_memory();
  for (Parameter* parameter : parameters_.all()) {
    if (parameter->bf16_copy.data != nullptr) copied_.push_back(parameter);
  }
  conversions_.reserve(copied_.size());
  if (trains_) run_.find_gradients(parameters_);
}

void NetworkStage::prepare_size(ComputeContext& compute, std::span<const TensorSpec> inputs) {
  const Plan& plan = run_.plan_of(taken(inputs), compute);
  const std::size_t scratch =
      std::max(plan.needs.memory.scratch, other_scratch(plan.specs.back(), compute));
  if (scratch > scratch_.size() || (!split_ && plan.shared_gradients > gradients_.size())) {
    throw_usage("layers need more memory for {} than for a larger micro-batch",
                to_string(inputs[0]));
  }
  prepared_.push_back(&plan);
  if (compute.device().kind == DeviceKind::kCpu) return;
  const GradientsAside aside(parameters_, compute.memory());
  warm_up_size(compute, plan);
}

void NetworkStage::begin_step(ComputeContext& compute) {
  conversions_.clear();
  for (Parameter* parameter : copied_) {
    if (parameter->bf16_copy_is_current) continue;
    conversions_.push_back({parameter->value, parameter->bf16_copy});
    parameter->bf16_copy_is_current = true;
  }
  if (!conversions_.empty()) convert_all(compute, conversions_);
}

// On a GPU: CUDA loads a kernel at its first launch. On a CPU: a matmul's first run creates
// primitives, and only Sluice's own layers are known to make nothing else of a call. Gradients are
// overwritten, then added to. Buffers stay as they are. Temporary operands stand for the messages.
void NetworkStage::warm_up_size(ComputeContext& compute, const Plan& plan) {
  if (run_.layers().empty()) return;
  if (compute.device().kind == DeviceKind::kCpu && !trusted_) return;
  begin_step(compute);
  std::vector<Buffer> memory;
  const auto zeros = [&](const std::vector<TensorSpec>& specs) {
    std::vector<Tensor> tensors;
    for (const TensorSpec& spec : specs) {
      Buffer& made = memory.emplace_back(
          compute.memory().allocate(spec.bytes(), DeviceMemory::Use::kTemporary));
      fill_zero_async(made.data(), spec.bytes(), compute.stream());
      tensors.push_back({made.data(), spec});
    }
    return tensors;
  };
  const std::vector<Tensor> inputs = zeros(plan.inputs), outputs = zeros(run_.outputs_of(plan));
  StageContext ctx{.compute = compute, .state = trial_};
  ctx.samples = plan.specs.front().shape[0];
  ctx.loss_scale = 0.0;
  ctx.inputs = inputs;
  ctx.collective = &Collective::alone();
  const std::span<float> buffers = parameters_.flat_buffers();
  const Buffer kept =
      compute.memory().allocate(buffers.size_bytes(), DeviceMemory::Use::kTemporary);
  copy_async(kept.data(), buffers.data(), buffers.size_bytes(), compute.stream());
  ctx.phase = Phase::kEvaluate;  // attention that drops nothing may be another one
  forward(ctx, ctx.inputs, outputs);
  if (trains_) ctx.phase = Phase::kTrain;
  warm_up(ctx, outputs);
  copy_async(buffers.data(), kept.data(), buffers.size_bytes(), compute.stream());
  compute.wait();  // before the operands are freed
}

void NetworkStage::warm_up(StageContext& ctx, std::span<const Tensor> outputs) {
  if (!trains_) return;
  forward(ctx, ctx.inputs, outputs);
  for (const Tensor& output : outputs) {
    fill_zero_async(output.data, output.spec.bytes(), ctx.compute.stream());
  }
  // The inputs are zeros, and their memory also serves for their gradients.
  const bool wanted = is_float(ctx.inputs[0].spec.dtype);
  for (const bool stale : {true, false}) {
    GradientAccess::set_stale(parameters_, stale);
    backward(ctx, outputs, wanted ? ctx.inputs : std::span<const Tensor>{});
  }
}

LayerRun::Call NetworkStage::call_of(StageContext& ctx) {
  const TensorSpec first = at_entry(ctx.inputs[0].spec, entry_);
  const auto* const plan = [&]() -> const Plan* {
    for (const Plan* each : prepared_) {
      if (each->specs.front() == first) return each;
    }
    throw_error(ErrorCode::kInternal, "a micro-batch {} was not prepared", to_string(first));
  }();
  const LayerMemory& needs = plan->needs.memory;
  const StageContext::State& state = ctx.state;
  const std::size_t entry = needs.until_weight + needs.lasting;
  std::span<const Tensor> inputs = ctx.inputs;
  if (state.until_input.size() < needs.until_input ||
      state.until_weight.size() < entry + entry_bytes(inputs[0].spec) ||
      (split_ && state.gradients.size() < needs.gradients)) {
    throw_usage("StageContext::state has less memory than the stage describes for {}",
                to_string(inputs[0].spec));
  }
  std::byte* const until_weight = state.until_weight.data();
  if (first != inputs[0].spec) {
    inputs_.assign(inputs.begin(), inputs.end());
    inputs_[0] = {until_weight + entry, first};
    inputs = inputs_;
  }
  return {.stage = ctx,
          .plan = *plan,
          .inputs = inputs,
          .memory = {.until_input = state.until_input.data(),
                     .until_weight = until_weight,
                     .lasting = at(until_weight, needs.until_weight),
                     .gradients = split_ ? state.gradients.data() : gradients_.data(),
                     .scratch = scratch_.data(),
                     .shared = !split_}};
}

void NetworkStage::forward(StageContext& ctx, std::span<const Tensor> /*inputs*/,
                           std::span<const Tensor> outputs) {
  const LayerRun::Call call = call_of(ctx);
  if (call.inputs[0].data != ctx.inputs[0].data) {
    convert(ctx.compute, ctx.inputs[0], call.inputs[0]);
  }
  run_.forward(call, outputs);
}

void NetworkStage::backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                            std::span<const Tensor> grad_inputs) {
  const LayerRun::Call call = call_of(ctx);
  if (!split_) return run_.backward(call, LayerRun::Halves::kBoth, grad_outputs, grad_inputs);
  // As the two halves do.
  run_.backward(call, LayerRun::Halves::kInput, grad_outputs, grad_inputs);
  if (trusted_) ctx.units = nullptr;  // as describe() says
  run_.backward_weight(call, grad_outputs);
}

void NetworkStage::backward_input(StageContext& ctx, std::span<const Tensor> grad_outputs,
                                  std::span<const Tensor> grad_inputs) {
  run_.backward(call_of(ctx), LayerRun::Halves::kInput, grad_outputs, grad_inputs);
}

void NetworkStage::backward_weight(StageContext& ctx, std::span<const Tensor> grad_outputs) {
  run_.backward_weight(call_of(ctx), grad_outputs);
}

LossNetworkStage::LossNetworkStage(StageLayers parts, std::string kind, std::unique_ptr<Loss> loss)
    : NetworkStage(std::move(parts)), kind_(std::move(kind)), loss_(std::move(loss)) {
  const std::size_t layers = set().size();
  loss_->add_parameters(set());
  const std::vector<Parameter*> all = set().all();
  if (all.size() == layers) return;
  unit_ = all[layers == 0 ? 0 : layers - 1]->unit;
  for (std::size_t i = layers; i < all.size(); ++i) all[i]->unit = *unit_;
  for (std::size_t i = layers; i < all.size(); ++i) {
    all[i]->asks_next_write = all[i]->written_by_loss = true;
  }
}

StageDescription LossNetworkStage::describe(std::span<const TensorSpec> inputs,
                                            ComputeContext& compute) const {
  StageDescription description = NetworkStage::describe(inputs, compute);
  const TensorSpec& outputs = description.outputs[0];
  description.targets = {targets_of(outputs)};
  if (const auto answer = loss_->answer_spec(outputs)) description.answers = {*answer};
  if (!loss_->runs_on_gpu() && compute.device().kind != DeviceKind::kCpu) {
    throw_usage("{} runs on CPUs alone; give its stage a CPU (--device)", kind_);
  }
  LayerNeeds needs = loss_->needs(outputs, compute);
  description.operator_bytes = std::max(description.operator_bytes, needs.operator_bytes);
  StageCollectives& made = needs.collectives;
  if (!made.loss.empty() || !made.backward_input.empty() || !made.backward_weight.empty()) {
    throw_usage(
        "{}: needs() has collectives of {}; legal in a loss: collectives.forward and "
        "collectives.answer",
        kind_,
        !made.loss.empty()             ? "loss"
        : !made.backward_input.empty() ? "backward_input"
                                       : "backward_weight");
  }
  description.collectives.loss = std::move(made.forward);
  description.collectives.answer = std::move(made.answer);
  return description;
}

std::size_t LossNetworkStage::other_scratch(const TensorSpec& outputs,
                                            ComputeContext& compute) const {
  (void)targets_of(outputs);
  return loss_->needs(outputs, compute).memory.scratch;
}

TensorSpec LossNetworkStage::targets_of(const TensorSpec& outputs) const {
  return naming(kind_, [&] { return loss_->targets(outputs); });
}

void LossNetworkStage::warm_up(StageContext& ctx, std::span<const Tensor> outputs) {
  const TensorSpec spec = targets_of(outputs[0].spec);
  const Buffer zeros = ctx.compute.memory().allocate(spec.bytes(), DeviceMemory::Use::kTemporary);
  fill_zero_async(zeros.data(), spec.bytes(), ctx.compute.stream());
  const HostBuffer sum(ctx.compute.device(), sizeof(double));
  const Tensor targets{zeros.data(), spec};
  // The second one adds to gradients, if any. On a CPU a program's own loss may count its calls.
  const bool runs = ctx.compute.device().kind != DeviceKind::kCpu || loss_->capturable();
  if (trains()) GradientAccess::set_stale(set(), true);
  for (int i = 0; runs && i < (trains() ? 2 : 1); ++i) {
    loss(ctx, outputs, {&targets, 1}, reinterpret_cast<double*>(sum.data()));
  }
  NetworkStage::warm_up(ctx, outputs);
  ctx.compute.wait();  // before the targets are freed
}

void LossNetworkStage::use_parameters(const StageContext& ctx) const {
  if (unit_ && ctx.units != nullptr) ctx.units->use(*unit_);
}

// The outputs of a prepared size that these targets fit, which may be for any number of samples.
const TensorSpec& LossNetworkStage::outputs_for(std::span<const Tensor> targets) const {
  if (targets.size() != 1)
    throw_usage("{} takes one tensor of targets, got {}", kind_, targets.size());
  const TensorSpec& spec = targets[0].spec;
  for (const LayerRun::Plan* plan : prepared()) {
    TensorSpec legal = targets_of(plan->specs.back());
    bool fits = spec.dtype == legal.dtype && spec.shape.rank() == legal.shape.rank();
    for (int d = 1; fits && d < legal.shape.rank(); ++d) fits = spec.shape[d] == legal.shape[d];
    if (fits) return plan->specs.back();
  }
  const TensorSpec& outputs = prepared().front()->specs.back();
  throw_usage("{}: targets are {}; legal with outputs {}: {}, and so for any number of samples",
              kind_, to_string(spec), to_string(outputs), to_string(targets_of(outputs)));
}

void LossNetworkStage::loss(StageContext& ctx, std::span<const Tensor> outputs,
                            std::span<const Tensor> targets, double* sum) {
  ParameterSet* const set = parameters();
  use_parameters(ctx);
  if (ctx.phase == Phase::kTrain && set != nullptr && !loss_->leaves_gradients()) {
    GradientAccess::zero_stale(*set, ctx.compute.stream());
  }
  naming(kind_, [&] { loss_->compute_in(scratch(), ctx, outputs[0], targets[0], sum); });
}

void LossNetworkStage::answer(StageContext& ctx, std::span<const Tensor> outputs,
                              std::span<const Tensor> answers) {
  use_parameters(ctx);
  naming(kind_, [&] { loss_->answer(ctx, outputs[0], answers[0]); });
}

double LossNetworkStage::target_weight(std::span<const Tensor> targets) const {
  const TensorSpec& outputs = outputs_for(targets);
  return naming(kind_, [&] { return loss_->weight(outputs, targets[0]); });
}

}  // namespace sluice::nn
