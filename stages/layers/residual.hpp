// A residual branch: out = in + dropout(branch(norm(in))). Attention and MLP derive from it.
//
// The branch's last product adds to `in`. Where something is dropped before the sum, the product is
// of the products' precision, and dropout adds what stays of it to `in`, in one pass.
#pragma once

#include <string>

#include "stages/layers/layer.hpp"
#include "stages/layers/parts.hpp"

namespace sluice {

// What attention and MLP both need to know.
struct ResidualOptions {
  std::string name;  // "blocks.3"
  Norm::Kind norm = Norm::Kind::kLayer;
  std::int64_t width = 0;
  float norm_epsilon = 1e-5F;
  double output_deviation = 0.02;  // standard deviation of the last product's initial weights
  DropoutSite output;
  DType precision = DType::kF32;  // of the branch's products
  DType stream = DType::kF32;     // f32, or the precision

  // Of the last product in training: before dropout, or, where nothing is dropped, with the sum.
  [[nodiscard]] DType result() const { return output.probability > 0 ? precision : stream; }
};

class ResidualLayer : public StreamLayer {
 public:
  [[nodiscard]] LayerMemory memory(const BlockShape& shape) const final;
  [[nodiscard]] OperatorMemory operators(ComputeContext& compute,
                                         const BlockShape& shape) const final;
  void forward(StreamCall& call, const Tensor& in, const Tensor& out) final;
  void recompute(StreamCall& call, const Tensor& in) final;
  [[nodiscard]] bool reads_rounded() const final;
  void backward_input(StreamCall& call, const Tensor& in, const StreamGradient& dout,
                      const StreamGradient& din) final;
  void backward_weight(StreamCall& call, const Tensor& in, const StreamGradient& dout) final;
  void backward(StreamCall& call, const Tensor& in, const StreamGradient& dout,
                const StreamGradient& din) final;

 protected:
  ResidualLayer(const ResidualOptions& options, const std::string& norm, ParameterSet& parameters)
      : norm_(options.norm, options.name + norm, options.width, options.norm_epsilon, parameters),
        dropout_(options.output),
        width_(options.width),
        precision_(options.precision),
        stream_(options.stream),
        result_(options.result()) {}

  [[nodiscard]] std::int64_t width() const { return width_; }
  [[nodiscard]] DType precision() const { return precision_; }
  [[nodiscard]] DType stream() const { return stream_; }
  // ResidualOptions::result().
  [[nodiscard]] DType result() const { return result_; }

  // Allocates all that the branch uses in any phase. Below, `memory` of a branch follows the memory
  // of the residual layer itself.
  virtual void measure(const BlockShape& shape, LayerAllocators& memory) const = 0;
  [[nodiscard]] virtual OperatorMemory branch_operators(ComputeContext& compute,
                                                        const BlockShape& shape) const = 0;
  // Forward in two calls. branch_keep computes what the branch keeps from x [rows, width] in the
  // products' precision. branch_result computes y [rows, width] from it: of the stream's type with
  // `residual` added where that has data, else of result().
  virtual void branch_keep(StreamCall& call, LayerAllocators memory, const Tensor& x) = 0;
  virtual void branch_result(StreamCall& call, LayerAllocators memory, const Tensor& residual,
                             const Tensor& y) = 0;
  // dy and dx [rows, width] in the products' precision.
  virtual void branch_backward_input(StreamCall& call, LayerAllocators memory, const Tensor& dy,
                                     const Tensor& dx) = 0;
  virtual void branch_backward_weight(StreamCall& call, LayerAllocators memory, const Tensor& x,
                                      const Tensor& dy) = 0;

 private:
  struct Kept {
    Tensor normed, stats;     // until the weight gradient
    Tensor dbranch, dnormed;  // gradients; dbranch: where something is dropped
    Tensor branch;            // scratch, forward: before dropout; no data: in the memory of `out`
  };
  Kept allocate(const BlockShape& shape, LayerAllocators& memory) const;
  // What the branch's products read: of the products' precision.
  [[nodiscard]] Tensor branch_gradient(const Kept& kept, const StreamGradient& dout) const;
  // backward_input except for the norm.
  void backward_branch(StreamCall& call, const StreamGradient& dout);

  Norm norm_;
  DropoutSite dropout_;
  std::int64_t width_;
  DType precision_, stream_, result_;
};

}  // namespace sluice
