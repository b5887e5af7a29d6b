// A run of a transformer's layers as a pipeline stage. Internal to stages/; made by
// make_transformer_stage.
//
// Memory. Each slot holds what layers keep from forward on, and every layer's output except the
// last (which goes to the plan's buffer). Gradients of products' results and of layer outputs live
// from the input gradient to the weight gradient. If the schedule splits the two, each slot has its
// own gradients; otherwise all layers and micro-batches share one area, and the gradient of the
// residual stream is updated in place, with its rounded copy where layers read one. prepare() sizes
// everything for the largest micro-batch.
#pragma once

#include <memory>
#include <vector>

#include <sluice/stage.hpp>
#include <sluice/transformer.hpp>

#include "stages/layers/ends.hpp"
#include "stages/layers/layer.hpp"
#include "stages/transformer/build.hpp"

namespace sluice {

// Layers [begin, end): 0 is the embedding, layers + 1 the head.
struct LayerRange {
  int begin = 0, end = 0;
};

class TransformerStage : public Stage, public SplitBackward {
 public:
  // Requires a valid config, the embedding in the first stage and the head in the last.
  TransformerStage(const TransformerConfig& config, LayerRange range);

  [[nodiscard]] StageDescription describe(std::span<const TensorSpec> inputs,
                                          ComputeContext& compute) const override;
  void check_inputs(std::span<const Tensor> inputs) const override;
  void prepare(const StageSetup& setup) override;
  void prepare_size(ComputeContext& compute, std::span<const TensorSpec> inputs) override;
  void begin_step(ComputeContext& compute) override;
  [[nodiscard]] bool graph_capturable() const override { return true; }
  [[nodiscard]] bool overwrites_gradients() const override { return true; }
  void forward(StageContext& ctx, std::span<const Tensor> inputs,
               std::span<const Tensor> outputs) override;
  void backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                std::span<const Tensor> grad_inputs) override;
  void backward_input(StageContext& ctx, std::span<const Tensor> grad_outputs,
                      std::span<const Tensor> grad_inputs) override;
  void backward_weight(StageContext& ctx, std::span<const Tensor> grad_outputs) override;
  [[nodiscard]] ParameterSet* parameters() override;
  // Bytes that prepare() took for what describe() returned, without parameters.
  [[nodiscard]] std::size_t prepared_bytes() const {
    return state_.size() + gradients_.size() + scratch_.size();
  }

 protected:
  // Of the loss of these outputs.
  [[nodiscard]] static TensorSpec targets_of(const TensorSpec& outputs);
  // Runs every primitive of one micro-batch size once. Changes only gradients.
  virtual void warm_up(StageContext& ctx, std::span<const Tensor> inputs,
                       std::span<const Tensor> outputs);
  [[nodiscard]] const TransformerConfig& config() const { return config_; }
  // [samples, sequence, ...]
  [[nodiscard]] BlockShape batch_shape(const Shape& shape, DeviceKind device) const;
  // The head that computes the loss itself; null: forward gives logits.
  [[nodiscard]] const HeadLayer* chunking_head() const { return chunking_head_; }
  [[nodiscard]] std::byte* scratch() const { return scratch_.data(); }
  [[nodiscard]] bool trains() const { return trains_; }

 private:
  // Offsets within a slot's state and gradient memory, and the capacity there.
  struct Place {
    std::size_t until_input = 0, until_weight = 0, output = 0;
    std::size_t gradients = 0, dinput = 0, rounded = 0;  // rounded: of the output's gradient
    LayerMemory fits;
  };
  struct Layout {
    std::vector<Place> places;
    std::size_t slot_state = 0;      // bytes per slot
    std::size_t slot_gradients = 0;  // bytes per slot where split, else of the one shared area
    std::size_t scratch = 0;
  };

  [[nodiscard]] bool takes_tokens() const { return range_.begin == 0; }
  [[nodiscard]] bool has_head() const { return range_.end == config_.layers + 2; }
  [[nodiscard]] bool gives_logits() const { return has_head() && chunking_head_ == nullptr; }
  [[nodiscard]] BlockShape shape_of(const TensorSpec& input, DeviceKind device) const;
  [[nodiscard]] TensorSpec output_spec(const BlockShape& shape) const;
  [[nodiscard]] LayerMemory largest_memory(const StreamLayer& layer,
                                           std::span<const BlockShape> shapes) const;
  [[nodiscard]] Layout lay_out(std::span<const BlockShape> shapes, bool split) const;
  void warm_up_size(ComputeContext& compute, const BlockShape& shape, const TensorSpec& in_spec);
  void require_fits(const BlockShape& shape) const;

  [[nodiscard]] StreamCall call_of(StageContext& ctx, const BlockShape& shape, size_t layer) const;
  [[nodiscard]] Tensor stream_tensor(std::byte* data, const BlockShape& shape) const;
  [[nodiscard]] Tensor layer_output(const StageContext& ctx, const BlockShape& shape,
                                    size_t layer) const;
  [[nodiscard]] Tensor layer_input(const StageContext& ctx, const BlockShape& shape,
                                   size_t layer) const;
  [[nodiscard]] StreamGradient layer_gradient(const StageContext& ctx, const BlockShape& shape,
                                              size_t layer, const Tensor& grad_output) const;
  // StreamGradient::rounded of a layer's output, without data where the layer does not read it.
  [[nodiscard]] Tensor rounded_gradient(const StageContext& ctx, const BlockShape& shape,
                                        size_t layer) const;
  // What the last layer gets: the message's gradient, rounded where that is read.
  [[nodiscard]] StreamGradient take_gradient(StageContext& ctx, const BlockShape& shape,
                                             const Tensor& grad_output) const;
  [[nodiscard]] bool reads_rounded() const;  // some layer does
  [[nodiscard]] TensorSpec rounded_spec(const BlockShape& shape) const;
  void find_first_gradients();
  // Announces that layers from this one on have final gradients.
  void announce_final(const StageContext& ctx, size_t layer) const;
  [[nodiscard]] BlockShape begin_call(const StageContext& ctx,
                                      std::span<const Tensor> inputs) const;

  TransformerConfig config_;
  LayerRange range_;
  ParameterSet parameters_;
  WeightCopies copies_;
  std::vector<std::unique_ptr<StreamLayer>> layers_;
  const HeadLayer* chunking_head_ = nullptr;   // the last of them
  std::vector<std::size_t> first_parameters_;  // [layer] how many come before its own
  std::vector<std::size_t> first_gradients_;  // [layer] where they begin in flat_grads(), in floats

  int slots_ = 0;
  bool split_ = true, trains_ = true;  // of StageSetup
  std::vector<BlockShape> shapes_;     // prepared sizes
  Layout layout_;
  Buffer state_, gradients_, scratch_;
};

class LastTransformerStage final : public TransformerStage, public LossStage {
 public:
  using TransformerStage::TransformerStage;

  // Summed cross-entropy over the targets that are not negative.
  void loss(StageContext& ctx, std::span<const Tensor> outputs, std::span<const Tensor> targets,
            double* sum) override;
  [[nodiscard]] double target_weight(std::span<const Tensor> targets) const override;
  [[nodiscard]] std::string why_no_answers() const override;

 protected:
  void warm_up(StageContext& ctx, std::span<const Tensor> inputs,
               std::span<const Tensor> outputs) override;
};

}  // namespace sluice
