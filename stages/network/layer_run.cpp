#include "stages/network/layer_run.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/operators.hpp>

#include "comm/base/byte_sums.hpp"
#include "comm/base/throw_error.hpp"
#include "stages/network/converted.hpp"
#include "stages/network/specs.hpp"
#include "stages/tensor/bump_allocator.hpp"

namespace sluice::nn {
namespace {

std::size_t take(BumpAllocator& allocator, std::size_t bytes) {
  const std::size_t offset = allocator.used();
  (void)allocator.bytes(bytes);
  return offset;
}

std::size_t aligned(std::size_t bytes) { return round_up(bytes, kBufferAlignment); }

TensorSpec rounded_spec(const TensorSpec& spec) { return {DType::kBf16, spec.shape}; }

void copy(StageContext& ctx, const Tensor& from, const Tensor& to) {
  copy_async(to.data, from.data, from.spec.bytes(), ctx.compute.stream());
}

// Where the numbers of a block's layers for random numbers begin: beyond those of a model's layers,
// and others for every block, however blocks are nested.
int first_drawn(int number, ResidualPart part) {
  constexpr std::uint32_t kBeyondLayers = 1U << 20;
  const std::uint32_t mixed =
      (static_cast<std::uint32_t>(number) * 2 + static_cast<std::uint32_t>(part) + 1) * 2654435761U;
  return static_cast<int>((mixed >> 10) + kBeyondLayers);
}

void append_parts(const LayerSpec& group, const NumberedLayer& at, int first,
                  std::vector<NumberedLayer>& layers);

void append(const LayerSpec& spec, const NumberedLayer& at, int drawn,
            std::vector<NumberedLayer>& layers) {
  if (!spec.make) {
    throw_usage("{}() within another layer; legal: between the layers of the model", spec.kind);
  }
  if (!spec.parts.empty()) {
    const int first = spec.one_number ? drawn : first_drawn(drawn, ResidualPart::kMain);
    return append_parts(spec, at, first, layers);
  }
  NumberedLayer& made =
      layers.emplace_back(NumberedLayer{at.number, at.path, at.name, spec.kind, nullptr,
                                        spec.trusted, spec.trusted, spec.replicated});
  naming(made, [&] {
    made.layer = spec.make(drawn);
    if (made.layer == nullptr) throw_usage("made nothing");
  });
}

void append_parts(const LayerSpec& group, const NumberedLayer& at, int first,
                  std::vector<NumberedLayer>& layers) {
  for (std::size_t i = 0; i < group.parts.size(); ++i) {
    const LayerSpec& part = group.parts[i];
    // Sluice's own parts of one number draw at places of their own.
    const bool shares = group.one_number && part.trusted;
    const int begin = group.one_number ? first_drawn(first, ResidualPart::kMain) : first;
    const std::string number = std::to_string(i);
    append(part,
           {.number = at.number,
            .path = at.path.empty() ? number : at.path + "." + number,
            .name = at.name + part.name.value_or(number + ".")},
           shares ? first : begin + static_cast<int>(i), layers);
  }
}

// Adds what the notes do not say yet: blocks with a window and blocks without may differ in what
// computes their attention.
void add_note(std::string& notes, const std::string& note) {
  if (note.empty() || notes.find(note) != std::string::npos) return;
  notes += (notes.empty() ? "" : "; ") + note;
}

LayerNeeds needs_of(const Layer& layer, const TensorSpec& input, ComputeContext& compute) {
  LayerNeeds needs = layer.needs(input, compute);
  const StageCollectives& made = needs.collectives;
  if (made.loss.empty() && made.answer.empty() && made.backward_weight.empty() &&
      made.recompute.empty()) {
    return needs;
  }
  throw_usage(
      "needs() has collectives of {}; legal in a layer: collectives.forward and "
      "collectives.backward_input",
      !made.loss.empty()        ? "loss"
      : !made.answer.empty()    ? "answer"
      : !made.recompute.empty() ? "recompute"
                                : "backward_weight");
}

}  // namespace

void add_needs(LayerNeeds& all, const LayerNeeds& part, bool backward_first) {
  all.operator_bytes = std::max(all.operator_bytes, part.operator_bytes);
  all.table_bytes = std::max(all.table_bytes, part.table_bytes);
  StageCollectives& made = all.collectives;
  const auto insert = [](auto& list, auto place, const auto& added) {
    list.insert(place, added.begin(), added.end());
  };
  insert(made.forward, made.forward.end(), part.collectives.forward);
  insert(made.backward_input,
         backward_first ? made.backward_input.begin() : made.backward_input.end(),
         part.collectives.backward_input);
  add_note(all.note, part.note);
}

std::string NumberedLayer::full_name() const { return fmt::format("layer {} ({})", path, kind); }

std::string text_of(const LayerSpec& spec) {
  std::string text = spec.settings;
  if (!spec.parts.empty()) text += (text.empty() ? "" : "; ") + text_of(spec.parts);
  return fmt::format("{}({})", spec.kind, text);
}

std::string text_of(std::span<const LayerSpec> specs) {
  std::string all;
  for (const LayerSpec& each : specs) all += (all.empty() ? "" : ", ") + text_of(each);
  return all;
}

std::optional<ShardForms::Form> made_of(const ShardForms& forms,
                                        std::optional<ShardForms::Form> input) {
  if (!input) return {};
  return *input == ShardForms::kWhole ? forms.of_whole : forms.of_panels;
}

ShardForms forms_of(const LayerSpec& layer) {
  return layer.parts.empty() ? layer.forms : forms_of(layer.parts);
}

ShardForms forms_of(std::span<const LayerSpec> layers) {
  ShardForms all{.of_panels = ShardForms::kPanels, .dealt = true};
  for (const LayerSpec& layer : layers) {
    const ShardForms next = forms_of(layer);
    all = {made_of(next, all.of_whole), made_of(next, all.of_panels), all.dealt && next.dealt};
  }
  return all;
}

ShardForms forms_of_sum(const ShardForms& first, const ShardForms& second) {
  const auto both = [](const auto& a, const auto& b) {
    return a == b ? a : std::optional<ShardForms::Form>{};
  };
  return {both(first.of_whole, second.of_whole), both(first.of_panels, second.of_panels),
          first.dealt && second.dealt};
}

std::vector<NumberedLayer> make_layers(const LayerSpec& spec, int number, int drawn) {
  std::vector<NumberedLayer> layers;
  const std::string path = std::to_string(number);
  append(spec, {.number = number, .path = path, .name = spec.name.value_or(path + ".")}, drawn,
         layers);
  return layers;
}

std::vector<NumberedLayer> make_inner_layers(std::span<const LayerSpec> specs, int number,
                                             ResidualPart part) {
  LayerSpec all;
  all.parts = {specs.begin(), specs.end()};
  std::vector<NumberedLayer> layers;
  if (!specs.empty()) append_parts(all, {}, first_drawn(number, part), layers);
  return layers;
}

LayerRun::LayerRun(std::vector<NumberedLayer> layers, Options options)
    : layers_(std::move(layers)),
      recomputes_(options.recomputes),
      outermost_(options.outermost),
      rounds_(options.rounds),
      skips_(std::move(options.skips)) {
  std::size_t join = 0;
  const auto joins_before = [&](int number) {
    for (; join < skips_.joins().size() && skips_.joins()[join].to == number; ++join) {
      parts_.push_back({.index = join, .join = true, .promises = {.capturable = true}});
    }
  };
  made_by_.assign(skips_.sources().size(), static_cast<std::size_t>(-1));
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    joins_before(layers_[i].number);
    for (std::size_t k = 0; k < made_by_.size(); ++k) {
      if (skips_.sources()[k].from == layers_[i].number) made_by_[k] = parts_.size();
    }
    parts_.push_back({.index = i, .promises = layers_[i].layer->promises()});
  }
  joins_before(layers_.empty() ? options.begin : layers_.back().number + 1);
  if (outermost_ && !parts_.empty() && !parts_.back().join) {
    recomputing_ = dynamic_cast<Recomputing*>(layers_.back().layer.get());
  }
  source_gradients_.resize(made_by_.size());
  set_shards(options.shards);
  set_precision(options.precision);
}

