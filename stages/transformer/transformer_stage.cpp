#include "stages/transformer/transformer_stage.hpp"

#include <fmt/format.h>

#include <algorithm>

#include <sluice/error.hpp>

#include "comm/base/byte_sums.hpp"

namespace sluice {

namespace {

// The only tensor of an edge, as [rows, columns]; null where there is none.
Tensor single(std::span<const Tensor> tensors) {
  return tensors.empty() || tensors[0].data == nullptr ? Tensor{} : as_rows(tensors[0]);
}

void require_single(std::span<const Tensor> tensors, const char* what) {
  if (tensors.size() != 1 || tensors[0].data == nullptr) {
    throw Error(ErrorCode::kInternal,
                fmt::format("a transformer stage was given {} {} tensors with data; expected 1",
                            std::count_if(tensors.begin(), tensors.end(),
                                          [](const Tensor& t) { return t.data != nullptr; }),
                            what));
  }
}

LayerMemory largest(const LayerMemory& a, const LayerMemory& b) {
  return {std::max(a.until_input, b.until_input), std::max(a.until_weight, b.until_weight),
          std::max(a.gradients, b.gradients), std::max(a.scratch, b.scratch)};
}

// Blocks with a window and blocks without may differ in what computes their attention.
void add_note(std::string& notes, const std::string& note) {
  if (note.empty() || notes.find(note) != std::string::npos) return;
  notes += (notes.empty() ? "" : "; ") + note;
}

bool fits(const LayerMemory& wanted, const LayerMemory& had) {
  return wanted.until_input <= had.until_input && wanted.until_weight <= had.until_weight &&
         wanted.gradients <= had.gradients && wanted.scratch <= had.scratch;
}

std::byte* at(const Buffer& buffer, std::size_t offset) {
  return buffer.data() == nullptr ? nullptr : buffer.data() + offset;
}

}  // namespace

TransformerStage::TransformerStage(const TransformerConfig& config, LayerRange range)
    : config_(config), range_(range), copies_(config.precision) {
  for (int layer = range.begin; layer < range.end; ++layer) {
    for (const std::size_t first : build_layer(config, layer, parameters_, copies_, layers_)) {
      first_parameters_.push_back(first);
    }
  }
  for (Parameter* parameter : parameters_.all()) parameter->gradient.set_asks();
  if (config.logit_chunks > 1 && has_head()) {
    chunking_head_ = dynamic_cast<const HeadLayer*>(layers_.back().get());
  }
}

ParameterSet* TransformerStage::parameters() { return layers_.empty() ? nullptr : &parameters_; }

BlockShape TransformerStage::shape_of(const TensorSpec& input, DeviceKind device) const {
  const Shape& shape = input.shape;
  const bool right = takes_tokens() ? input.dtype == DType::kI32 && shape.rank() == 2
                                    : input.dtype == config_.stream_precision &&
                                          shape.rank() == 3 && shape[2] == config_.width;
  if (!right || shape[0] < 1 || shape[1] < 1 || shape[1] > config_.context) {
    throw Error(
        ErrorCode::kUsage,
        fmt::format("a transformer stage of layers {} to {} was given an input {}; expected "
                    "{} with at least 1 sample and 1 to {} positions",
                    range_.begin, range_.end - 1, to_string(input),
                    takes_tokens() ? std::string("i32 [samples, sequence]")
                                   : fmt::format("{} [samples, sequence, {}]",
                                                 name_of(config_.stream_precision), config_.width),
                    config_.context));
  }
  return batch_shape(shape, device);
}

BlockShape TransformerStage::batch_shape(const Shape& shape, DeviceKind device) const {
  return {.samples = shape[0],
          .sequence = shape[1],
          .device = device,
          .by_sample = device == DeviceKind::kCpu && config_.sums_by_sample()};
}

TensorSpec TransformerStage::output_spec(const BlockShape& shape) const {
  const std::int64_t width = gives_logits() ? config_.vocabulary : config_.width;
  return {has_head() ? config_.precision : config_.stream_precision,
          Shape{shape.samples, shape.sequence, width}};
}

TensorSpec TransformerStage::targets_of(const TensorSpec& outputs) {
  return {DType::kI32, Shape{outputs.shape[0], outputs.shape[1]}};
}

StageDescription TransformerStage::describe(std::span<const TensorSpec> inputs,
                                            ComputeContext& compute) const {
  if (inputs.size() != 1) {
    throw Error(ErrorCode::kUsage,
                fmt::format("a transformer stage was described with {} inputs; it takes 1: {}",
                            inputs.size(),
                            takes_tokens() ? "tokens i32 [samples, sequence]"
                                           : "the residual stream [samples, sequence, width]"));
  }
  const BlockShape shape = shape_of(inputs[0], compute.device().kind);
  const std::size_t stream = round_up(stream_tensor(nullptr, shape).spec.bytes(), kBufferAlignment);
  const std::size_t rounded = round_up(rounded_spec(shape).bytes(), kBufferAlignment);
  StageDescription description;
  description.outputs = {output_spec(shape)};
  description.input_gradients = {!takes_tokens()};
  description.copy_bytes = copies_.bytes(compute.device().kind);
  LayerMemory most;
  OperatorMemory operators;
  if (gives_logits()) operators.workspace = softmax_cross_entropy_workspace(shape.rows());
  for (size_t i = 0; i < layers_.size(); ++i) {
    operators = largest(operators, layers_[i]->operators(compute, shape));
    add_note(description.note, layers_[i]->note(compute, shape));
    const LayerMemory memory = layers_[i]->memory(shape);
    add_bytes(description.state_bytes_until_input, memory.until_input);
    add_bytes(description.state_bytes_until_weight, memory.until_weight);
    add_bytes(description.gradient_bytes_until_weight, memory.gradients);
    if (layers_[i]->reads_rounded()) add_bytes(description.gradient_bytes_until_weight, rounded);
    if (i + 1 < layers_.size()) {  // a layer's output, and its gradient
      add_bytes(description.state_bytes_until_weight, stream);
      add_bytes(description.gradient_bytes_until_weight, stream);
    }
    most = largest(most, memory);
  }
  if (!layers_.empty()) {
    description.shared_gradient_bytes =
        sum_of_bytes({most.gradients, stream, reads_rounded() ? rounded : 0});
  }
  description.workspace_bytes = most.scratch;
  description.operator_bytes = operators.workspace;
  description.table_bytes = operators.tables;
  if (has_head()) description.targets = {targets_of(description.outputs[0])};
  return description;
}

LayerMemory TransformerStage::largest_memory(const StreamLayer& layer,
                                             std::span<const BlockShape> shapes) const {
  LayerMemory most;
  for (const BlockShape& shape : shapes) {
    most = largest(most, layer.memory(shape));
  }
  return most;
}

TransformerStage::Layout TransformerStage::lay_out(std::span<const BlockShape> shapes,
                                                   bool split) const {
  std::size_t stream = 0, rounded = 0;
  for (const BlockShape& shape : shapes) {
    stream = std::max(stream, stream_tensor(nullptr, shape).spec.bytes());
    rounded = std::max(rounded, rounded_spec(shape).bytes());
  }
  Layout layout;
  BumpAllocator state, gradients;
  std::size_t largest_gradients = 0;
  for (size_t i = 0; i < layers_.size(); ++i) {
    Place place;
    place.fits = largest_memory(*layers_[i], shapes);
    const auto take = [](BumpAllocator& allocator, std::size_t bytes) {
      const std::size_t offset = allocator.used();
      (void)allocator.bytes(bytes);
      return offset;
    };
    place.until_input = take(state, place.fits.until_input);
    place.until_weight = take(state, place.fits.until_weight);
    place.output = take(state, i + 1 < layers_.size() ? stream : 0);
    if (split) {
      place.gradients = take(gradients, place.fits.gradients);
      place.dinput = take(gradients, i > 0 ? stream : 0);
      place.rounded = take(gradients, layers_[i]->reads_rounded() ? rounded : 0);
    }
    largest_gradients = std::max(largest_gradients, place.fits.gradients);
    layout.scratch = std::max(layout.scratch, place.fits.scratch);
    layout.places.push_back(place);
  }
  if (!split) {  // one shared area, then one gradient of the residual stream
    (void)gradients.bytes(largest_gradients);
    const std::size_t dinput = gradients.used();
    (void)gradients.bytes(stream);
    const std::size_t copy = gradients.used();
    (void)gradients.bytes(reads_rounded() ? rounded : 0);
    for (Place& place : layout.places) {
      place.dinput = dinput;
      place.rounded = copy;
    }
  }
  layout.slot_state = state.used();
  layout.slot_gradients = layers_.empty() ? 0 : gradients.used();
  return layout;
}

void TransformerStage::prepare(const StageSetup& setup) {
  if (setup.compute == nullptr || setup.slots < 1 || setup.input_sizes.empty()) {
    throw Error(ErrorCode::kInternal,
                fmt::format("a transformer stage was prepared with {} slots and {} micro-batch "
                            "sizes; it needs a compute context and at least 1 of each",
                            setup.slots, setup.input_sizes.size()));
  }
  shapes_.clear();
  for (const std::vector<TensorSpec>& inputs : setup.input_sizes) {
    (void)describe(inputs, *setup.compute);
    shapes_.push_back(shape_of(inputs[0], setup.compute->device().kind));
  }
  slots_ = setup.slots;
  split_ = setup.split_backward;
  trains_ = setup.trains;
  layout_ = lay_out(shapes_, split_);

  const DeviceMemory& memory = setup.compute->memory();
  const auto slots = static_cast<size_t>(slots_);
  state_ = memory.allocate(slots * layout_.slot_state);
  gradients_ = memory.allocate((split_ ? slots : 1) * layout_.slot_gradients);
  scratch_ = memory.allocate(layout_.scratch);
  for (const Buffer* buffer : {&state_, &gradients_, &scratch_}) {
    // Touches every page before the first step.
    fill_zero_async(buffer->data(), buffer->size(), setup.compute->stream());
  }
  parameters_.allocate(memory, setup.seed, trains_);
  copies_.allocate(memory);
  if (trains_) find_first_gradients();
  for (size_t i = 0; i < shapes_.size(); ++i) {
    warm_up_size(*setup.compute, shapes_[i], setup.input_sizes[i][0]);
  }
  parameters_.zero_grads(setup.compute->stream());
}

void TransformerStage::prepare_size(ComputeContext& compute, std::span<const TensorSpec> inputs) {
  const BlockShape shape = shape_of(inputs[0], compute.device().kind);
  require_fits(shape);
  if (compute.device().kind == DeviceKind::kCpu) return;
  const GradientsAside aside(parameters_, compute.memory());
  warm_up_size(compute, shape, inputs[0]);
}

// A product's first run creates primitives and loads the library's kernels: it runs once, on zeros,
// as it overwrites a gradient and as it adds to one. Temporary operands stand for the messages.
void TransformerStage::warm_up_size(ComputeContext& compute, const BlockShape& shape,
                                    const TensorSpec& in_spec) {
  if (layers_.empty()) return;
  begin_step(compute);
  const TensorSpec out_spec = output_spec(shape);
  const DeviceMemory& memory = compute.memory();
  const Buffer in = memory.allocate(in_spec.bytes(), DeviceMemory::Use::kTemporary);
  const Buffer out = memory.allocate(out_spec.bytes(), DeviceMemory::Use::kTemporary);
  fill_zero_async(in.data(), in_spec.bytes(), compute.stream());
  const Tensor input{in.data(), in_spec};
  const Tensor output{out.data(), out_spec};
  StageContext ctx{.compute = compute};
  ctx.samples = shape.samples;
  ctx.loss_scale = 0.0;
  ctx.inputs = {&input, 1};
  if (config_.dropout > 0) {  // evaluation runs other attention then
    ctx.phase = Phase::kEvaluate;
    forward(ctx, ctx.inputs, {&output, 1});
    ctx.phase = Phase::kTrain;
  }
  warm_up(ctx, ctx.inputs, {&output, 1});
  compute.wait();  // before the operands are freed
}

void TransformerStage::warm_up(StageContext& ctx, std::span<const Tensor> inputs,
                               std::span<const Tensor> outputs) {
  forward(ctx, inputs, outputs);
  if (!trains_) return;
  fill_zero(ctx.compute, outputs[0]);
  // Inputs and outputs are zeros; the input's memory also serves for its gradient.
  const std::span<const Tensor> grad_inputs = takes_tokens() ? std::span<const Tensor>{} : inputs;
  for (const bool old : {true, false}) {
    parameters_.set_old_grads(old);
    backward(ctx, outputs, grad_inputs);
  }
}

void TransformerStage::require_fits(const BlockShape& shape) const {
  if (std::find(shapes_.begin(), shapes_.end(), shape) != shapes_.end()) {
    return;
  }
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (!fits(layers_[i]->memory(shape), layout_.places[i].fits)) {
      throw Error(
          ErrorCode::kInternal,
          fmt::format("a micro-batch of {} samples and {} positions does not fit the state "
                      "prepared for {} and {}; name its size to prepare()",
                      shape.samples, shape.sequence, shapes_.empty() ? 0 : shapes_[0].samples,
                      shapes_.empty() ? 0 : shapes_[0].sequence));
    }
  }
}

