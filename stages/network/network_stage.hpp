// A run of a Sequential's layers as a pipeline stage. Internal to stages/.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <sluice/layers.hpp>
#include <sluice/stage.hpp>

#include "stages/network/slot_memory.hpp"

namespace sluice {

struct NumberedLayer {
  int number = 0;    // in the model
  std::string kind;  // "linear"
  std::unique_ptr<Layer> layer;
  bool forward_watched = false, backward_watched = false;  // the first call was

  // "layer 3 (linear)"
  [[nodiscard]] std::string name() const;
};

// Makes the layer; an Error names it. `drawn`: its number for random numbers.
[[nodiscard]] NumberedLayer make_layer(const LayerSpec& spec, int number, int drawn);
// The layer's output; an Error names the layer.
[[nodiscard]] TensorSpec output_of(const NumberedLayer& layer, const TensorSpec& input);

// The layer's calls; an Error names the layer. The first of each on a CPU must write every number
// of y, or of dx where it has data, else Error(kUsage).
void layer_forward(NumberedLayer& layer, LayerCall& call, const Tensor& y);
void layer_backward_input(NumberedLayer& layer, LayerCall& call, const Tensor& dy,
                          const Tensor& dx);

// Without layers it passes its input on.
class NetworkStage : public Stage, public SplitBackward {
 public:
  explicit NetworkStage(std::vector<NumberedLayer> layers);

  [[nodiscard]] StageDescription describe(std::span<const TensorSpec> inputs,
                                          ComputeContext& compute) const override;
  void check_inputs(std::span<const Tensor> inputs) const override;
  void prepare(const StageSetup& setup) override;
  void prepare_size(ComputeContext& compute, std::span<const TensorSpec> inputs) override;
  void forward(StageContext& ctx, std::span<const Tensor> inputs,
               std::span<const Tensor> outputs) override;
  void backward(StageContext& ctx, std::span<const Tensor> grad_outputs,
                std::span<const Tensor> grad_inputs) override;
  void backward_input(StageContext& ctx, std::span<const Tensor> grad_outputs,
                      std::span<const Tensor> grad_inputs) override;
  void backward_weight(StageContext& ctx, std::span<const Tensor> grad_outputs) override;
  [[nodiscard]] ParameterSet* parameters() override;

 protected:
  // Runs every primitive for one size, on zeros; changes only gradients.
  virtual void warm_up(StageContext& ctx, const Tensor& input, const Tensor& output);

 private:
  // What layers see of one size of micro-batch: specs[i] is layer i's input, the last the output.
  struct Size {
    std::vector<TensorSpec> specs;
    std::vector<SlotMemory::Need> needs;
    std::size_t operator_bytes = 0;
  };
  [[nodiscard]] Size size_of(const TensorSpec& input, ComputeContext& compute) const;
  // Of a size that was prepared before.
  [[nodiscard]] const Size& size_of(const StageContext& ctx) const;
  void warm_up_size(ComputeContext& compute, const Size& size);
  [[nodiscard]] LayerCall call_of(StageContext& ctx, const Size& size, std::size_t layer) const;
  // With respect to the layer's output, and to its input.
  [[nodiscard]] Tensor output_gradient(const StageContext& ctx, const Size& size, std::size_t layer,
                                       const Tensor& grad_output) const;
  [[nodiscard]] Tensor input_gradient(const StageContext& ctx, const Size& size, std::size_t layer,
                                      std::span<const Tensor> grad_inputs) const;
  // Where its dx is wanted, or it has something to keep for the weight gradient.
  void backward_input_of(LayerCall& call, const Size& size, std::size_t layer, const Tensor& dy,
                         const Tensor& dx);

  std::vector<NumberedLayer> layers_;
  ParameterSet parameters_;
  SlotMemory memory_;
  std::vector<Size> sizes_;  // prepared ones
};

class LossNetworkStage final : public NetworkStage, public LossStage {
 public:
  LossNetworkStage(std::vector<NumberedLayer> layers, std::string kind, std::unique_ptr<Loss> loss);

  [[nodiscard]] StageDescription describe(std::span<const TensorSpec> inputs,
                                          ComputeContext& compute) const override;
  void prepare(const StageSetup& setup) override;
  void loss(StageContext& ctx, std::span<const Tensor> outputs, std::span<const Tensor> targets,
            double* sum) override;
  [[nodiscard]] double target_weight(std::span<const Tensor> targets) const override;

 protected:
  void warm_up(StageContext& ctx, const Tensor& input, const Tensor& output) override;

 private:
  [[nodiscard]] TensorSpec targets_of(const TensorSpec& outputs) const;
  void require_targets(const TensorSpec& outputs, std::span<const Tensor> targets) const;

  std::string kind_;
  std::unique_ptr<Loss> loss_;
  TensorSpec outputs_;  // of the largest micro-batch
};

}  // namespace sluice
