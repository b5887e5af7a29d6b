// What a transformer's layers compute beside the residual stream: self-attention, or an MLP. As a
// layer of its own, or within ResidualLayer, which adds norm, dropout and sum. Internal to stages/.
#pragma once

#include <cstddef>
#include <string>

#include <sluice/layers.hpp>

#include "stages/network/parts.hpp"

namespace sluice {

// What a branch's operators take of the compute context.
struct OperatorMemory {
  std::size_t workspace = 0;  // the most that one of them takes
  std::size_t tables = 0;     // constants
};

// A call of a layer, as a branch needs it. Copied for each branch: `memory` follows what the layer
// around it has taken.
struct BranchCall {
  LayerCall& layer;
  BlockShape shape;
  LayerAllocators memory;

  [[nodiscard]] ComputeContext& compute() const { return layer.compute(); }
};

// Operands are [rows, width] of the products' precision where nothing else is said.
class Branch {
 public:
  virtual ~Branch() = default;

  // Allocates all that it uses in any phase; the other calls find it at the same place.
  virtual void measure(const BlockShape& shape, LayerAllocators& memory) const = 0;
  // The most in any phase.
  [[nodiscard]] virtual OperatorMemory operators(ComputeContext& compute,
                                                 const BlockShape& shape) const = 0;
  // LayerNeeds::note.
  [[nodiscard]] virtual std::string note(ComputeContext& /*compute*/,
                                         const BlockShape& /*shape*/) const {
    return {};
  }
  // Forward in two calls. keep() computes what the branch keeps from x. result() computes y from
  // it: of the stream's type with `residual` added where that has data, else of the result's.
  virtual void keep(BranchCall call, const Tensor& x) = 0;
  virtual void result(BranchCall call, const Tensor& residual, const Tensor& y) = 0;
  // dx with null data: not needed.
  virtual void backward_input(BranchCall call, const Tensor& dy, const Tensor& dx) = 0;
  virtual void backward_weight(BranchCall call, const Tensor& x, const Tensor& dy) = 0;
};

// The type of a branch's last product.
struct BranchResult {
  DType alone = DType::kF32;  // f32, or the precision
  DType sum = DType::kF32;    // with a residual added; likewise
};

}  // namespace sluice