BlockShape TransformerStage::begin_call(const StageContext& ctx,
                                        std::span<const Tensor> inputs) const {
  require_single(inputs, "input");
  if (ctx.slot < 0 || ctx.slot >= slots_) {
    throw Error(ErrorCode::kInternal, fmt::format("micro-batch {} in slot {} of a stage prepared "
                                                  "for {} slots",
                                                  ctx.micro_batch, ctx.slot, slots_));
  }
  const BlockShape shape = shape_of(inputs[0].spec, ctx.compute.device().kind);
  require_fits(shape);
  return shape;
}

void TransformerStage::check_inputs(std::span<const Tensor> inputs) const {
  if (!takes_tokens()) return;
  require_single(inputs, "input");
  const auto* begin = inputs[0].as<const std::int32_t>();
  const auto* const end = begin + inputs[0].elements();
  const auto vocabulary = static_cast<std::uint32_t>(config_.vocabulary);
  std::uint32_t most = 0;
  for (const auto* token = begin; token != end; ++token) {
    most = std::max(most, static_cast<std::uint32_t>(*token));
  }
  if (most >= vocabulary) {
    throw Error(ErrorCode::kData,
                fmt::format("token {} is outside the vocabulary; legal: 0 to {}",
                            static_cast<std::int32_t>(most), config_.vocabulary - 1));
  }
}

