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
    DType stream = DType::kF32;
  };
  EmbeddingLayer(const Options& options, ParameterSet& parameters);

  [[nodiscard]] LayerMemory memory(const BlockShape& shape) const override;
  [[nodiscard]] OperatorMemory operators(ComputeContext& compute,
                                         const BlockShape& shape) const override;
  void forward(StreamCall& call, const Tensor& in, const Tensor& out) override;
  void backward_input(StreamCall& call, const Tensor& in, const StreamGradient& dout,
                      const StreamGradient& din) override;
  void backward_weight(StreamCall& call, const Tensor& in, const StreamGradient& dout) override;

 private:
  [[nodiscard]] Tensor dropped(const StreamCall& call) const;

  Parameter* tokens_;
  Parameter* positions_ = nullptr;
  std::int64_t width_;
  DropoutSite dropout_;
  DType stream_;
};

// Its output: logits [rows, vocabulary] in the products' precision, or, with chunks, the final
// norm's. Then loss() makes the logits of some rows after the other, with all that depends on them:
// the gradient of the projection's weights too. A chunk's rows are a multiple of kChunkRows.
class HeadLayer final : public StreamLayer {
 public:
  struct Options {
    std::int64_t vocabulary = 0, width = 0;
    Norm::Kind norm = Norm::Kind::kLayer;
    float norm_epsilon = 1e-5F;
    bool tied = false;
    DType precision = DType::kF32;
    int chunks = 1;
  };
  // A multiple of the rows that one of the CPU's products sums over: there the chunks change no
  // bit.
  static constexpr std::size_t kChunkRows = 512;
  // One micro-batch: the norm's results [rows, width], which become their gradients if wanted,
  // targets i32 [rows], and where the summed loss goes.
  struct Loss {
    Tensor normed, targets;
    StepValue<double> scale;
    bool gradient = false;
    double* sum = nullptr;
  };
  HeadLayer(const Options& options, ParameterSet& parameters, WeightCopies& copies);

  [[nodiscard]] LayerMemory memory(const BlockShape& shape) const override;
  [[nodiscard]] OperatorMemory operators(ComputeContext& compute,
                                         const BlockShape& shape) const override;
  void forward(StreamCall& call, const Tensor& in, const Tensor& out) override;
  void recompute(StreamCall& call, const Tensor& in) override;
  void backward_input(StreamCall& call, const Tensor& in, const StreamGradient& dout,
                      const StreamGradient& din) override;
  void backward_weight(StreamCall& call, const Tensor& in, const StreamGradient& dout) override;
  void backward(StreamCall& call, const Tensor& in, const StreamGradient& dout,
                const StreamGradient& din) override;
  // With chunks, right after forward. `scratch`: of memory(shape).
  void loss(ComputeContext& compute, const BlockShape& shape, std::byte* scratch,
            const Loss& loss) const;

 private:
  // With chunks there are no `normed` and `dnormed`, which are the output and its gradient.
  struct Kept {
    Tensor normed, stats;      // until the weight gradient
    Tensor dnormed;            // gradient
    Tensor logits;             // scratch: of one chunk
    double* losses = nullptr;  // scratch: of all rows
  };
  [[nodiscard]] bool in_chunks() const { return chunks_ > 1; }
  [[nodiscard]] std::int64_t chunk_rows(const BlockShape& shape) const;
  [[nodiscard]] Kept allocate(const BlockShape& shape, LayerAllocators& memory) const;
  [[nodiscard]] Kept kept_of(const StreamCall& call) const;
  // The gradient of the norm's results, from that of the output.
  [[nodiscard]] Tensor normed_gradient(const Kept& kept, const StreamGradient& dout) const {
    return in_chunks() ? dout.value : kept.dnormed;
  }

  Norm norm_;
  Linear projection_;
  std::int64_t width_;
  DType precision_;
  int chunks_;
};

}  // namespace sluice
