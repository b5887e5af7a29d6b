// group: layers as one. residual: two runs of layers whose results are added.
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/layers.hpp>
#include <sluice/operators.hpp>

#include "comm/base/byte_sums.hpp"
#include "stages/network/network_stage.hpp"
#include "stages/network/specs.hpp"
#include "stages/tensor/bump_allocator.hpp"

namespace sluice {
namespace {

// By lifetime as in LayerMemory.
struct Allocators {
  BumpAllocator until_input, until_weight, gradients;
};

// Layers one after the other within a layer. Their outputs live until the weight gradient, the
// gradients of these from the input gradient on.
class Run {
 public:
  Run(const std::vector<LayerSpec>& specs, int number) {
    for (std::size_t i = 0; i < specs.size(); ++i) {
      if (!specs[i].make) {
        throw_usage("{}() within another layer; legal: between the layers of the model",
                    specs[i].kind);
      }
      const int mine = static_cast<int>(i);
      layers_.push_back(make_layer(specs[i], mine, number + mine));
    }
    made_.reserve(layers_.size());
  }
  [[nodiscard]] bool empty() const { return layers_.empty(); }
  [[nodiscard]] TensorSpec output(TensorSpec spec) const {
    for (const NumberedLayer& each : layers_) spec = output_of(each, spec);
    return spec;
  }
  void check_inputs(const Tensor& x) const {
    if (!layers_.empty()) layers_[0].layer->check_inputs(x);
  }
  void add_parameters(ParameterSet& set, const std::string& name) {
    for (const NumberedLayer& each : layers_) {
      const std::size_t first = set.size();
      each.layer->add_parameters(set, fmt::format("{}{}.", name, each.number));
      if (set.size() > first && !each.layer->overwrites_gradients()) overwrites_gradients_ = false;
    }
  }
  // Whether all layers that have added parameters do.
  [[nodiscard]] bool overwrites_gradients() const { return overwrites_gradients_; }
  [[nodiscard]] bool runs_on_gpu() const {
    return std::all_of(layers_.begin(), layers_.end(),
                       [](const NumberedLayer& each) { return each.layer->runs_on_gpu(); });
  }
  [[nodiscard]] double cost(TensorSpec spec) const {
    double sum = 0;
    for (const NumberedLayer& each : layers_) {
      sum += each.layer->cost(spec);
      spec = output_of(each, spec);
    }
    return sum;
  }
  // Takes what the layers keep from `memory`, and adds the rest to `needs`.
  void measure(const TensorSpec& input, ComputeContext& compute, Allocators& memory,
               LayerNeeds& needs) const {
    for (const Place& place : plan_of(input, compute).places) {
      (void)take(memory, place);
      needs.operator_bytes = std::max(needs.operator_bytes, place.needs.operator_bytes);
      needs.memory.scratch = std::max(needs.memory.scratch, place.needs.memory.scratch);
      needs.table_bytes = std::max(needs.table_bytes, place.needs.table_bytes);
      if (needs.note.empty()) needs.note = place.needs.note;
      needs.forward_sums += place.needs.forward_sums;
      needs.backward_sums += place.needs.backward_sums;
    }
  }

  // Finds the memory of a call; takes as much as measure().
  void begin(const LayerCall& outer, Allocators& memory) {
    made_.clear();
    for (const Place& place : plan_of(outer.x.spec, outer.compute()).places) {
      made_.push_back(take(memory, place));
    }
  }
  void forward(const LayerCall& outer, std::byte* scratch, const Tensor& y) {
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      LayerCall call = call_of(outer, scratch, i);
      layer_forward(layers_[i], call, i + 1 == layers_.size() ? y : made_[i + 1].x);
    }
  }
  void backward_input(const LayerCall& outer, std::byte* scratch, const Tensor& dy,
                      const Tensor& dx) {
    for (std::size_t i = layers_.size(); i-- > 0;) {
      LayerCall call = call_of(outer, scratch, i);
      const Tensor& to = i > 0 ? made_[i].dx : dx;
      if (to.data == nullptr && !made_[i].keeps_gradients) continue;
      layer_backward_input(layers_[i], call, gradient_of(i, dy), to);
    }
  }
  void backward_weight(const LayerCall& outer, std::byte* scratch, const Tensor& dy) {
    for (std::size_t i = layers_.size(); i-- > 0;) {
      LayerCall call = call_of(outer, scratch, i);
      layers_[i].layer->backward_weight(call, gradient_of(i, dy));
    }
  }

