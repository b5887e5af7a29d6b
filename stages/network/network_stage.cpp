#include "stages/network/network_stage.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/throw_error.hpp"
#include "stages/network/naming.hpp"
#include "stages/tensor/unwritten.hpp"

namespace sluice {
namespace {

void require_gpu(bool runs, const std::string& who, const ComputeContext& compute) {
  if (runs || compute.device().kind == DeviceKind::kCpu) return;
  throw_usage("{} runs on CPUs alone; give its stage a CPU (--device)", who);
}

SlotMemory::Need largest(const SlotMemory::Need& a, const SlotMemory::Need& b) {
  return {.layer = {std::max(a.layer.until_input, b.layer.until_input),
                    std::max(a.layer.until_weight, b.layer.until_weight),
                    std::max(a.layer.gradients, b.layer.gradients),
                    std::max(a.layer.scratch, b.layer.scratch)},
          .output = std::max(a.output, b.output),
          .input_gradient = std::max(a.input_gradient, b.input_gradient)};
}

// Runs `body`, which writes `tensor`, and watches the first call on a CPU.
template <typename Body>
void watched(bool& was, const LayerCall& call, const char* what, const Tensor& tensor,
             const Body& body) {
  if (was || call.compute().device().kind != DeviceKind::kCpu) return body();
  mark_unwritten(tensor);
  body();
  require_written(tensor, what);
  was = true;
}

void copy(StageContext& ctx, const Tensor& from, const Tensor& to) {
  copy_async(to.data, from.data, from.spec.bytes(), ctx.compute.stream());
}

}  // namespace

std::string NumberedLayer::name() const { return fmt::format("layer {} ({})", number, kind); }

NumberedLayer make_layer(const LayerSpec& spec, int number, int drawn) {
  NumberedLayer made{number, spec.kind, nullptr};
  return naming(made.name(), [&] {
    made.layer = spec.make(drawn);
    if (made.layer == nullptr) throw_usage("made nothing");
    return std::move(made);
  });
}

TensorSpec output_of(const NumberedLayer& layer, const TensorSpec& input) {
  return naming(layer.name(), [&] { return layer.layer->output(input); });
}

void layer_forward(NumberedLayer& layer, LayerCall& call, const Tensor& y) {
  naming(layer, [&] {
    watched(layer.forward_watched, call, "its output", y, [&] { layer.layer->forward(call, y); });
  });
}

void layer_backward_input(NumberedLayer& layer, LayerCall& call, const Tensor& dy,
                          const Tensor& dx) {
  naming(layer, [&] {
    watched(layer.backward_watched, call, "its input's gradient", dx,
            [&] { layer.layer->backward_input(call, dy, dx); });
  });
}

NetworkStage::NetworkStage(std::vector<NumberedLayer> layers) : layers_(std::move(layers)) {
  for (const NumberedLayer& each : layers_) {
    each.layer->add_parameters(parameters_, fmt::format("{}.", each.number));
  }
}

ParameterSet* NetworkStage::parameters() {
  return parameters_.size() == 0 && parameters_.buffers().empty() ? nullptr : &parameters_;
}

NetworkStage::Size NetworkStage::size_of(const TensorSpec& input, ComputeContext& compute) const {
  Size size{.specs = {input}, .needs = {}};
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const NumberedLayer& each = layers_[i];
    const TensorSpec& in = size.specs.back();
    const TensorSpec out = output_of(each, in);
    require_gpu(each.layer->runs_on_gpu(), each.name(), compute);
    const LayerNeeds needs = naming(each.name(), [&] { return each.layer->needs(in, compute); });
    size.operator_bytes = std::max(size.operator_bytes, needs.operator_bytes);
    size.needs.push_back({.layer = needs.memory,
                          .output = i + 1 < layers_.size() ? out.bytes() : 0,
                          .input_gradient = i > 0 ? in.bytes() : 0});
    size.specs.push_back(out);
  }
  return size;
}

const NetworkStage::Size& NetworkStage::size_of(const StageContext& ctx) const {
  const TensorSpec& input = ctx.inputs[0].spec;
  for (const Size& size : sizes_) {
    if (size.specs.front() == input) return size;
  }
  throw_error(ErrorCode::kInternal, "a micro-batch {} was not prepared", to_string(input));
}

StageDescription NetworkStage::describe(std::span<const TensorSpec> inputs,
                                        ComputeContext& compute) const {
  if (inputs.size() != 1) {
    throw_usage("a Sequential takes one tensor, got {}; carrying() hands others past it",
                inputs.size());
  }
  const Size size = size_of(inputs[0], compute);
  StageDescription description = SlotMemory::describe(size.needs);
  description.outputs = {size.specs.back()};
  description.operator_bytes = size.operator_bytes;
  return description;
}

void NetworkStage::check_inputs(std::span<const Tensor> inputs) const {
  if (layers_.empty()) return;
  naming(layers_[0], [&] { layers_[0].layer->check_inputs(inputs[0]); });
}

