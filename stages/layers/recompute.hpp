// A layer of which nothing is kept per micro-batch but its input: what it computes on the way to
// its output is computed again when its gradients are due (Chen et al. 2016, "Training deep nets
// with sublinear memory cost").
//
// What the layer inside keeps to the input gradient lies in scratch, what it keeps to the weight
// gradient among the gradients; forward writes both only to read them itself. backward_input
// refills them first. What the weight gradient needs then waits with the gradients it belongs to:
// the weight half recomputes nothing, and a whole backward is still I then W in time as in bits.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "stages/layers/layer.hpp"

namespace sluice {

class RecomputedLayer final : public Layer {
 public:
  explicit RecomputedLayer(std::unique_ptr<Layer> layer) : layer_(std::move(layer)) {}

  [[nodiscard]] LayerMemory memory(const BlockShape& shape) const override;
  [[nodiscard]] OperatorMemory operators(ComputeContext& compute,
                                         const BlockShape& shape) const override {
    return layer_->operators(compute, shape);
  }
  [[nodiscard]] std::string note(ComputeContext& compute, const BlockShape& shape) const override {
    return layer_->note(compute, shape);
  }
  [[nodiscard]] Residual forward(LayerCall& call, const Residual& in, const Tensor& out) override;
  void recompute(LayerCall& call, const Tensor& in) override;
  void backward_input(LayerCall& call, const Tensor& in, const Tensor& dout,
                      const Tensor& din) override;
  void backward_weight(LayerCall& call, const Tensor& in, const Tensor& dout) override;
  void backward(LayerCall& call, const Tensor& in, const Tensor& dout, const Tensor& din) override;

 private:
  // The same call, with the memory as the layer inside knows it.
  [[nodiscard]] LayerCall within(const LayerCall& call) const;

  std::unique_ptr<Layer> layer_;
};

}  // namespace sluice