StreamCall TransformerStage::call_of(StageContext& ctx, const BlockShape& shape,
                                     size_t layer) const {
  const Place& place = layout_.places[layer];
  const auto slot = static_cast<size_t>(ctx.slot);
  const std::size_t state = slot * layout_.slot_state;
  const std::size_t gradients = split_ ? slot * layout_.slot_gradients : 0;
  return {.stage = ctx,
          .shape = shape,
          .until_input = at(state_, state + place.until_input),
          .until_weight = at(state_, state + place.until_weight),
          .gradients = at(gradients_, gradients + place.gradients),
          .scratch = at(scratch_, 0)};
}

Tensor TransformerStage::stream_tensor(std::byte* data, const BlockShape& shape) const {
  return {data, {config_.stream_precision, Shape{shape.rows(), config_.width}}};
}

Tensor TransformerStage::layer_output(const StageContext& ctx, const BlockShape& shape,
                                      size_t layer) const {
  const std::size_t slot = static_cast<size_t>(ctx.slot) * layout_.slot_state;
  return stream_tensor(at(state_, slot + layout_.places[layer].output), shape);
}

Tensor TransformerStage::layer_input(const StageContext& ctx, const BlockShape& shape,
                                     size_t layer) const {
  return layer == 0 ? single(ctx.inputs) : layer_output(ctx, shape, layer - 1);
}

