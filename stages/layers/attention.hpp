// Causal self-attention as a residual branch.
#pragma once

#include <string>
#include <utility>

#include "stages/layers/residual.hpp"
#include "stages/layers/self_attention.hpp"

namespace sluice {

class AttentionLayer final : public ResidualLayer {
 public:
  // `attention`: all but what the branch shares with the layer: name, width, output_deviation,
  // precision, result, sum.
  AttentionLayer(const ResidualOptions& options, SelfAttention::Options attention,
                 ParameterSet& parameters, WeightCopies& copies);

  [[nodiscard]] std::string note(ComputeContext& compute, const BlockShape& shape) const override {
    return branch_.note(compute, shape);
  }

 protected:
  void measure(const BlockShape& shape, LayerAllocators& memory) const override {
    branch_.measure(shape, memory);
  }
  [[nodiscard]] OperatorMemory branch_operators(ComputeContext& compute,
                                                const BlockShape& shape) const override {
    return branch_.operators(compute, shape);
  }
  void branch_keep(StreamCall& call, LayerAllocators memory, const Tensor& x) override {
    branch_.keep(call, memory, x);
  }
  void branch_result(StreamCall& call, LayerAllocators memory, const Tensor& residual,
                     const Tensor& y) override {
    branch_.result(call, memory, residual, y);
  }
  void branch_backward_input(StreamCall& call, LayerAllocators memory, const Tensor& dy,
                             const Tensor& dx) override {
    branch_.backward_input(call, memory, dy, dx);
  }
  void branch_backward_weight(StreamCall& call, LayerAllocators memory, const Tensor& x,
                              const Tensor& dy) override {
    branch_.backward_weight(call, memory, x, dy);
  }

 private:
  SelfAttention branch_;
};

}  // namespace sluice