 private:
  struct Place {
    TensorSpec input;
    bool first = false;  // its input is the block's
    LayerNeeds needs;
  };
  struct Plan {
    TensorSpec input;
    std::vector<Place> places;
  };
  struct Made {
    Tensor x, dx;  // not of the first layer
    std::byte *until_input, *until_weight, *gradients;
    bool keeps_gradients;
  };

  static Made take(Allocators& memory, const Place& place) {
    const LayerMemory& needs = place.needs.memory;
    const std::size_t bytes = place.first ? 0 : place.input.bytes();
    return {.x = {memory.until_weight.bytes(bytes), place.input},
            .dx = {memory.gradients.bytes(bytes), place.input},
            .until_input = memory.until_input.bytes(needs.until_input),
            .until_weight = memory.until_weight.bytes(needs.until_weight),
            .gradients = memory.gradients.bytes(needs.gradients),
            .keeps_gradients = needs.gradients > 0};
  }
  // Made when a size of micro-batch is described, found in a step.
  const Plan& plan_of(const TensorSpec& input, ComputeContext& compute) const {
    for (const Plan& plan : plans_) {
      if (plan.input == input) return plan;
    }
    Plan plan{.input = input, .places = {}};
    TensorSpec spec = input;
    for (const NumberedLayer& each : layers_) {
      const TensorSpec out = output_of(each, spec);
      plan.places.push_back(
          {.input = spec, .first = plan.places.empty(), .needs = each.layer->needs(spec, compute)});
      spec = out;
    }
    return plans_.emplace_back(std::move(plan));
  }
  [[nodiscard]] LayerCall call_of(const LayerCall& outer, std::byte* scratch,
                                  std::size_t layer) const {
    const Made& made = made_[layer];
    return {.stage = outer.stage,
            .x = layer == 0 ? outer.x : made.x,
            .until_input = made.until_input,
            .until_weight = made.until_weight,
            .gradients = made.gradients,
            .scratch = scratch};
  }
  [[nodiscard]] Tensor gradient_of(std::size_t layer, const Tensor& dy) const {
    return layer + 1 == layers_.size() ? dy : made_[layer + 1].dx;
  }

  std::vector<NumberedLayer> layers_;
  mutable std::deque<Plan> plans_;
  std::vector<Made> made_;  // of the present call
  bool overwrites_gradients_ = true;
};

// Where the numbers of a block's layers for random numbers begin: beyond those of a model's layers,
// and others for every block, however blocks are nested.
enum class Branch : std::uint32_t { kMain, kShortcut };
int first_number(int number, Branch branch) {
  constexpr std::uint32_t kBeyondLayers = 1U << 20;
  const std::uint32_t mixed =
      (static_cast<std::uint32_t>(number) * 2 + static_cast<std::uint32_t>(branch) + 1) *
      2654435761U;
  return static_cast<int>((mixed >> 10) + kBeyondLayers);
}

// "conv2d(4, 4, ...), relu()"
std::string text_of(const std::vector<LayerSpec>& layers) {
  std::string all;
  for (const LayerSpec& each : layers) {
    all += fmt::format("{}{}({})", all.empty() ? "" : ", ", each.kind, each.settings);
  }
  return all;
}

class GroupLayer final : public Layer {
 public:
  GroupLayer(const std::vector<LayerSpec>& layers, int number)
      : layers_(layers, first_number(number, Branch::kMain)) {
    if (layers.empty()) throw_usage("group() needs at least one layer");
  }

  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    return layers_.output(input);
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    layers_.add_parameters(set, name);
  }
  [[nodiscard]] bool overwrites_gradients() const override {
    return layers_.overwrites_gradients();
  }
  [[nodiscard]] bool runs_on_gpu() const override { return layers_.runs_on_gpu(); }
  [[nodiscard]] double cost(const TensorSpec& input) const override { return layers_.cost(input); }
  void check_inputs(const Tensor& x) const override { layers_.check_inputs(x); }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override {
    Allocators memory;
    LayerNeeds needs;
    layers_.measure(input, compute, memory, needs);
    needs.memory.until_input = memory.until_input.used();
    needs.memory.until_weight = memory.until_weight.used();
    needs.memory.gradients = memory.gradients.used();
    return needs;
  }

