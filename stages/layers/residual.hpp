// A residual branch: out = in + dropout(branch(norm(in))). Attention and MLP are two of them.
//
// The branch's result goes to the memory of `out`, and `in` stays pending: the next norm adds both,
// so that the sum costs no separate pass.
#pragma once

#include <string>

#include "stages/layers/layer.hpp"
#include "stages/layers/parts.hpp"

namespace sluice {

class ResidualLayer : public Layer {
 public:
  [[nodiscard]] LayerMemory memory(const BlockShape& shape) const final;
  [[nodiscard]] OperatorMemory operators(ComputeContext& compute,
                                         const BlockShape& shape) const final;
  [[nodiscard]] Residual forward(LayerCall& call, const Residual& in, const Tensor& out) final;
  void recompute(LayerCall& call, const Tensor& in) final;
  void backward_input(LayerCall& call, const Tensor& in, const Tensor& dout,
                      const Tensor& din) final;
  void backward_weight(LayerCall& call, const Tensor& in, const Tensor& dout) final;
  void backward(LayerCall& call, const Tensor& in, const Tensor& dout, const Tensor& din) final;

 protected:
  // Where a branch finds its memory: behind what the residual layer itself carved.
  struct Memory {
    BumpAllocator until_input, until_weight, gradients, scratch;
  };
  ResidualLayer(Norm norm, DropoutSite dropout, std::int64_t width, DType precision)
      : norm_(norm), dropout_(dropout), width_(width), precision_(precision) {}

  [[nodiscard]] std::int64_t width() const { return width_; }
  [[nodiscard]] DType precision() const { return precision_; }

  // Carves everything the branch ever uses, to measure it.
  virtual void measure(const BlockShape& shape, Memory& memory) const = 0;
  [[nodiscard]] virtual OperatorMemory branch_operators(ComputeContext& compute,
                                                        const BlockShape& shape) const = 0;
  // Forward in two: all that the branch keeps, from x [rows, width] in the products' precision;
  // then its result y f32 [rows, width], from what it keeps.
  virtual void branch_keep(LayerCall& call, Memory memory, const Tensor& x) = 0;
  virtual void branch_result(LayerCall& call, Memory memory, const Tensor& y) = 0;
  // dy and dx [rows, width] in the products' precision.
  virtual void branch_backward_input(LayerCall& call, Memory memory, const Tensor& dy,
                                     const Tensor& dx) = 0;
  virtual void branch_backward_weight(LayerCall& call, Memory memory, const Tensor& x,
                                      const Tensor& dy) = 0;

 private:
  struct Kept {
    Tensor normed, stats;     // until the weight gradient
    Tensor dbranch, dnormed;  // gradients; dbranch without data: it is dout itself
    Tensor dropped;           // scratch, f32, where dropout and a conversion follow each other
  };
  Kept carve(const BlockShape& shape, Memory& memory) const;
  Kept carve(const LayerCall& call, Memory& memory) const;
  // Completes `in`, then all of forward but its result.
  void keep(LayerCall& call, const Residual& in);
  [[nodiscard]] Tensor branch_gradient(const Kept& kept, const Tensor& dout) const;
  // Everything of backward_input in front of the norm.
  void backward_branch(LayerCall& call, const Tensor& dout);
  void backward_norm(LayerCall& call, const Tensor& in, const Tensor& din);

  Norm norm_;
  DropoutSite dropout_;
  std::int64_t width_;
  DType precision_;
};

}  // namespace sluice