void LayerRun::set_shards(const Shards& shards) {
  if (shards.count == 1) return;
  for (Part& part : parts_) {
    if (part.join) continue;
    const NumberedLayer& each = layers_[part.index];
    if (each.replicated) continue;
    if (!naming(each, [&] { return each.layer->set_shards(shards); })) {
      throw_usage(
          "{} does not say how {} shards divide it (Layer::set_shards); legal: 1 shard, of 1 rank, "
          "and nn::replicated() of it",
          each.full_name(), shards.count);
    }
    part.promises = each.layer->promises();
  }
}

void LayerRun::set_precision(const Precision& precision) {
  if (precision.operands == DType::kF32) return;
  for (Part& part : parts_) {
    if (part.join) continue;
    NumberedLayer& each = layers_[part.index];
    const Edges edges = naming(each, [&] { return each.layer->set_precision(precision); });
    part.falls_back = edges == Edges::kF32;
    if (edges != Edges::kStream) {
      const DType takes = edges == Edges::kOperands ? precision.operands : DType::kF32;
      each.layer = converted(std::move(each.layer), takes, precision.stream, each.forward_watched);
    }
    part.promises = each.layer->promises();
  }
}

void LayerRun::add_parameters(ParameterSet& set, const std::string& name) {
  for (Part& part : parts_) {
    if (part.join) continue;
    const NumberedLayer& each = layers_[part.index];
    if (outermost_) set.begin_unit();
    part.first_parameter = set.size();
    each.layer->add_parameters(set, name + each.name);
    part.parameters = set.size() - part.first_parameter;
    part.overwrites = part.parameters == 0 || each.layer->overwrites_gradients();
    overwrites_gradients_ = overwrites_gradients_ && part.overwrites;
  }
  if (!outermost_) return;
  const std::vector<Parameter*> all = set.all();
  for (Part& part : parts_) {
    if (part.parameters > 0) part.unit = all[part.first_parameter]->unit;
    for (std::size_t i = 0; i < part.parameters; ++i) {
      Parameter& parameter = *all[part.first_parameter + i];
      parameter.unit = part.unit;  // the layer may have begun some
      if (part.overwrites) parameter.asks_next_write = true;
    }
  }
}

