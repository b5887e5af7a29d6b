// The feed-forward part of a block: down(gelu(up(x))), or down(silu(gate(x)) * up(x)) (SwiGLU,
// Shazeer 2020) with gate and up in one product.
#pragma once

#include <string>

#include "stages/layers/branch.hpp"

namespace sluice {

class Mlp final : public Branch {
 public:
  enum class Kind { kGelu, kSwiGlu };
  struct Options {
    Kind kind = Kind::kGelu;
    std::int64_t width = 0, hidden = 0;
    double output_deviation = 0.02;  // standard deviation of the last product's initial weights
    bool bias = false;
    DType precision = DType::kF32;
    BranchResult result = {};
  };
  // Its parameters are <name>up.weight (SwiGLU: gate_up), <name>down.weight and so on.
  Mlp(const Options& options, const std::string& name, ParameterSet& parameters);

  void measure(const BlockShape& shape, LayerAllocators& memory) const override;
  [[nodiscard]] OperatorMemory operators(ComputeContext& compute,
                                         const BlockShape& shape) const override;
  void keep(BranchCall call, const Tensor& x) override;
  void result(BranchCall call, const Tensor& residual, const Tensor& y) override;
  void backward_input(BranchCall call, const Tensor& dy, const Tensor& dx) override;
  void backward_weight(BranchCall call, const Tensor& x, const Tensor& dy) override;

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
  DType precision_;
  BranchResult result_;
  Linear up_, down_;
};

}  // namespace sluice