void NetworkStage::prepare(const StageSetup& setup) {
  sizes_.clear();
  std::vector<SlotMemory::Need> needs(layers_.size());
  for (const std::vector<TensorSpec>& inputs : setup.input_sizes) {
    sizes_.push_back(size_of(inputs[0], *setup.compute));
    for (std::size_t i = 0; i < needs.size(); ++i) {
      needs[i] = largest(needs[i], sizes_.back().needs[i]);
    }
  }
  memory_.prepare(needs, setup.slots, setup.split_backward, *setup.compute);
  if (parameters() != nullptr) parameters_.allocate(setup.compute->memory(), setup.seed);
  for (const Size& size : sizes_) warm_up_size(*setup.compute, size);
}

void NetworkStage::prepare_size(ComputeContext& compute, std::span<const TensorSpec> inputs) {
  Size size = size_of(inputs[0], compute);
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    if (memory_.fits(i, size.needs[i])) continue;
    throw_usage("{} needs more memory for {} than for a larger micro-batch", layers_[i].name(),
                to_string(inputs[0]));
  }
  sizes_.push_back(std::move(size));
  warm_up_size(compute, sizes_.back());
}

// On a GPU: CUDA loads a kernel at its first launch. Temporary operands stand for the messages.
void NetworkStage::warm_up_size(ComputeContext& compute, const Size& size) {
  if (compute.device().kind == DeviceKind::kCpu || layers_.empty()) return;
  const auto zeros = [&](const TensorSpec& spec) {
    Buffer made = compute.memory().allocate(spec.bytes(), DeviceMemory::Use::kTemporary);
    fill_zero_async(made.data(), spec.bytes(), compute.stream());
    return made;
  };
  const Buffer in = zeros(size.specs.front()), out = zeros(size.specs.back());
  const Tensor input{in.data(), size.specs.front()};
  StageContext ctx{.compute = compute};
  ctx.samples = size.specs.front().shape[0];
  ctx.loss_scale = 0.0;
  ctx.inputs = {&input, 1};
  warm_up(ctx, input, {out.data(), size.specs.back()});
  compute.stream().synchronize();  // before the operands are freed
  parameters_.zero_grads(compute.stream());
}

void NetworkStage::warm_up(StageContext& ctx, const Tensor& input, const Tensor& output) {
  forward(ctx, {&input, 1}, {&output, 1});
  fill_zero_async(output.data, output.spec.bytes(), ctx.compute.stream());
  // The input is zeros, and its memory also serves for its gradient.
  const std::span<const Tensor> gradient =
      is_float(input.spec.dtype) ? std::span<const Tensor>(&input, 1) : std::span<const Tensor>{};
  backward(ctx, {&output, 1}, gradient);
}

LayerCall NetworkStage::call_of(StageContext& ctx, const Size& size, std::size_t layer) const {
  LayerCall call = memory_.call(ctx, layer);
  call.x =
      layer == 0 ? ctx.inputs[0] : Tensor{memory_.output(ctx.slot, layer - 1), size.specs[layer]};
  return call;
}

void NetworkStage::forward(StageContext& ctx, std::span<const Tensor> /*inputs*/,
                           std::span<const Tensor> outputs) {
  const Size& size = size_of(ctx);
  if (layers_.empty()) copy(ctx, ctx.inputs[0], outputs[0]);
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    ctx.compute.progress();
    LayerCall call = call_of(ctx, size, i);
    const bool last = i + 1 == layers_.size();
    const Tensor y = last ? outputs[0] : Tensor{memory_.output(ctx.slot, i), size.specs[i + 1]};
    layer_forward(layers_[i], call, y);
  }
}

Tensor NetworkStage::output_gradient(const StageContext& ctx, const Size& size, std::size_t layer,
                                     const Tensor& grad_output) const {
  if (layer + 1 == layers_.size()) return grad_output;
  return {memory_.input_gradient(ctx.slot, layer + 1), size.specs[layer + 1]};
}

Tensor NetworkStage::input_gradient(const StageContext& ctx, const Size& size, std::size_t layer,
                                    std::span<const Tensor> grad_inputs) const {
  if (layer > 0) return {memory_.input_gradient(ctx.slot, layer), size.specs[layer]};
  return grad_inputs.empty() ? Tensor{nullptr, size.specs[0]} : grad_inputs[0];
}

void NetworkStage::backward_input_of(LayerCall& call, const Size& size, std::size_t layer,
                                     const Tensor& dy, const Tensor& dx) {
  if (dx.data == nullptr && size.needs[layer].layer.gradients == 0) return;
  layer_backward_input(layers_[layer], call, dy, dx);
}

