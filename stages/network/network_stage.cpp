#include "stages/network/network_stage.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/operators.hpp>

#include "comm/base/byte_sums.hpp"
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

// Runs `body`, which writes `tensor` and reads the layer's input, and watches the first call on a
// CPU.
template <typename Body>
void watched(bool& was, const LayerCall& call, const char* what, const Tensor& tensor,
             const Body& body) {
  if (was || call.compute().device().kind != DeviceKind::kCpu) return body();
  const Unchanged input({&call.x, 1});
  mark_unwritten(tensor);
  body();
  require_written(tensor, what);
  input.require("input");
  was = true;
}

void copy(StageContext& ctx, const Tensor& from, const Tensor& to) {
  copy_async(to.data, from.data, from.spec.bytes(), ctx.compute.stream());
}

// The sums of a replica that is alone.
class OneReplica : public Collective {
 public:
  void sum(std::span<double> /*values*/) override {}
};

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

// A size that std::size_t holds may still be too large to be rounded up.
static void require_countable(const LayerNeeds& needs, const std::string& layer) {
  const LayerMemory& memory = needs.memory;
  for (const std::size_t bytes : {memory.until_input, memory.until_weight, memory.gradients,
                                  memory.scratch, needs.operator_bytes, needs.table_bytes}) {
    if (round_up(bytes, kBufferAlignment) < kTooManyBytes) continue;
    throw_usage("{} needs {} bytes; legal: at most {}", layer, bytes,
                kTooManyBytes / kBufferAlignment * kBufferAlignment);
  }
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

NetworkStage::NetworkStage(StageLayers parts)
    : layers_(std::move(parts.layers)),
      begin_(parts.begin),
      skips_(std::move(parts.skips)),
      model_(std::move(parts.model)) {
  std::size_t join = 0;
  const auto joins_before = [&](int number) {
    for (; join < skips_.joins().size() && skips_.joins()[join].to == number; ++join) {
      parts_.push_back({join, /*join=*/true});
    }
  };
  made_by_.assign(skips_.sources().size(), static_cast<std::size_t>(-1));
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    joins_before(layers_[i].number);
    for (std::size_t k = 0; k < made_by_.size(); ++k) {
      if (skips_.sources()[k].from == layers_[i].number) made_by_[k] = parts_.size();
    }
    parts_.push_back({i, /*join=*/false});
  }
  joins_before(begin_ + static_cast<int>(layers_.size()));
  source_gradients_.resize(made_by_.size());
  for (const NumberedLayer& each : layers_) {
    const std::size_t first = parameters_.size();
    each.layer->add_parameters(parameters_, fmt::format("{}.", each.number));
    if (!each.layer->overwrites_gradients()) continue;
    const std::vector<Parameter*> all = parameters_.all();
    for (std::size_t i = first; i < all.size(); ++i) all[i]->gradient.set_asks();
  }
}

ParameterSet* NetworkStage::parameters() {
  return parameters_.size() == 0 && parameters_.buffers().empty() ? nullptr : &parameters_;
}

// Adds the part's needs to `size`; returns its output.
TensorSpec NetworkStage::measure(const Part& part, const TensorSpec& in, ComputeContext& compute,
                                 Size& size) const {
  if (part.join) {
    const Skip& skip = skips_.joins()[part.index];
    require_gpu(skip.join == Join::kAdd, "skip() that concatenates", compute);
    size.needs.push_back({.layer = {}});
    return joined(skip, in, size.sources[skips_.source_of(skip.from)]);
  }
  const NumberedLayer& each = layers_[part.index];
  const TensorSpec out = output_of(each, in);
  require_gpu(each.layer->runs_on_gpu(), each.name(), compute);
  const LayerNeeds needs = naming(each.name(), [&] { return each.layer->needs(in, compute); });
  size.operator_bytes = std::max(size.operator_bytes, needs.operator_bytes);
  size.table_bytes = std::max(size.table_bytes, needs.table_bytes);
  if (size.note.empty()) size.note = needs.note;
  size.forward_sums += needs.forward_sums;
  size.backward_sums += needs.backward_sums;
  require_countable(needs, each.name());
  size.needs.push_back({.layer = needs.memory});
  return out;
}

