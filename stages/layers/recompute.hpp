// A layer that keeps only its input per micro-batch. Backward computes the rest again (Chen et al.
// 2016, "Training deep nets with sublinear memory cost").
//
// The inner layer's memory until the input gradient is scratch here. Its memory until the weight
// gradient is part of the gradients. backward_input fills both again, so backward_weight computes
// nothing twice, and backward equals backward_input then backward_weight in time and bits.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "stages/layers/layer.hpp"

namespace sluice {

class RecomputedLayer final : public StreamLayer {
 public:
  explicit RecomputedLayer(std::unique_ptr<StreamLayer> layer) : layer_(std::move(layer)) {}

  [[nodiscard]] LayerMemory memory(const BlockShape& shape) const override;
  [[nodiscard]] OperatorMemory operators(ComputeContext& compute,
                                         const BlockShape& shape) const override {
    return layer_->operators(compute, shape);
  }
  [[nodiscard]] std::string note(ComputeContext& compute, const BlockShape& shape) const override {
    return layer_->note(compute, shape);
  }
  [[nodiscard]] bool reads_rounded() const override { return layer_->reads_rounded(); }
  void forward(StreamCall& call, const Tensor& in, const Tensor& out) override;
  void backward_input(StreamCall& call, const Tensor& in, const StreamGradient& dout,
                      const StreamGradient& din) override;
  void backward_weight(StreamCall& call, const Tensor& in, const StreamGradient& dout) override;
  void backward(StreamCall& call, const Tensor& in, const StreamGradient& dout,
                const StreamGradient& din) override;

 private:
  // The same call with the inner layer's memory.
  [[nodiscard]] StreamCall within(const StreamCall& call) const;

  std::unique_ptr<StreamLayer> layer_;
};

}  // namespace sluice