void LayerRun::find_gradients(ParameterSet& set) {
  const std::vector<Parameter*> all = set.all();
  const float* const flat = set.flat_grads().data();
  for (Part& part : parts_) {
    if (part.parameters == 0) continue;
    part.first_gradient =
        static_cast<std::size_t>(all[part.first_parameter]->grad.as<const float>() - flat);
  }
}

bool LayerRun::runs_on_gpu() const {
  return std::all_of(layers_.begin(), layers_.end(),
                     [](const NumberedLayer& each) { return each.layer->runs_on_gpu(); });
}

LayerPromises LayerRun::promises() const {
  LayerPromises all{.recomputes = true, .capturable = true, .in_place = true};
  for (const Part& part : parts_) {
    all.recomputes = all.recomputes && part.promises.recomputes;
    all.capturable = all.capturable && part.promises.capturable;
  }
  if (parts_.empty()) return all;
  all.in_place = parts_.size() > 1 || parts_[0].promises.in_place;
  all.keeps_alone = parts_.back().promises.keeps_alone;
  all.reads_rounded = !rounds_ && parts_.back().promises.reads_rounded;
  all.writes_rounded = true;
  return all;
}

TensorSpec LayerRun::output(TensorSpec spec) const {
  for (const NumberedLayer& each : layers_) {
    spec = naming(each, [&] { return each.layer->output(spec); });
  }
  return spec;
}

