// Layers made of layers. group: one after the other. recompute: only the input is kept. residual:
// two runs whose results are added.
#include <algorithm>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/operators.hpp>

#include "comm/base/byte_sums.hpp"
#include "comm/base/throw_error.hpp"
#include "stages/network/layer_run.hpp"
#include "stages/network/specs.hpp"

namespace sluice::nn {
namespace {

// The call of a run within a layer, whose memory begins at `begin` in the layer's.
LayerRun::Call call_within(const LayerRun& run, const LayerCall& call,
                           const LayerMemory& begin = {}) {
  return {.stage = call.stage,
          .plan = run.plan_of({&call.x.spec, 1}, call.compute()),
          .inputs = {&call.x, 1},
          .memory = {.until_input = at(call.until_input, begin.until_input),
                     .until_weight = at(call.until_weight, begin.until_weight),
                     .lasting = at(call.lasting, begin.lasting),
                     .gradients = at(call.gradients, begin.gradients),
                     .scratch = at(call.scratch, begin.scratch)},
          .again = call.again,
          .recomputed = call.recomputed,
          .rounded_dy = call.rounded_dy,
          .rounded_dx = call.rounded_dx};
}

class RunLayer : public Layer {
 public:
  explicit RunLayer(std::vector<NumberedLayer> layers, bool recomputes = false)
      : run_(std::move(layers), {.recomputes = recomputes}) {}

  Edges set_precision(const Precision& precision) override {
    run_.set_precision(precision);
    return Edges::kStream;
  }
  bool set_shards(const Shards& shards) override {
    run_.set_shards(shards);
    return true;
  }
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    return run_.output(input);
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    run_.add_parameters(set, name);
  }
  [[nodiscard]] bool overwrites_gradients() const override { return run_.overwrites_gradients(); }
  [[nodiscard]] bool runs_on_gpu() const override { return run_.runs_on_gpu(); }
  [[nodiscard]] LayerPromises promises() const override { return run_.promises(); }
  [[nodiscard]] double cost(const TensorSpec& input) const override { return run_.cost(input); }
  void check_inputs(const Tensor& x) const override { run_.check_inputs(x); }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override {
    return run_.plan_of({&input, 1}, compute).needs;
  }

  void forward(LayerCall& call, const Tensor& y) override {
    run_.forward(call_within(run_, call), {&y, 1});
  }
  void keep_again(LayerCall& call, const Tensor& y) override {
    run_.keep_again(call_within(run_, call), y);
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    run_.backward(call_within(run_, call), LayerRun::Halves::kInput, {&dy, 1}, {&dx, 1});
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    run_.backward_weight(call_within(run_, call), {&dy, 1});
  }
  void backward(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    run_.backward(call_within(run_, call), LayerRun::Halves::kBoth, {&dy, 1}, {&dx, 1});
  }

 protected:
  LayerRun run_;
};

class RecomputeLayer final : public RunLayer, public Recomputing {
 public:
  explicit RecomputeLayer(std::vector<NumberedLayer> layers) : RunLayer(std::move(layers), true) {}
  void recompute(LayerCall& call) override { run_.keep_again(call_within(run_, call), {}); }
};

class ResidualBlock final : public Layer {
 public:
  ResidualBlock(const std::vector<LayerSpec>& layers, const std::vector<LayerSpec>& shortcut,
                int number)
      : main_(make_inner_layers(layers, number, ResidualPart::kMain), {.rounds = true}),
        shortcut_(make_inner_layers(shortcut, number, ResidualPart::kShortcut), {.rounds = true}) {
    if (layers.empty()) throw_usage("residual() needs at least one layer");
  }

