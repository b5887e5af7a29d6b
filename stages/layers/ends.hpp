// The end of a transformer: final norm and projection to the vocabulary, and the loss, which makes
// the logits itself where they are cut into chunks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "stages/network/parts.hpp"
#include "stages/network/specs.hpp"
#include "stages/network/vocabulary.hpp"

namespace sluice::nn {

struct HeadOptions {
  std::int64_t vocabulary = 0, width = 0;
  Norm::Kind norm = Norm::Kind::kLayer;
  float norm_epsilon = 1e-5F;
  bool tied = false;
  DType precision = DType::kF32, stream = DType::kF32;
  std::int64_t by_sample_from = kRowsToSumBySample;  // as of block_shape()
  std::int64_t context = 0;
  int chunks = 1;  // of logits
};

// Throws Error(kUsage) for chunks of logits, and as DividedClasses.
[[nodiscard]] DividedClasses classes_of(const HeadOptions& options, const Shards& shards);

// The stream becomes logits [samples, sequence, vocabulary] of the precision or, with chunks, the
// final norm's results [samples, sequence, width]. Of several shards: this rank's logits, [samples,
// sequence, classes that it has], as panels one after the other (LogitPanels). Its parameters are
// final_norm.weight and so on, and without chunks head.weight, or the tied token_embedding.weight.
class HeadLayer final : public OwnLayer<kOnGpus> {
 public:
  explicit HeadLayer(const HeadOptions& options)
      : options_(options), classes_(options.vocabulary) {}

  Edges set_precision(const Precision& precision) override {
    options_.precision = precision.operands;
    options_.stream = precision.stream;
    return Edges::kStream;
  }
  bool set_shards(const Shards& shards) override {
    classes_ = classes_of(options_, shards);
    return true;
  }
  [[nodiscard]] TensorSpec output(const TensorSpec& input) const override;
  void add_parameters(ParameterSet& set, const std::string& name) override;
  [[nodiscard]] LayerNeeds needs(const TensorSpec& input, ComputeContext& compute) const override;
  [[nodiscard]] LayerPromises promises() const override {
    return {.recomputes = true,
            .keeps_alone = !in_chunks(),
            .capturable = true,
            .writes_rounded = true};
  }
  [[nodiscard]] double cost(const TensorSpec& input) const override;
  void forward(LayerCall& call, const Tensor& y) override;
  void keep_again(LayerCall& call, const Tensor& y) override;
  void backward_input(LayerCall& call, const Tensor& dy, const Tensor& dx) override;
  void backward_weight(LayerCall& call, const Tensor& dy) override;
  void backward(LayerCall& call, const Tensor& dy, const Tensor& dx) override;

 private:
  // With chunks there are no `normed` and `dnormed`, which are the output and its gradient.
  struct Kept {
    StreamShape shape{{}, {}};
    Tensor x, normed, stats;  // until the weight gradient, but for x; normed: of all rows
    Tensor dnormed;           // gradient
    Linear::ShardSum sum;     // scratch of it
    Tensor mine;              // scratch, where ranks gather `normed`
  };
  [[nodiscard]] bool in_chunks() const { return options_.chunks > 1; }
  Kept allocate(const TensorSpec& input, DeviceKind device, LayerAllocators& memory) const;
  [[nodiscard]] Kept kept_of(const LayerCall& call) const;
  // The gradient of the norm's results, from that of the output.
  [[nodiscard]] Tensor normed_gradient(const Kept& kept, const Tensor& dy) const {
    return in_chunks() ? as_rows(dy) : kept.dnormed;
  }

  HeadOptions options_;
  DividedClasses classes_;
  std::optional<Norm> norm_;  // once there are parameters
  std::optional<Linear> projection_;
};

// Cross-entropy of the next token over the head's outputs: targets i32 [samples, sequence],
// negative ones do not count. With chunks it makes the logits of some rows after the other, with
// all that depends on them: the gradient of the projection's weights too. A chunk's rows are a
// multiple of kChunkRows. Ranks that have the logits of some shards each gather a row's maxima,
// then its sums of exponentials with the target's logit, and have all losses.
class TokenLoss final : public Loss {
 public:
  // A multiple of the rows that one of the CPU's matmuls sums over: there the chunks change no
  // bit.
  static constexpr std::size_t kChunkRows = 512;
  explicit TokenLoss(const HeadOptions& options)
      : options_(options), classes_(options.vocabulary) {}

  bool set_precision(const Precision& precision) override {
    options_.precision = precision.operands;
    return true;
  }
  bool set_shards(const Shards& shards) override {
    classes_ = classes_of(options_, shards);
    return true;
  }
  [[nodiscard]] TensorSpec targets(const TensorSpec& outputs) const override;
  [[nodiscard]] bool runs_on_gpu() const override { return true; }
  [[nodiscard]] bool capturable() const override { return true; }
  [[nodiscard]] bool leaves_gradients() const override { return true; }
  [[nodiscard]] LayerNeeds needs(const TensorSpec& outputs, ComputeContext& compute) const override;
  void add_parameters(ParameterSet& set) override;
  [[nodiscard]] double weight(const TensorSpec& outputs, const Tensor& targets) const override;
  void compute(StageContext& ctx, const Tensor& outputs, const Tensor& targets,
               double* sum) override;
  void compute_in(std::byte* scratch, StageContext& ctx, const Tensor& outputs,
                  const Tensor& targets, double* sum) override;
  [[nodiscard]] std::string why_no_answers() const override;
  // Of panels: all logits, which ranks gather, in the vocabulary's order.
  [[nodiscard]] std::optional<TensorSpec> answer_spec(const TensorSpec& outputs) const override;
  void answer(StageContext& ctx, const Tensor& outputs, const Tensor& answer) override;

 private:
  struct Scratch {
    Tensor logits;             // of one chunk
    double* losses = nullptr;  // of all rows
  };
  [[nodiscard]] std::int64_t chunk_rows(const BlockShape& shape) const;
  Scratch allocate(const BlockShape& shape, BumpAllocator& memory) const;
  // Of panels, f32; what ranks gather has a row for each.
  struct PanelScratch {
    Tensor maxima;             // [ranks, rows]
    Tensor found;              // [ranks, 2 * rows]: sums, logits of targets
    Tensor sums;               // [shards of this rank, rows]
    double* losses = nullptr;  // of all rows
  };
  PanelScratch allocate_panels(std::int64_t rows, BumpAllocator& memory) const;
  // What ranks gather for an answer to `outputs`: each as much as the one with the most classes.
  [[nodiscard]] TensorSpec gathered_panels(const TensorSpec& outputs) const;
  void compute_panels(std::byte* memory, StageContext& ctx, const Tensor& logits,
                      const Tensor& targets, double* sum) const;

  HeadOptions options_;
  DividedClasses classes_;
  std::optional<Linear> projection_;  // with chunks, once there are parameters
};

}  // namespace sluice::nn
