// Causal self-attention as a residual branch.
#pragma once

#include <optional>
#include <string>

#include "stages/layers/residual.hpp"
#include "stages/layers/self_attention.hpp"

namespace sluice {

class AttentionLayer final : public ResidualLayer {
 public:
  // As SelfAttention's.
  struct Options : ResidualOptions {
    int heads = 0, kv_heads = 0;
    std::optional<float> rotary_base = std::nullopt;
    DropoutSite probabilities = {};
    bool recompute = false;
  };
  AttentionLayer(const Options& options, ParameterSet& parameters, WeightCopies& copies);

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
  void branch_result(StreamCall& call, LayerAllocators memory, const Tensor& y) override {
    branch_.result(call, memory, y);
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