  Edges set_precision(const Precision& precision) override {
    main_.set_precision(precision);
    shortcut_.set_precision(precision);
    return Edges::kStream;
  }
  bool set_shards(const Shards& shards) override {
    main_.set_shards(shards);
    shortcut_.set_shards(shards);
    return true;
  }
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    const TensorSpec result = main_.output(input), added = shortcut_.output(input);
    if (result == added && has_numbers(result)) return result;
    throw_usage("the layers make {} of {}, the shortcut {}; legal: the same of both",
                to_string(result), to_string(input), to_string(added));
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    main_.add_parameters(set, name);
    shortcut_.add_parameters(set, name + "shortcut.");
  }
  void check_inputs(const Tensor& x) const override {
    main_.check_inputs(x);
    shortcut_.check_inputs(x);
  }
  [[nodiscard]] bool overwrites_gradients() const override {
    return main_.overwrites_gradients() && shortcut_.overwrites_gradients();
  }
  [[nodiscard]] bool runs_on_gpu() const override {
    return main_.runs_on_gpu() && shortcut_.runs_on_gpu();
  }
  [[nodiscard]] LayerPromises promises() const override {
    const LayerPromises main = main_.promises(), shortcut = shortcut_.promises();
    return {.recomputes = main.recomputes && shortcut.recomputes,
            .keeps_alone = main.keeps_alone && (shortcut_.empty() || shortcut.keeps_alone),
            .capturable = main.capturable && shortcut.capturable};
  }
  [[nodiscard]] double cost(const TensorSpec& input) const override {
    return main_.cost(input) + shortcut_.cost(input);
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override {
    const LayerNeeds& main = main_.plan_of({&input, 1}, compute).needs;
    const LayerNeeds& shortcut = shortcut_.plan_of({&input, 1}, compute).needs;
    const LayerMemory &a = main.memory, &b = shortcut.memory;
    LayerNeeds all{
        .memory = {.until_input = sum_of_bytes({a.until_input, b.until_input}),
                   .until_weight = sum_of_bytes({a.until_weight, b.until_weight}),
                   .lasting = sum_of_bytes({a.lasting, b.lasting}),
                   .gradients = sum_of_bytes({a.gradients, b.gradients}),
                   .scratch = sum_of_bytes({branch_bytes(input), std::max(a.scratch, b.scratch)})}};
    add_needs(all, main, /*backward_first=*/false);
    add_needs(all, shortcut, /*backward_first=*/false);
    all.again = main.again;
    all.again->insert(all.again->end(), shortcut.again->begin(), shortcut.again->end());
    return all;
  }

  void forward(LayerCall& call, const Tensor& y) override {
    Calls calls = calls_of(call);
    main_.forward(calls.main, {&y, 1});
    if (shortcut_.empty()) return add(call.compute(), call.x, y);
    const Tensor branch{call.scratch, y.spec};
    shortcut_.forward(calls.shortcut, {&branch, 1});
    add(call.compute(), branch, y);
  }
  void keep_again(LayerCall& call, const Tensor& y) override {
    Calls calls = calls_of(call);
    main_.keep_again(calls.main, y);
    shortcut_.keep_again(calls.shortcut, y);
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    back(LayerRun::Halves::kInput, call, dy, dx);
  }
  void backward(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    back(LayerRun::Halves::kBoth, call, dy, dx);
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    Calls calls = calls_of(call);
    main_.backward_weight(calls.main, {&dy, 1});
    shortcut_.backward_weight(calls.shortcut, {&dy, 1});
  }

 private:
  struct Calls {
    LayerRun::Call main, shortcut;
  };
  void back(LayerRun::Halves halves, LayerCall& call, const Tensor& dy, const Tensor& dx) {
    Calls calls = calls_of(call);
    main_.backward(calls.main, halves, {&dy, 1}, {&dx, 1});
    const bool wanted = dx.data != nullptr;
    if (!shortcut_.empty()) {
      const Tensor branch{wanted ? call.scratch : nullptr, call.x.spec};
      shortcut_.backward(calls.shortcut, halves, {&dy, 1}, {&branch, 1});
      if (wanted) add(call.compute(), branch, dx);
    } else if (wanted) {
      add(call.compute(), dy, dx);
    }
  }
  // Scratch for the shortcut's result, or for its gradient.
  [[nodiscard]] std::size_t branch_bytes(const TensorSpec& input) const {
    if (shortcut_.empty()) return 0;
    return round_up(std::max(input.bytes(), main_.output(input).bytes()), kBufferAlignment);
  }
  [[nodiscard]] Calls calls_of(const LayerCall& call) const {
    const std::size_t scratch = branch_bytes(call.x.spec);
    const LayerRun::Call main = call_within(main_, call, {.scratch = scratch});
    LayerMemory begin = main.plan.needs.memory;
    begin.scratch = scratch;
    return {main, call_within(shortcut_, call, begin)};
  }

  LayerRun main_, shortcut_;
};

}  // namespace

std::unique_ptr<Layer> make_layer(const LayerSpec& spec, int number) {
  if (spec.parts.empty()) return spec.make(number);
  LayerSpec inner = spec;
  inner.name = "";
  return std::make_unique<RunLayer>(make_layers(inner, 0, number));
}

LayerSpec group(std::vector<LayerSpec> layers) {
  // Its parts are made in its place.
  const auto make = [](int) -> std::unique_ptr<Layer> {
    throw_usage("group() needs at least one layer");
  };
  return {.kind = "group", .make = make, .parts = std::move(layers), .composed = true};
}

LayerSpec recompute(LayerSpec layer) {
  if (!layer.make) throw_usage("recompute() of {}(); legal: a layer", layer.kind);
  LayerSpec spec{.kind = "recompute",
                 .make = {},
                 .settings = text_of(layer),
                 .name = layer.name,
                 .trusted = layer.trusted,
                 .composed = true,
                 .forms = forms_of(layer)};
  layer.name = "";  // of parameters, within
  spec.make = [layer = std::move(layer)](int number) {
    return std::make_unique<RecomputeLayer>(make_layers(layer, 0, number));
  };
  return spec;
}

LayerSpec recompute(std::vector<LayerSpec> layers) { return recompute(group(std::move(layers))); }

LayerSpec residual(std::vector<LayerSpec> layers, std::vector<LayerSpec> shortcut) {
  std::string settings = text_of(layers);
  if (!shortcut.empty()) settings += "; " + text_of(shortcut);
  const ShardForms forms = forms_of_sum(forms_of(layers), forms_of(shortcut));
  return {
      .kind = "residual",
      .make = [layers = std::move(layers), shortcut = std::move(shortcut)](
                  int number) { return std::make_unique<ResidualBlock>(layers, shortcut, number); },
      .settings = std::move(settings),
      .composed = true,
      .forms = forms};
}

LayerSpec replicated(LayerSpec layer) {
  if (!layer.make) throw_usage("replicated() of {}(); legal: a layer", layer.kind);
  layer.replicated = true;
  layer.forms = {};
  for (LayerSpec& part : layer.parts) part = replicated(std::move(part));
  return layer;
}

}  // namespace sluice::nn