  void forward(LayerCall& call, const Tensor& y) override {
    begin(call);
    layers_.forward(call, call.scratch, y);
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    begin(call);
    layers_.backward_input(call, call.scratch, dy, dx);
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    begin(call);
    layers_.backward_weight(call, call.scratch, dy);
  }

 private:
  void begin(const LayerCall& call) {
    Allocators memory{BumpAllocator(call.until_input), BumpAllocator(call.until_weight),
                      BumpAllocator(call.gradients)};
    layers_.begin(call, memory);
  }

  Run layers_;
};

class ResidualBlock final : public Layer {
 public:
  ResidualBlock(const std::vector<LayerSpec>& layers, const std::vector<LayerSpec>& shortcut,
                int number)
      : main_(layers, first_number(number, Branch::kMain)),
        shortcut_(shortcut, first_number(number, Branch::kShortcut)) {
    if (layers.empty()) throw_usage("residual() needs at least one layer");
  }

  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    const TensorSpec result = main_.output(input), added = shortcut_.output(input);
    if (result == added && result.dtype == DType::kF32) return result;
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
  [[nodiscard]] double cost(const TensorSpec& input) const override {
    return main_.cost(input) + shortcut_.cost(input);
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override {
    Allocators memory;
    LayerNeeds needs;
    main_.measure(input, compute, memory, needs);
    shortcut_.measure(input, compute, memory, needs);
    const std::size_t branch = branch_bytes(input);
    needs.memory = {.until_input = memory.until_input.used(),
                    .until_weight = memory.until_weight.used(),
                    .gradients = memory.gradients.used(),
                    .scratch = sum_of_bytes({branch, needs.memory.scratch})};
    return needs;
  }

  void forward(LayerCall& call, const Tensor& y) override {
    std::byte* const scratch = begin(call);
    main_.forward(call, scratch, y);
    if (shortcut_.empty()) return add(call.compute(), call.x, y);
    const Tensor branch{call.scratch, y.spec};
    shortcut_.forward(call, scratch, branch);
    add(call.compute(), branch, y);
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    std::byte* const scratch = begin(call);
    main_.backward_input(call, scratch, dy, dx);
    const bool wanted = dx.data != nullptr;
    if (!shortcut_.empty()) {
      const Tensor branch{wanted ? call.scratch : nullptr, call.x.spec};
      shortcut_.backward_input(call, scratch, dy, branch);
      if (wanted) add(call.compute(), branch, dx);
    } else if (wanted) {
      add(call.compute(), dy, dx);
    }
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    std::byte* const scratch = begin(call);
    main_.backward_weight(call, scratch, dy);
    shortcut_.backward_weight(call, scratch, dy);
  }

 private:
  // Scratch for the shortcut's result, or for its gradient.
  [[nodiscard]] std::size_t branch_bytes(const TensorSpec& input) const {
    if (shortcut_.empty()) return 0;
    return round_up(std::max(input.bytes(), main_.output(input).bytes()), kBufferAlignment);
  }
  // Finds the memory of the layers; returns their scratch.
  std::byte* begin(const LayerCall& call) {
    Allocators memory{BumpAllocator(call.until_input), BumpAllocator(call.until_weight),
                      BumpAllocator(call.gradients)};
    main_.begin(call, memory);
    shortcut_.begin(call, memory);
    return call.scratch == nullptr ? nullptr : call.scratch + branch_bytes(call.x.spec);
  }

  Run main_, shortcut_;
};

}  // namespace

LayerSpec group(std::vector<LayerSpec> layers) {
  std::string settings = text_of(layers);
  return {"group",
          [layers = std::move(layers)](int number) {
            return std::make_unique<GroupLayer>(layers, number);
          },
          {},
          std::move(settings)};
}

LayerSpec residual(std::vector<LayerSpec> layers, std::vector<LayerSpec> shortcut) {
  std::string settings = text_of(layers);
  if (!shortcut.empty()) settings += "; " + text_of(shortcut);
  return {"residual",
          [layers = std::move(layers), shortcut = std::move(shortcut)](int number) {
            return std::make_unique<ResidualBlock>(layers, shortcut, number);
          },
          {},
          std::move(settings)};
}

}  // namespace sluice