double LayerRun::cost(TensorSpec spec) const {
  double sum = 0;
  for (const NumberedLayer& each : layers_) {
    const TensorSpec out = naming(each, [&] { return each.layer->output(spec); });
    sum += each.layer->cost(spec);
    spec = out;
  }
  return sum;
}

void LayerRun::check_inputs(const Tensor& x) const {
  if (layers_.empty()) return;
  naming(layers_[0], [&] { layers_[0].layer->check_inputs(x); });
}

// Adds the part's needs to the plan; returns its output.
TensorSpec LayerRun::measure(std::size_t index, const TensorSpec& in, ComputeContext& compute,
                             Plan& plan) const {
  const Part& part = parts_[index];
  Place& place = plan.places.emplace_back();
  const auto require_device = [&](bool runs, const std::string& who) {
    if (runs || compute.device().kind == DeviceKind::kCpu) return;
    throw_usage("{} runs on CPUs alone; give its stage a CPU (--device)", who);
  };
  if (part.join) {
    const Skip& skip = skips_.joins()[part.index];
    require_device(skip.join == Join::kAdd, "skip() that concatenates");
    return joined(skip, in, plan.sources[skips_.source_of(skip.from)]);
  }
  const NumberedLayer& each = layers_[part.index];
  const TensorSpec out = naming(each, [&] { return each.layer->output(in); });
  require_device(each.layer->runs_on_gpu(), each.full_name());
  place.needs = naming(each, [&] { return needs_of(*each.layer, in, compute); });
  place.again = recomputes_ && part.promises.recomputes;
  LayerNeeds& all = plan.needs;
  add_needs(all, place.needs, /*backward_first=*/true);
  // By kind: layers within others are counted from 0 again.
  if (recomputes_ && !place.again) {
    add_note(all.note, each.kind + " is not recomputed: it does not promise it");
  }
  if (part.falls_back && (has_numbers(in) || has_numbers(out))) {
    add_note(all.note, each.kind + " computes in f32: it does not say what it takes of bf16");
  }
  return out;
}

const LayerRun::Plan& LayerRun::plan_of(std::span<const TensorSpec> inputs,
                                        ComputeContext& compute) const {
  for (const Plan& plan : plans_) {
    if (std::equal(inputs.begin(), inputs.end(), plan.inputs.begin(), plan.inputs.end())) {
      return plan;
    }
  }
  Plan plan;
  plan.inputs = {inputs.begin(), inputs.end()};
  plan.specs = {inputs[0]};
  plan.sources.resize(made_by_.size());
  for (std::size_t k = 0; k < made_by_.size(); ++k) {
    const int input = skips_.sources()[k].input;
    if (input >= 0) plan.sources[k] = inputs[static_cast<std::size_t>(input)];
  }
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    plan.specs.push_back(measure(i, TensorSpec(plan.specs.back()), compute, plan));
    for (std::size_t k = 0; k < made_by_.size(); ++k) {
      if (made_by_[k] == i) plan.sources[k] = plan.specs.back();
    }
  }
  plan_again(plan);
  lay_out(plan);
  lay_out_shared(plan);
  return plans_.emplace_back(std::move(plan));
}

// The collectives of keep_again(), which come first in a backward that recomputes.
void LayerRun::plan_again(Plan& plan) const {
  std::vector<PlannedCollective>& all = plan.needs.again.emplace();
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const Place& place = plan.places[i];
    if (recomputes_ && !place.again) continue;
    const bool last = i + 1 == parts_.size();
    if (last && !keeps(place)) continue;
    if (last && place.needs.again) {
      all.insert(all.end(), place.needs.again->begin(), place.needs.again->end());
      continue;
    }
    std::ranges::copy_if(place.needs.collectives.forward, std::back_inserter(all),
                         [](const auto& each) { return each.axis == CollectiveAxis::kTensor; });
  }
  if (!recomputes_) return;
  std::vector<PlannedCollective>& backward = plan.needs.collectives.backward_input;
  backward.insert(backward.begin(), all.begin(), all.end());
}