NetworkStage::Size NetworkStage::size_of(std::span<const TensorSpec> inputs,
                                         ComputeContext& compute) const {
  Size size{.inputs = {inputs.begin(), inputs.end()},
            .specs = {inputs[0]},
            .sources = std::vector<TensorSpec>(made_by_.size()),
            .needs = {}};
  for (std::size_t k = 0; k < made_by_.size(); ++k) {
    const int input = skips_.sources()[k].input;
    if (input >= 0) size.sources[k] = inputs[static_cast<std::size_t>(input)];
  }
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const TensorSpec in = size.specs.back();
    const TensorSpec out = measure(parts_[i], in, compute, size);
    SlotMemory::Need& need = size.needs.back();
    need.output = i + 1 < parts_.size() ? out.bytes() : 0;
    need.input_gradient = i > 0 ? in.bytes() : 0;
    size.specs.push_back(out);
    for (std::size_t k = 0; k < made_by_.size(); ++k) {
      if (made_by_[k] == i) size.sources[k] = out;
    }
  }
  return size;
}

std::vector<TensorSpec> NetworkStage::outputs_of(const Size& size) const {
  std::vector<TensorSpec> outputs(skips_.outputs());
  outputs[0] = size.specs.back();
  for (std::size_t k = 0; k < made_by_.size(); ++k) {
    const int output = skips_.sources()[k].output;
    if (output >= 0) outputs[static_cast<std::size_t>(output)] = size.sources[k];
  }
  return outputs;
}

const NetworkStage::Size& NetworkStage::size_of(const StageContext& ctx) const {
  const TensorSpec& input = ctx.inputs[0].spec;
  for (const Size& size : sizes_) {
    if (size.specs.front() == input) return size;
  }
  throw_error(ErrorCode::kInternal, "a micro-batch {} was not prepared", to_string(input));
}

std::size_t NetworkStage::place_gradients(std::span<const Size> sizes,
                                          std::vector<std::size_t>* places) const {
  std::size_t used = 0;
  for (std::size_t k = 0; k < made_by_.size(); ++k) {
    const StageSkips::Source& source = skips_.sources()[k];
    if (places != nullptr) places->push_back(used);
    if (source.from < 0 || source.input > 0) continue;  // needs none, or is in a message
    std::size_t bytes = 0;
    for (const Size& size : sizes) bytes = std::max(bytes, size.sources[k].bytes());
    add_bytes(used, round_up(bytes, kBufferAlignment));
  }
  return used;
}

StageDescription NetworkStage::describe(std::span<const TensorSpec> inputs,
                                        ComputeContext& compute) const {
  if (inputs.size() != skips_.inputs()) {
    throw_usage("these layers take {} tensors, got {}; carrying() hands others past them",
                skips_.inputs(), inputs.size());
  }
  const Size size = size_of(inputs, compute);
  StageDescription description = SlotMemory::describe(size.needs);
  description.outputs = outputs_of(size);
  description.operator_bytes = size.operator_bytes;
  description.table_bytes = size.table_bytes;
  description.note = size.note;
  description.model = model_;
  description.forward_sums = size.forward_sums;
  description.backward_sums = size.backward_sums;
  add_bytes(description.workspace_bytes, place_gradients({&size, 1}, nullptr));
  for (const TensorSpec& input : inputs) {
    description.input_gradients.push_back(is_float(input.dtype));
  }
  for (const StageSkips::Source& source : skips_.sources()) {
    if (source.from < 0 && source.input > 0) {  // the model's input
      description.input_gradients[static_cast<std::size_t>(source.input)] = false;
    }
  }
  return description;
}

void NetworkStage::check_inputs(std::span<const Tensor> inputs) const {
  if (layers_.empty()) return;
  naming(layers_[0], [&] { layers_[0].layer->check_inputs(inputs[0]); });
}

