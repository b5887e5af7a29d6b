// The feed-forward part of a block as a residual branch: down(gelu(up(x))), or
// down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020) with gate and up in one product.
#pragma once

#include <string>

#include "stages/layers/residual.hpp"

namespace sluice {

class MlpLayer final : public ResidualLayer {
 public:
  enum class Kind { kGelu, kSwiGlu };
  struct Options : ResidualOptions {
    Kind kind = Kind::kGelu;
    std::int64_t hidden = 0;
    bool bias = false;
  };
  MlpLayer(const Options& options, ParameterSet& parameters, WeightCopies& copies);

 protected:
  void measure(const BlockShape& shape, LayerAllocators& memory) const override;
  [[nodiscard]] OperatorMemory branch_operators(ComputeContext& compute,
                                                const BlockShape& shape) const override;
  void branch_keep(StreamCall& call, LayerAllocators memory, const Tensor& x) override;
  void branch_result(StreamCall& call, LayerAllocators memory, const Tensor& residual,
                     const Tensor& y) override;
  void branch_backward_input(StreamCall& call, LayerAllocators memory, const Tensor& dy,
                             const Tensor& dx) override;
  void branch_backward_weight(StreamCall& call, LayerAllocators memory, const Tensor& x,
                              const Tensor& dy) override;

 private:
  struct Kept {
    Tensor raised;   // until the input gradient: the up product's result
    Tensor hidden;   // until the weight gradient: after the activation
    Tensor draised;  // gradients
  };
  Kept allocate(const BlockShape& shape, LayerAllocators& memory) const;
  [[nodiscard]] Activation activation() const {
    return kind_ == Kind::kGelu ? Activation::kGelu : Activation::kSwiglu;
  }

  Kind kind_;
  Linear up_, down_;
};

}  // namespace sluice