bool LayerRun::keeps(const Place& place) {
  return place.needs.memory.until_input > 0 || place.needs.memory.until_weight > 0;
}

std::vector<TensorSpec> LayerRun::outputs_of(const Plan& plan) const {
  std::vector<TensorSpec> outputs(skips_.outputs());
  outputs[0] = plan.specs.back();
  for (std::size_t k = 0; k < made_by_.size(); ++k) {
    const int output = skips_.sources()[k].output;
    if (output >= 0) outputs[static_cast<std::size_t>(output)] = plan.sources[k];
  }
  return outputs;
}

bool LayerRun::reads_rounded(const Plan& plan, std::size_t part) const {
  return parts_[part].promises.reads_rounded && plan.specs[part + 1].dtype == DType::kF32;
}

bool LayerRun::in_place(const Plan& plan, std::size_t part) const {
  return parts_[part].promises.in_place && plan.specs[part] == plan.specs[part + 1] &&
         has_numbers(plan.specs[part]);
}

void LayerRun::lay_out(Plan& plan) const {
  BumpAllocator until_input, until_weight, lasting, gradients, scratch;
  std::size_t scratch_of_a_layer = 0;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    Place& place = plan.places[i];
    const LayerMemory& memory = place.needs.memory;
    const bool last = i + 1 == parts_.size();
    place.until_input = take(place.again ? scratch : until_input, memory.until_input);
    BumpAllocator& longer = place.again ? gradients : until_weight;
    place.until_weight = take(longer, memory.until_weight);
    place.output = take(longer, last ? 0 : plan.specs[i + 1].bytes());
    place.lasting = take(lasting, memory.lasting);
    place.split.own = take(gradients, memory.gradients);
    place.split.input = take(gradients, i > 0 ? plan.specs[i].bytes() : 0);
    const bool rounds = reads_rounded(plan, i) && (!last || rounds_);
    place.split.rounded = take(gradients, rounds ? rounded_spec(plan.specs[i + 1]).bytes() : 0);
    scratch_of_a_layer = std::max(scratch_of_a_layer, memory.scratch);
    if (last && place.again && keeps(place) && !parts_[i].promises.keeps_alone) {
      plan.again_output = plan.specs[i + 1];
      scratch_of_a_layer = std::max(
          scratch_of_a_layer, sum_of_bytes({aligned(memory.scratch), plan.again_output->bytes()}));
    }
  }
  for (std::size_t k = 0; k < made_by_.size(); ++k) {
    const StageSkips::Source& of = skips_.sources()[k];
    const bool needed = of.from >= 0 && of.input <= 0;  // else it needs none, or is in a message
    plan.source_gradients.push_back(take(scratch, needed ? plan.sources[k].bytes() : 0));
  }
  plan.scratch_of_layers = scratch.used();
  (void)scratch.bytes(scratch_of_a_layer);
  plan.needs.memory = {.until_input = until_input.used(),
                       .until_weight = until_weight.used(),
                       .lasting = lasting.used(),
                       .gradients = gradients.used(),
                       .scratch = scratch.used()};
}