bool TransformerStage::reads_rounded() const {
  return std::any_of(layers_.begin(), layers_.end(),
                     [](const auto& layer) { return layer->reads_rounded(); });
}

TensorSpec TransformerStage::rounded_spec(const BlockShape& shape) const {
  return {DType::kBf16, Shape{shape.rows(), config_.width}};
}

Tensor TransformerStage::rounded_gradient(const StageContext& ctx, const BlockShape& shape,
                                          size_t layer) const {
  if (!layers_[layer]->reads_rounded()) return {};
  const std::size_t slot = split_ ? static_cast<size_t>(ctx.slot) * layout_.slot_gradients : 0;
  return {at(gradients_, slot + layout_.places[layer].rounded), rounded_spec(shape)};
}

// With respect to the layer's output.
StreamGradient TransformerStage::layer_gradient(const StageContext& ctx, const BlockShape& shape,
                                                size_t layer, const Tensor& grad_output) const {
  const Tensor rounded = rounded_gradient(ctx, shape, layer);
  if (layer + 1 == layers_.size()) return {grad_output, rounded};
  const std::size_t slot = split_ ? static_cast<size_t>(ctx.slot) * layout_.slot_gradients : 0;
  return {stream_tensor(at(gradients_, slot + layout_.places[layer + 1].dinput), shape), rounded};
}