void NetworkStage::prepare(const StageSetup& setup) {
  sizes_.clear();
  std::vector<SlotMemory::Need> needs(parts_.size());
  for (const std::vector<TensorSpec>& inputs : setup.input_sizes) {
    sizes_.push_back(size_of(inputs, *setup.compute));
    for (std::size_t i = 0; i < needs.size(); ++i) {
      needs[i] = largest(needs[i], sizes_.back().needs[i]);
    }
  }
  memory_.prepare(needs, setup.slots, setup.split_backward, *setup.compute);
  gradient_places_.clear();
  source_memory_ = setup.compute->memory().allocate(place_gradients(sizes_, &gradient_places_));
  trains_ = setup.trains;
  if (parameters() != nullptr) {
    parameters_.allocate(setup.compute->memory(), setup.seed, trains_);
  }
  for (const Size& size : sizes_) warm_up_size(*setup.compute, size);
  parameters_.zero_grads(setup.compute->stream());
}

void NetworkStage::prepare_size(ComputeContext& compute, std::span<const TensorSpec> inputs) {
  Size size = size_of(inputs, compute);
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (memory_.fits(i, size.needs[i])) continue;
    throw_usage("{} needs more memory for {} than for a larger micro-batch",
                parts_[i].join ? "skip()" : layers_[parts_[i].index].name(), to_string(inputs[0]));
  }
  sizes_.push_back(std::move(size));
  if (compute.device().kind == DeviceKind::kCpu) return;
  const GradientsAside aside(parameters_, compute.memory());
  warm_up_size(compute, sizes_.back());
}

// On a GPU: CUDA loads a kernel at its first launch. Gradients are overwritten, then added to.
// Buffers stay as they are. Temporary operands stand for the messages.
void NetworkStage::warm_up_size(ComputeContext& compute, const Size& size) {
  if (compute.device().kind == DeviceKind::kCpu || layers_.empty()) return;
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
  const std::vector<Tensor> inputs = zeros(size.inputs), outputs = zeros(outputs_of(size));
  StageContext ctx{.compute = compute};
  ctx.samples = size.specs.front().shape[0];
  ctx.loss_scale = 0.0;
  ctx.inputs = inputs;
  OneReplica alone;
  ctx.collective = &alone;
  const std::span<float> buffers = parameters_.flat_buffers();
  const Buffer kept =
      compute.memory().allocate(buffers.size_bytes(), DeviceMemory::Use::kTemporary);
  copy_async(kept.data(), buffers.data(), buffers.size_bytes(), compute.stream());
  warm_up(ctx, outputs);
  copy_async(buffers.data(), kept.data(), buffers.size_bytes(), compute.stream());
  compute.wait();  // before the operands are freed
}

void NetworkStage::warm_up(StageContext& ctx, std::span<const Tensor> outputs) {
  forward(ctx, ctx.inputs, outputs);
  if (!trains_) return;
  for (const Tensor& output : outputs) {
    fill_zero_async(output.data, output.spec.bytes(), ctx.compute.stream());
  }
  // The inputs are zeros, and their memory also serves for their gradients.
  const bool wanted = is_float(ctx.inputs[0].spec.dtype);
  for (const bool old : {true, false}) {
    parameters_.set_old_grads(old);
    backward(ctx, outputs, wanted ? ctx.inputs : std::span<const Tensor>{});
  }
}

LayerCall NetworkStage::call_of(StageContext& ctx, const Size& size, std::size_t part) const {
  LayerCall call = memory_.call(ctx, part);
  call.x = part == 0 ? ctx.inputs[0] : Tensor{memory_.output(ctx.slot, part - 1), size.specs[part]};
  return call;
}

Tensor NetworkStage::source(const StageContext& ctx, const Size& size, std::size_t index) const {
  const int input = skips_.sources()[index].input;
  if (input >= 0) return ctx.inputs[static_cast<std::size_t>(input)];
  return {memory_.output(ctx.slot, made_by_[index]), size.sources[index]};
}