// The gradient of a part's input lies at the other end than that of its output, or in its place.
void LayerRun::lay_out_shared(Plan& plan) const {
  const std::size_t parts = parts_.size();
  std::vector<bool> at_end(parts + 1, true);  // [boundary]: the input of part i
  const auto bytes_at = [&](std::size_t boundary) {
    return boundary == 0 || boundary == parts ? 0 : aligned(plan.specs[boundary].bytes());
  };
  std::size_t area = 0, rounded = 0;
  for (std::size_t i = parts; i-- > 0;) {
    const bool over = i + 1 < parts && i > 0 && in_place(plan, i);
    at_end[i] = over ? at_end[i + 1] : !at_end[i + 1];
    Place& place = plan.places[i];
    const std::size_t own = aligned(place.needs.memory.gradients);
    area = std::max(area, sum_of_bytes({own, bytes_at(i + 1), over ? 0 : bytes_at(i)}));
    place.shared.own = std::max(at_end[i] ? 0 : bytes_at(i), at_end[i + 1] ? 0 : bytes_at(i + 1));
    if (reads_rounded(plan, i) && (i + 1 < parts || rounds_)) {
      rounded = std::max(rounded, aligned(rounded_spec(plan.specs[i + 1]).bytes()));
    }
  }
  for (std::size_t i = 0; i < parts; ++i) {
    plan.places[i].shared.input = at_end[i] ? area - bytes_at(i) : 0;
    plan.places[i].shared.rounded = area;
  }
  plan.shared_gradients = sum_of_bytes({area, rounded});
}

LayerCall LayerRun::call_of(Call& call, std::size_t part) const {
  const Place& place = call.plan.places[part];
  const Memory& memory = call.memory;
  const auto& gradients = memory.shared ? place.shared : place.split;
  std::byte* const longer = place.again ? memory.gradients : memory.until_weight;
  return {.stage = call.stage,
          .x = input_of(call, part),
          .until_input = at(place.again ? memory.scratch : memory.until_input, place.until_input),
          .until_weight = at(longer, place.until_weight),
          .lasting = at(memory.lasting, place.lasting),
          .gradients =
              place.needs.memory.gradients == 0 ? nullptr : at(memory.gradients, gradients.own),
          .scratch = at(memory.scratch, call.plan.scratch_of_layers),
          .again = call.again};
}

Tensor LayerRun::output_of(const Call& call, std::size_t part) const {
  const Place& place = call.plan.places[part];
  return {at(place.again ? call.memory.gradients : call.memory.until_weight, place.output),
          call.plan.specs[part + 1]};
}

Tensor LayerRun::input_of(const Call& call, std::size_t part) const {
  return part == 0 ? call.inputs[0] : output_of(call, part - 1);
}

Tensor LayerRun::source(const Call& call, std::size_t index) const {
  const int input = skips_.sources()[index].input;
  if (input >= 0) return call.inputs[static_cast<std::size_t>(input)];
  return output_of(call, made_by_[index]);
}

void LayerRun::run_forward(Call& call, std::size_t part, const Tensor& y) {
  if (parts_[part].join) {
    const Skip& skip = skips_.joins()[parts_[part].index];
    return join_forward(call.stage.compute, skip, input_of(call, part),
                        source(call, skips_.source_of(skip.from)), y);
  }
  use(call.stage, parts_[part]);
  LayerCall made = call_of(call, part);
  NumberedLayer& each = layers_[parts_[part].index];
  naming(each, [&] {
    watched(each.forward_watched, made, "its output", y, [&] { each.layer->forward(made, y); });
  });
}

void LayerRun::forward(Call call, std::span<const Tensor> outputs) {
  if (parts_.empty()) copy(call.stage, call.inputs[0], outputs[0]);
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    call.stage.compute.progress();
    run_forward(call, i, i + 1 == parts_.size() ? outputs[0] : output_of(call, i));
  }
  for (std::size_t k = 0; k < made_by_.size(); ++k) {
    const int output = skips_.sources()[k].output;
    if (output >= 0) copy(call.stage, source(call, k), outputs[static_cast<std::size_t>(output)]);
  }
}

void LayerRun::keep_again(Call call, const Tensor& y) {
  call.again = true;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const Place& place = call.plan.places[i];
    if (recomputes_ && !place.again) continue;  // it has kept all
    if (i + 1 < parts_.size()) {
      run_forward(call, i, output_of(call, i));
      continue;
    }
    if (!keeps(place)) continue;
    LayerCall made = call_of(call, i);
    Tensor to = y;
    if (call.plan.again_output) {
      to = {at(made.scratch, aligned(place.needs.memory.scratch)), *call.plan.again_output};
    }
    const NumberedLayer& each = layers_[parts_[i].index];
    naming(each, [&] { each.layer->keep_again(made, to); });
  }
}