StreamGradient TransformerStage::take_gradient(StageContext& ctx, const BlockShape& shape,
                                               const Tensor& grad_output) const {
  const Tensor rounded = rounded_gradient(ctx, shape, layers_.size() - 1);
  if (rounded.data != nullptr) convert(ctx.compute, grad_output, rounded);
  return {grad_output, rounded};
}

void TransformerStage::begin_step(ComputeContext& compute) { copies_.refresh(compute); }

void TransformerStage::find_first_gradients() {
  const std::vector<Parameter*> all = parameters_.all();
  const std::span<const float> flat = parameters_.flat_grads();
  first_gradients_.clear();
  for (const std::size_t first : first_parameters_) {
    first_gradients_.push_back(
        first == all.size()
            ? flat.size()
            : static_cast<std::size_t>(all[first]->grad.as<const float>() - flat.data()));
  }
}

void TransformerStage::announce_final(const StageContext& ctx, size_t layer) const {
  if (ctx.final_gradients != nullptr) ctx.final_gradients->from(first_gradients_[layer]);
}

void TransformerStage::forward(StageContext& ctx, std::span<const Tensor> inputs,
                               std::span<const Tensor> outputs) {
  const BlockShape shape = begin_call(ctx, inputs);
  require_single(outputs, "output");
  if (layers_.empty()) {
    copy_or_convert(ctx.compute, inputs[0], outputs[0]);
    return;
  }
  for (size_t i = 0; i < layers_.size(); ++i) {
    StreamCall call = call_of(ctx, shape, i);
    const bool last = i + 1 == layers_.size();
    layers_[i]->forward(call, layer_input(ctx, shape, i),
                        last ? single(outputs) : layer_output(ctx, shape, i));
  }
}

void TransformerStage::backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                                std::span<const Tensor> grad_inputs) {
  if (split_) {  // each slot has its own gradients
    backward_input(ctx, grad_outputs, grad_inputs);
    backward_weight(ctx, grad_outputs);
    return;
  }
  const BlockShape shape = begin_call(ctx, ctx.inputs);
  require_single(grad_outputs, "output gradient");
  const Tensor wanted = single(grad_inputs);
  if (layers_.empty()) {
    if (wanted.data != nullptr) copy_or_convert(ctx.compute, single(grad_outputs), wanted);
    return;
  }
  StreamGradient dout = take_gradient(ctx, shape, single(grad_outputs));
  for (size_t i = layers_.size(); i-- > 0;) {
    StreamCall call = call_of(ctx, shape, i);
    StreamGradient din{wanted};
    if (i > 0) {
      din = layer_gradient(ctx, shape, i - 1, {});
      if (wanted.data != nullptr) din.value = wanted;  // accumulates in the caller's gradient
    }
    layers_[i]->backward(call, layer_input(ctx, shape, i), dout, din);
    announce_final(ctx, i);
    dout = din;
  }
}

void TransformerStage::backward_input(StageContext& ctx, std::span<const Tensor> grad_outputs,
                                      std::span<const Tensor> grad_inputs) {
  if (!split_) {
    throw Error(ErrorCode::kInternal, "backward_input on a stage prepared without split_backward");
  }
  const BlockShape shape = begin_call(ctx, ctx.inputs);
  require_single(grad_outputs, "output gradient");
  const Tensor wanted = single(grad_inputs);
  if (layers_.empty()) {
    if (wanted.data != nullptr) copy_or_convert(ctx.compute, single(grad_outputs), wanted);
    return;
  }
  StreamGradient dout = take_gradient(ctx, shape, single(grad_outputs));
  for (size_t i = layers_.size(); i-- > 0;) {
    StreamCall call = call_of(ctx, shape, i);
    const StreamGradient din =
        i > 0 ? layer_gradient(ctx, shape, i - 1, {}) : StreamGradient{wanted};
    layers_[i]->backward_input(call, layer_input(ctx, shape, i), dout, din);
    dout = din;
  }
}

