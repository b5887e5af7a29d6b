// transformer_block(): a block of a transformer as a layer of a Sequential.
#include <memory>
#include <string>
#include <vector>

#include <sluice/operators.hpp>
#include <sluice/transformer.hpp>

#include "comm/base/throw_error.hpp"
#include "stages/layers/stream_call.hpp"
#include "stages/transformer/build.hpp"

namespace sluice {
namespace {

// Attention, then the MLP. The stream between them lives until the weight gradient, its gradient
// from the input gradient on.
class BlockLayer final : public Layer {
 public:
  BlockLayer(const TransformerConfig& config, int number) : config_(config), number_(number) {
    validate(config);
    if (config.precision != DType::kF32) {
      throw_usage("a precision of {}; legal in a Sequential: f32", name_of(config.precision));
    }
    if (!config.full_layers.empty()) {
      throw_usage(
          "full_layers of {} blocks; legal in a Sequential: none, and a window of 0 for a "
          "block that sees all positions",
          config.full_layers.size());
    }
  }

  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override {
    require_stream(input, config_.width);
    return input;
  }
  void add_parameters(ParameterSet& set, const std::string& name) override {
    WeightCopies values(DType::kF32);
    parts_ = build_block(config_, stem(name), number_, set, values);
  }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override {
    const BlockShape shape = block_shape(input, compute.device().kind);
    LayerAllocators memory;
    LayerNeeds needs;
    for (const Place& place : places(shape, memory)) {
      const OperatorMemory operators = place.layer->operators(compute, shape);
      needs.operator_bytes = std::max(needs.operator_bytes, operators.workspace);
      needs.table_bytes = std::max(needs.table_bytes, operators.tables);
      if (needs.note.empty()) needs.note = place.layer->note(compute, shape);
      needs.memory.scratch = std::max(needs.memory.scratch, place.layer->memory(shape).scratch);
    }
    const std::size_t scratch = needs.memory.scratch;
    needs.memory = memory.used();
    needs.memory.scratch = scratch;
    return needs;
  }
  [[nodiscard]] bool overwrites_gradients() const override { return true; }
  [[nodiscard]] bool runs_on_gpu() const override { return true; }
  [[nodiscard]] double cost(const TensorSpec& input) const override {
    TransformerConfig config = config_;
    config.context = static_cast<int>(input.shape[1]);
    return layer_costs(config)[1] / 2 * static_cast<double>(input.shape[0]);
  }

  void forward(LayerCall& call, const Tensor& y) override {
    Place* const places = begin(call);
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      StreamCall inner = call_of(call, places[i]);
      const bool last = i + 1 == parts_.size();
      parts_[i]->forward(inner, in_of(call, places, i), last ? as_rows(y) : places[i + 1].in);
    }
  }
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override {
    Place* const places = begin(call);
    for (std::size_t i = parts_.size(); i-- > 0;) {
      StreamCall inner = call_of(call, places[i]);
      parts_[i]->backward_input(inner, in_of(call, places, i), {dout_of(places, i, dy)},
                                {i == 0 ? as_rows(dx) : places[i].din});
    }
  }
  void backward_weight(LayerCall& call, const Tensor& dy) override {
    Place* const places = begin(call);
    for (std::size_t i = parts_.size(); i-- > 0;) {
      StreamCall inner = call_of(call, places[i]);
      parts_[i]->backward_weight(inner, in_of(call, places, i), {dout_of(places, i, dy)});
    }
  }

 private:
  // A part and its memory of a call; in and din but for the first.
  struct Place {
    StreamLayer* layer = nullptr;
    std::byte *until_input = nullptr, *until_weight = nullptr, *gradients = nullptr;
    Tensor in, din;
  };

  // The same places for the same shape.
  [[nodiscard]] const std::vector<Place>& places(const BlockShape& shape,
                                                 LayerAllocators& memory) const {
    places_.resize(parts_.size());
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      const LayerMemory needs = parts_[i]->memory(shape);
      Place& place = places_[i];
      place.layer = parts_[i].get();
      place.until_input = memory.until_input.bytes(needs.until_input);
      place.until_weight = memory.until_weight.bytes(needs.until_weight);
      place.gradients = memory.gradients.bytes(needs.gradients);
      if (i == 0) continue;
      place.in = memory.until_weight.tensor(DType::kF32, shape.rows(), config_.width);
      place.din = memory.gradients.tensor(DType::kF32, shape.rows(), config_.width);
    }
    return places_;
  }
  Place* begin(const LayerCall& call) {
    LayerAllocators memory = stream_call(call).allocators();
    (void)places(block_shape(call.x.spec, call.compute().device().kind), memory);
    return places_.data();
  }
  static StreamCall call_of(const LayerCall& call, const Place& place) {
    StreamCall inner = stream_call(call);
    inner.until_input = place.until_input;
    inner.until_weight = place.until_weight;
    inner.gradients = place.gradients;
    return inner;
  }
  static Tensor in_of(const LayerCall& call, const Place* places, std::size_t part) {
    return part == 0 ? as_rows(call.x) : places[part].in;
  }
  [[nodiscard]] Tensor dout_of(const Place* places, std::size_t part, const Tensor& dy) const {
    return part + 1 == parts_.size() ? as_rows(dy) : places[part + 1].din;
  }

  TransformerConfig config_;
  int number_;
  std::vector<std::unique_ptr<StreamLayer>> parts_;  // once there are parameters
  mutable std::vector<Place> places_;                // of the present call
};

std::string settings(const TransformerConfig& config) {
  const RotaryScaling& scaling = config.rotary_scaling;
  return settings_of(static_cast<int>(config.kind), config.layers, config.heads, config.width,
                     config.kv_heads, config.mlp_width, config.dropout, config.rotary_base,
                     config.norm_epsilon, config.head_dim, static_cast<int>(scaling.kind),
                     scaling.factor, scaling.low_frequency_factor, scaling.high_frequency_factor,
                     scaling.original_context, config.qkv_bias, config.attention_output_bias,
                     config.mlp_bias, config.qk_norm, config.window);
}

}  // namespace

LayerSpec transformer_block(const TransformerConfig& config) {
  return {"transformer_block",
          [=](int number) { return std::make_unique<BlockLayer>(config, number); },
          {},
          settings(config)};
}

}  // namespace sluice