void LayerRun::recompute(Call call) {
  use(call.stage, parts_.back());
  LayerCall made = call_of(call, parts_.size() - 1);
  naming(layers_.back(), [&] { recomputing_->recompute(made); });
}

Tensor LayerRun::output_gradient(const Call& call, std::size_t part, const Tensor& dy) const {
  if (part + 1 == parts_.size()) return dy;
  const Place& next = call.plan.places[part + 1];
  const std::size_t offset = call.memory.shared ? next.shared.input : next.split.input;
  return {at(call.memory.gradients, offset), call.plan.specs[part + 1]};
}

Tensor LayerRun::input_gradient(const Call& call, std::size_t part,
                                std::span<const Tensor> grad_inputs) const {
  if (part > 0) return output_gradient(call, part - 1, {});
  return grad_inputs.empty() ? Tensor{nullptr, call.plan.specs[0]} : grad_inputs[0];
}

Tensor LayerRun::rounded(const Call& call, std::size_t part) const {
  if (!reads_rounded(call.plan, part)) return {};
  if (part + 1 == parts_.size() && !rounds_) return call.rounded_dy;
  const Place& place = call.plan.places[part];
  const std::size_t offset = call.memory.shared ? place.shared.rounded : place.split.rounded;
  return {at(call.memory.gradients, offset), rounded_spec(call.plan.specs[part + 1])};
}

Tensor LayerRun::rounded_input(const Call& call, std::size_t part) const {
  return part == 0 ? call.rounded_dx : rounded(call, part - 1);
}

void LayerRun::layer_backward(Call& call, std::size_t part, const Tensor& dy, const Tensor& dx,
                              Halves halves) {
  use(call.stage, parts_[part]);
  LayerCall made = call_of(call, part);
  made.rounded_dy = rounded(call, part);
  made.recomputed = recomputing_ != nullptr && part + 1 == parts_.size() && call.stage.recomputed;
  if (dx.data != nullptr && parts_[part].promises.writes_rounded) {
    made.rounded_dx = rounded_input(call, part);
  }
  NumberedLayer& each = layers_[parts_[part].index];
  // backward() alone may write over what it has read.
  const bool over = dx.data == dy.data || (made.rounded_dx.data != nullptr &&
                                           made.rounded_dx.data == made.rounded_dy.data);
  const bool watches =
      !each.backward_watched && !over && call.stage.compute.device().kind == DeviceKind::kCpu;
  naming(each, [&] {
    if (halves == Halves::kBoth && !watches) return each.layer->backward(made, dy, dx);
    if (dx.data != nullptr || made.gradients != nullptr) {
      watched(each.backward_watched, made, "its input's gradient", dx,
              [&] { each.layer->backward_input(made, dy, dx); });
    }
    if (halves == Halves::kBoth) each.layer->backward_weight(made, dy);
  });
}

// The gradients of a part. Before them, adds to dy what the part's output gets past layers.
void LayerRun::part_backward(Call& call, std::size_t part, const Tensor& dy, const Tensor& dx,
                             Halves halves) {
  ComputeContext& compute = call.stage.compute;
  compute.progress();
  const Tensor dy_copy = rounded(call, part);
  bool renew = rounds_ && part + 1 == parts_.size();
  if (parts_[part].join) {
    const Skip& skip = skips_.joins()[parts_[part].index];
    SourceGradient& gradient = source_gradients_[skips_.source_of(skip.from)];
    join_backward(compute, skip, dy, dx, gradient.sum, gradient.begun);
    gradient.begun = true;
  } else {
    for (std::size_t k = 0; k < made_by_.size(); ++k) {
      // The last layer of a stage hands its output on by the main tensor alone.
      if (made_by_[k] != part || !source_gradients_[k].begun) continue;
      add(compute, source_gradients_[k].sum, dy);
      renew = true;
    }
    if (renew && dy_copy.data != nullptr) convert(compute, dy, dy_copy);
    layer_backward(call, part, dy, dx, halves);
  }
  const Tensor dx_copy = rounded_input(call, part);
  if (dx.data == nullptr || dx_copy.data == nullptr || parts_[part].promises.writes_rounded) return;
  convert(compute, dx, dx_copy);
}