void NetworkStage::backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                            std::span<const Tensor> grad_inputs) {
  if (memory_.split()) {  // each slot has its own gradients
    backward_input(ctx, grad_outputs, grad_inputs);
    backward_weight(ctx, grad_outputs);
    return;
  }
  const Size& size = size_of(ctx);
  if (layers_.empty() && !grad_inputs.empty() && grad_inputs[0].data != nullptr) {
    copy(ctx, grad_outputs[0], grad_inputs[0]);
  }
  for (std::size_t i = layers_.size(); i-- > 0;) {
    ctx.compute.progress();
    LayerCall call = call_of(ctx, size, i);
    const Tensor dy = output_gradient(ctx, size, i, grad_outputs[0]);
    backward_input_of(call, size, i, dy, input_gradient(ctx, size, i, grad_inputs));
    naming(layers_[i], [&] { layers_[i].layer->backward_weight(call, dy); });
  }
}

void NetworkStage::backward_input(StageContext& ctx, std::span<const Tensor> grad_outputs,
                                  std::span<const Tensor> grad_inputs) {
  const Size& size = size_of(ctx);
  if (layers_.empty() && !grad_inputs.empty() && grad_inputs[0].data != nullptr) {
    copy(ctx, grad_outputs[0], grad_inputs[0]);
  }
  for (std::size_t i = layers_.size(); i-- > 0;) {
    ctx.compute.progress();
    LayerCall call = call_of(ctx, size, i);
    const Tensor dy = output_gradient(ctx, size, i, grad_outputs[0]);
    backward_input_of(call, size, i, dy, input_gradient(ctx, size, i, grad_inputs));
  }
}

void NetworkStage::backward_weight(StageContext& ctx, std::span<const Tensor> grad_outputs) {
  const Size& size = size_of(ctx);
  for (std::size_t i = layers_.size(); i-- > 0;) {
    ctx.compute.progress();
    LayerCall call = call_of(ctx, size, i);
    naming(layers_[i], [&] {
      layers_[i].layer->backward_weight(call, output_gradient(ctx, size, i, grad_outputs[0]));
    });
  }
}

LossNetworkStage::LossNetworkStage(std::vector<NumberedLayer> layers, std::string kind,
                                   std::unique_ptr<Loss> loss)
    : NetworkStage(std::move(layers)), kind_(std::move(kind)), loss_(std::move(loss)) {}

StageDescription LossNetworkStage::describe(std::span<const TensorSpec> inputs,
                                            ComputeContext& compute) const {
  StageDescription description = NetworkStage::describe(inputs, compute);
  const TensorSpec& outputs = description.outputs[0];
  (void)targets_of(outputs);
  require_gpu(loss_->runs_on_gpu(), kind_, compute);
  description.operator_bytes = std::max(description.operator_bytes, loss_->operator_bytes(outputs));
  return description;
}

TensorSpec LossNetworkStage::targets_of(const TensorSpec& outputs) const {
  return naming(kind_, [&] { return loss_->targets(outputs); });
}

void LossNetworkStage::prepare(const StageSetup& setup) {
  outputs_ = describe(setup.input_sizes[0], *setup.compute).outputs[0];
  NetworkStage::prepare(setup);
}

void LossNetworkStage::warm_up(StageContext& ctx, const Tensor& input, const Tensor& output) {
  const TensorSpec spec = targets_of(output.spec);
  const Buffer zeros = ctx.compute.memory().allocate(spec.bytes(), DeviceMemory::Use::kTemporary);
  fill_zero_async(zeros.data(), spec.bytes(), ctx.compute.stream());
  const HostBuffer sum(ctx.compute.device(), sizeof(double));
  loss_->compute(ctx, output, {zeros.data(), spec}, reinterpret_cast<double*>(sum.data()));
  NetworkStage::warm_up(ctx, input, output);
  ctx.compute.stream().synchronize();  // before the targets are freed
}

void LossNetworkStage::require_targets(const TensorSpec& outputs,
                                       std::span<const Tensor> targets) const {
  const TensorSpec legal = targets_of(outputs);
  const auto like = [&](const TensorSpec& spec) {
    if (spec.dtype != legal.dtype || spec.shape.rank() != legal.shape.rank()) return false;
    for (int d = 1; d < legal.shape.rank(); ++d) {
      if (spec.shape[d] != legal.shape[d]) return false;
    }
    return true;
  };
  if (targets.size() != 1)
    throw_usage("{} takes one tensor of targets, got {}", kind_, targets.size());
  if (like(targets[0].spec)) return;
  throw_usage("{}: targets are {}; legal with outputs {}: {}, and so for any number of samples",
              kind_, to_string(targets[0].spec), to_string(outputs), to_string(legal));
}

void LossNetworkStage::loss(StageContext& ctx, std::span<const Tensor> outputs,
                            std::span<const Tensor> targets, double* sum) {
  naming(kind_, [&] { loss_->compute(ctx, outputs[0], targets[0], sum); });
}

double LossNetworkStage::target_weight(std::span<const Tensor> targets) const {
  require_targets(outputs_, targets);
  return naming(kind_, [&] { return loss_->weight(outputs_, targets[0]); });
}

}  // namespace sluice
