// The two ends of a transformer: embedding of tokens and positions, and the head (final norm and
// projection to the vocabulary).
#pragma once

#include "stages/layers/layer.hpp"
#include "stages/layers/parts.hpp"

namespace sluice {

// Its input: tokens i32 [samples, sequence], without a gradient. Keeps nothing.
class EmbeddingLayer final : public StreamLayer {
 public:
  struct Options {
    std::int64_t vocabulary = 0, width = 0;
    std::int64_t positions = 0;  // 0: none learned
    bool tied = false;
    DropoutSite dropout;
  };
  EmbeddingLayer(const Options& options, ParameterSet& parameters);

  [[nodiscard]] LayerMemory memory(const BlockShape& shape) const override;
  [[nodiscard]] OperatorMemory operators(ComputeContext& compute,
                                         const BlockShape& shape) const override;
  [[nodiscard]] Residual forward(StreamCall& call, const Residual& in, const Tensor& out) override;
  void backward_input(StreamCall& call, const Tensor& in, const Tensor& dout,
                      const Tensor& din) override;
  void backward_weight(StreamCall& call, const Tensor& in, const Tensor& dout) override;

 private:
  [[nodiscard]] Tensor dropped(const StreamCall& call) const;

  Parameter* tokens_;
  Parameter* positions_ = nullptr;
  std::int64_t width_;
  DropoutSite dropout_;
};

// Its output: logits [rows, vocabulary] in the products' precision.
class HeadLayer final : public StreamLayer {
 public:
  struct Options {
    std::int64_t vocabulary = 0, width = 0;
    Norm::Kind norm = Norm::Kind::kLayer;
    float norm_epsilon = 1e-5F;
    bool tied = false;
    DType precision = DType::kF32;
  };
  HeadLayer(const Options& options, ParameterSet& parameters, WeightCopies& copies);

  [[nodiscard]] LayerMemory memory(const BlockShape& shape) const override;
  [[nodiscard]] OperatorMemory operators(ComputeContext& compute,
                                         const BlockShape& shape) const override;
  [[nodiscard]] Residual forward(StreamCall& call, const Residual& in, const Tensor& out) override;
  void recompute(StreamCall& call, const Tensor& in) override;
  void backward_input(StreamCall& call, const Tensor& in, const Tensor& dout,
                      const Tensor& din) override;
  void backward_weight(StreamCall& call, const Tensor& in, const Tensor& dout) override;

 private:
  struct Kept {
    Tensor normed, stats;  // until the weight gradient
    Tensor dnormed;        // gradient
  };
  [[nodiscard]] Kept allocate(const BlockShape& shape, LayerAllocators& memory) const;
  [[nodiscard]] Kept kept_of(const StreamCall& call) const;

  Norm norm_;
  Linear projection_;
  std::int64_t width_;
  DType precision_;
};

}  // namespace sluice