void LayerRun::begin_source_gradients(Call& call, std::span<const Tensor> grad_outputs,
                                      std::span<const Tensor> grad_inputs) {
  for (std::size_t k = 0; k < made_by_.size(); ++k) {
    const StageSkips::Source& of = skips_.sources()[k];
    SourceGradient& gradient = source_gradients_[k];
    gradient = {.sum = {nullptr, call.plan.sources[k]}};
    if (of.from < 0) continue;
    if (of.input > 0) {
      gradient.sum = grad_inputs[static_cast<std::size_t>(of.input)];
    } else {
      gradient.sum.data = at(call.memory.scratch, call.plan.source_gradients[k]);
    }
    if (of.output < 0) continue;
    copy(call.stage, grad_outputs[static_cast<std::size_t>(of.output)], gradient.sum);
    gradient.begun = true;
  }
}

// Where the main input is a source too.
void LayerRun::end_source_gradients(Call& call, std::span<const Tensor> grad_inputs) {
  if (grad_inputs.empty() || grad_inputs[0].data == nullptr) return;
  for (std::size_t k = 0; k < made_by_.size(); ++k) {
    const SourceGradient& gradient = source_gradients_[k];
    if (skips_.sources()[k].input == 0 && gradient.begun && gradient.sum.data != nullptr) {
      add(call.stage.compute, gradient.sum, grad_inputs[0]);
    }
  }
}

void LayerRun::backward(Call call, Halves halves, std::span<const Tensor> grad_outputs,
                        std::span<const Tensor> grad_inputs) {
  if (recomputes_ && !call.recomputed) keep_again(call, {});
  begin_source_gradients(call, grad_outputs, grad_inputs);
  if (parts_.empty() && !grad_inputs.empty() && grad_inputs[0].data != nullptr) {
    copy(call.stage, grad_outputs[0], grad_inputs[0]);
  }
  for (std::size_t i = parts_.size(); i-- > 0;) {
    part_backward(call, i, output_gradient(call, i, grad_outputs[0]),
                  input_gradient(call, i, grad_inputs), halves);
    if (halves == Halves::kBoth) announce(call.stage, parts_[i]);
  }
  end_source_gradients(call, grad_inputs);
}

void LayerRun::backward_weight(Call call, std::span<const Tensor> grad_outputs) {
  for (std::size_t i = parts_.size(); i-- > 0;) {
    if (parts_[i].join) continue;
    call.stage.compute.progress();
    use(call.stage, parts_[i]);
    LayerCall made = call_of(call, i);
    made.rounded_dy = rounded(call, i);
    NumberedLayer& each = layers_[parts_[i].index];
    naming(each,
           [&] { each.layer->backward_weight(made, output_gradient(call, i, grad_outputs[0])); });
    announce(call.stage, parts_[i]);
  }
}

void LayerRun::use(const StageContext& ctx, const Part& part) const {
  if (!outermost_ || part.parameters == 0 || ctx.units == nullptr) return;
  ctx.units->use(part.unit);
}

// Gradients from this part on are final.
void LayerRun::announce(const StageContext& ctx, const Part& part) const {
  if (!outermost_ || part.parameters == 0 || ctx.final_gradients == nullptr) return;
  ctx.final_gradients->from(part.first_gradient);
}

}  // namespace sluice::nn