void NetworkStage::run_forward(StageContext& ctx, const Size& size, std::size_t part,
                               const Tensor& y) {
  LayerCall call = call_of(ctx, size, part);
  if (parts_[part].join) {
    const Skip& skip = skips_.joins()[parts_[part].index];
    return join_forward(ctx.compute, skip, call.x, source(ctx, size, skips_.source_of(skip.from)),
                        y);
  }
  layer_forward(layers_[parts_[part].index], call, y);
}

void NetworkStage::forward(StageContext& ctx, std::span<const Tensor> /*inputs*/,
                           std::span<const Tensor> outputs) {
  const Size& size = size_of(ctx);
  if (parts_.empty()) copy(ctx, ctx.inputs[0], outputs[0]);
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    ctx.compute.progress();
    const bool last = i + 1 == parts_.size();
    run_forward(ctx, size, i,
                last ? outputs[0] : Tensor{memory_.output(ctx.slot, i), size.specs[i + 1]});
  }
  for (std::size_t k = 0; k < made_by_.size(); ++k) {
    const int output = skips_.sources()[k].output;
    if (output >= 0) copy(ctx, source(ctx, size, k), outputs[static_cast<std::size_t>(output)]);
  }
}

Tensor NetworkStage::output_gradient(const StageContext& ctx, const Size& size, std::size_t part,
                                     const Tensor& grad_output) const {
  if (part + 1 == parts_.size()) return grad_output;
  return {memory_.input_gradient(ctx.slot, part + 1), size.specs[part + 1]};
}

Tensor NetworkStage::input_gradient(const StageContext& ctx, const Size& size, std::size_t part,
                                    std::span<const Tensor> grad_inputs) const {
  if (part > 0) return {memory_.input_gradient(ctx.slot, part), size.specs[part]};
  return grad_inputs.empty() ? Tensor{nullptr, size.specs[0]} : grad_inputs[0];
}

void NetworkStage::begin_source_gradients(StageContext& ctx, const Size& size,
                                          std::span<const Tensor> grad_outputs,
                                          std::span<const Tensor> grad_inputs) {
  for (std::size_t k = 0; k < made_by_.size(); ++k) {
    const StageSkips::Source& source = skips_.sources()[k];
    SourceGradient& gradient = source_gradients_[k];
    gradient = {.sum = {nullptr, size.sources[k]}};
    if (source.from < 0) continue;
    if (source.input > 0) {
      gradient.sum = grad_inputs[static_cast<std::size_t>(source.input)];
    } else {
      gradient.sum.data = source_memory_.data() + gradient_places_[k];
    }
    if (source.output < 0) continue;
    copy(ctx, grad_outputs[static_cast<std::size_t>(source.output)], gradient.sum);
    gradient.begun = true;
  }
}

void NetworkStage::run_backward_input(StageContext& ctx, const Size& size, std::size_t part,
                                      const Tensor& dy, const Tensor& dx) {
  if (parts_[part].join) {
    const Skip& skip = skips_.joins()[parts_[part].index];
    SourceGradient& gradient = source_gradients_[skips_.source_of(skip.from)];
    join_backward(ctx.compute, skip, dy, dx, gradient.sum, gradient.begun);
    gradient.begun = true;
    return;
  }
  for (std::size_t k = 0; k < made_by_.size(); ++k) {
    // The last layer of a stage hands its output on by the main tensor alone.
    if (made_by_[k] == part && source_gradients_[k].begun) {
      add(ctx.compute, source_gradients_[k].sum, dy);
    }
  }
  if (dx.data == nullptr && size.needs[part].layer.gradients == 0) return;
  LayerCall call = call_of(ctx, size, part);
  layer_backward_input(layers_[parts_[part].index], call, dy, dx);
}

void NetworkStage::run_backward_weight(StageContext& ctx, const Size& size, std::size_t part,
                                       const Tensor& dy) {
  if (parts_[part].join) return;
  const NumberedLayer& each = layers_[parts_[part].index];
  LayerCall call = call_of(ctx, size, part);
  naming(each, [&] { each.layer->backward_weight(call, dy); });
}