void TransformerStage::backward_weight(StageContext& ctx, std::span<const Tensor> grad_outputs) {
  const BlockShape shape = begin_call(ctx, ctx.inputs);
  require_single(grad_outputs, "output gradient");
  for (size_t i = layers_.size(); i-- > 0;) {
    StreamCall call = call_of(ctx, shape, i);
    layers_[i]->backward_weight(call, layer_input(ctx, shape, i),
                                layer_gradient(ctx, shape, i, single(grad_outputs)));
    announce_final(ctx, i);
  }
}

void LastTransformerStage::warm_up(StageContext& ctx, std::span<const Tensor> inputs,
                                   std::span<const Tensor> outputs) {
  const TensorSpec spec = targets_of(outputs[0].spec);
  const Buffer zeros = ctx.compute.memory().allocate(spec.bytes(), DeviceMemory::Use::kTemporary);
  const HostBuffer sum(ctx.compute.device(), sizeof(double));
  fill_zero_async(zeros.data(), spec.bytes(), ctx.compute.stream());
  const Tensor targets{zeros.data(), spec};
  forward(ctx, inputs, outputs);
  if (trains()) {
    parameters()->set_old_grads(true);
  } else {
    ctx.phase = Phase::kEvaluate;  // there are no gradients
  }
  const int times = trains() && chunking_head() != nullptr ? 2 : 1;  // the second adds to gradients
  for (int i = 0; i < times; ++i) {
    loss(ctx, outputs, {&targets, 1}, reinterpret_cast<double*>(sum.data()));
  }
  TransformerStage::warm_up(ctx, inputs, outputs);
  ctx.compute.wait();
}

void LastTransformerStage::loss(StageContext& ctx, std::span<const Tensor> outputs,
                                std::span<const Tensor> targets, double* sum) {
  require_single(outputs, "output");
  require_single(targets, "target");
  const Tensor logits = as_rows(outputs[0]);  // or the norm's results
  if (targets[0].elements() != logits.shape()[0]) {
    throw Error(ErrorCode::kInternal,
                fmt::format("targets {} do not fit logits {}", to_string(targets[0].spec),
                            to_string(outputs[0].spec)));
  }
  const Tensor flat{targets[0].data, {DType::kI32, Shape{targets[0].elements()}}};
  if (chunking_head() != nullptr) {
    const BlockShape shape = batch_shape(outputs[0].shape(), ctx.compute.device().kind);
    chunking_head()->loss(ctx.compute, shape, scratch(),
                          {logits, flat, ctx.loss_scale, ctx.phase == Phase::kTrain, sum});
    return;
  }
  softmax_cross_entropy(ctx.compute, logits, flat, ctx.loss_scale, ctx.phase == Phase::kTrain, sum);
}

std::string LastTransformerStage::why_no_answers() const {
  if (chunking_head() == nullptr) return {};
  return fmt::format(
      "a transformer with {} chunks of logits (TransformerConfig::logit_chunks) gives none to "
      "infer(); legal there is 1",
      config().logit_chunks);
}

double LastTransformerStage::target_weight(std::span<const Tensor> targets) const {
  require_single(targets, "target");
  if (targets[0].spec.dtype != DType::kI32) {
    throw Error(ErrorCode::kInternal, fmt::format("targets {}; expected i32 [samples, sequence]",
                                                  to_string(targets[0].spec)));
  }
  const std::span<const std::int32_t> values{targets[0].as<const std::int32_t>(),
                                             static_cast<size_t>(targets[0].elements())};
  std::int64_t counted = 0;
  std::int32_t most = -1;
  for (const std::int32_t target : values) {
    counted += target >= 0 ? 1 : 0;
    most = std::max(most, target);
  }
  if (most >= config().vocabulary) {
    throw Error(ErrorCode::kData,
                fmt::format("target {} is outside the vocabulary; legal: 0 to {}, "
                            "or negative for none",
                            most, config().vocabulary - 1));
  }
  return static_cast<double>(counted);
}

}  // namespace sluice