// Where the stage's main input is a source too.
void NetworkStage::end_source_gradients(StageContext& ctx, std::span<const Tensor> grad_inputs) {
  if (grad_inputs.empty() || grad_inputs[0].data == nullptr) return;
  for (std::size_t k = 0; k < made_by_.size(); ++k) {
    const SourceGradient& gradient = source_gradients_[k];
    if (skips_.sources()[k].input == 0 && gradient.begun && gradient.sum.data != nullptr) {
      add(ctx.compute, gradient.sum, grad_inputs[0]);
    }
  }
}

void NetworkStage::run_backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                                std::span<const Tensor> grad_inputs, bool weights) {
  const Size& size = size_of(ctx);
  begin_source_gradients(ctx, size, grad_outputs, grad_inputs);
  if (parts_.empty() && !grad_inputs.empty() && grad_inputs[0].data != nullptr) {
    copy(ctx, grad_outputs[0], grad_inputs[0]);
  }
  for (std::size_t i = parts_.size(); i-- > 0;) {
    ctx.compute.progress();
    const Tensor dy = output_gradient(ctx, size, i, grad_outputs[0]);
    run_backward_input(ctx, size, i, dy, input_gradient(ctx, size, i, grad_inputs));
    if (weights) run_backward_weight(ctx, size, i, dy);
  }
  end_source_gradients(ctx, grad_inputs);
}

void NetworkStage::backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                            std::span<const Tensor> grad_inputs) {
  // Where each slot has its own gradients, as the two halves do.
  run_backward(ctx, grad_outputs, grad_inputs, /*weights=*/!memory_.split());
  if (memory_.split()) backward_weight(ctx, grad_outputs);
}

void NetworkStage::backward_input(StageContext& ctx, std::span<const Tensor> grad_outputs,
                                  std::span<const Tensor> grad_inputs) {
  run_backward(ctx, grad_outputs, grad_inputs, /*weights=*/false);
}

void NetworkStage::backward_weight(StageContext& ctx, std::span<const Tensor> grad_outputs) {
  const Size& size = size_of(ctx);
  for (std::size_t i = parts_.size(); i-- > 0;) {
    ctx.compute.progress();
    run_backward_weight(ctx, size, i, output_gradient(ctx, size, i, grad_outputs[0]));
  }
}

LossNetworkStage::LossNetworkStage(StageLayers parts, std::string kind, std::unique_ptr<Loss> loss)
    : NetworkStage(std::move(parts)), kind_(std::move(kind)), loss_(std::move(loss)) {}

StageDescription LossNetworkStage::describe(std::span<const TensorSpec> inputs,
                                            ComputeContext& compute) const {
  StageDescription description = NetworkStage::describe(inputs, compute);
  const TensorSpec& outputs = description.outputs[0];
  description.targets = {targets_of(outputs)};
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

void LossNetworkStage::warm_up(StageContext& ctx, std::span<const Tensor> outputs) {
  const TensorSpec spec = targets_of(outputs[0].spec);
  const Buffer zeros = ctx.compute.memory().allocate(spec.bytes(), DeviceMemory::Use::kTemporary);
  fill_zero_async(zeros.data(), spec.bytes(), ctx.compute.stream());
  const HostBuffer sum(ctx.compute.device(), sizeof(double));
  loss_->compute(ctx, outputs[0], {zeros.data(), spec}, reinterpret_cast<double*>(sum.data()));
  NetworkStage::warm_up(ctx, outputs);
  ctx.compute.wait();  // before the targets are freed
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
  ParameterSet* const set = parameters();
  if (ctx.phase == Phase::kTrain && set != nullptr && !loss_->leaves_gradients()) {
    set->settle_grads(ctx.compute.stream());
  }
  naming(kind_, [&] { loss_->compute(ctx, outputs[0], targets[0], sum); });
}

double LossNetworkStage::target_weight(std::span<const Tensor> targets) const {
  require_targets(outputs_, targets);
  return naming(kind_, [&] { return loss_->weight(outputs_, targets[0]); });
}

}  // namespace sluice
