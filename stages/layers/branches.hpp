// What a transformer's layers compute beside the residual stream: self-attention, or an MLP. As a
// layer of its own, or within ResidualLayer, which adds norm, dropout and sum. Internal to stages/.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <sluice/layers.hpp>

#include "stages/network/parts.hpp"

namespace sluice::nn {

// A call of a layer, as a branch needs it. Copied for each branch: `memory` follows what the layer
// around it has taken.
struct BranchCall {
  LayerCall& layer;
  StreamShape stream;
  LayerAllocators memory;

  [[nodiscard]] ComputeContext& compute() const { return layer.compute(); }
  [[nodiscard]] const BlockShape& shape() const { return stream.whole; }
};

// Operands are [rows, width] of the matmuls' precision where nothing else is said: all rows of the
// stream, but for y, its residual and dx, which are this rank's.
class Branch {
 public:
  virtual ~Branch() = default;

  // The most in any phase. Allocates all that it uses; the other calls find it at the same place.
  // The needs' memory is all that was allocated so far.
  [[nodiscard]] virtual LayerNeeds needs(ComputeContext& compute, const StreamShape& shape,
                                         LayerAllocators& memory) const = 0;
  // Forward in two calls. keep() computes what the branch keeps from x. result() computes y from
  // it: of the stream's type with `residual` added where that has data, else of the result's.
  virtual void keep(BranchCall call, const Tensor& x) = 0;
  virtual void result(BranchCall call, const Tensor& residual, const Tensor& y) = 0;
  // dx with null data: not needed.
  virtual void backward_input(BranchCall call, const Tensor& dy, const Tensor& dx) = 0;
  virtual void backward_weight(BranchCall call, const Tensor& x, const Tensor& dy) = 0;
};

// The type of a branch's last matmul.
struct BranchResult {
  DType alone = DType::kF32;  // f32, or the precision
  DType sum = DType::kF32;    // with a residual added; likewise
};

// The feed-forward part of a block: down(gelu(up(x))), or down(silu(gate(x)) * up(x)) (SwiGLU,
// Shazeer 2020) with gate and up in one matmul. Shards have columns of `hidden`, in units of 16.
class Mlp final : public Branch {
 public:
  enum class Kind { kGelu, kSwiGlu };
  struct Options {
    Kind kind = Kind::kGelu;
    std::int64_t width = 0, hidden = 0;
    double output_deviation = 0.02;  // standard deviation of the last matmul's initial weights
    bool bias = false;
    DType precision = DType::kF32;
    BranchResult result = {};
    Shards shards = {};
  };
  // Its parameters are <name>up.weight (SwiGLU: gate_up), <name>down.weight and so on.
  Mlp(const Options& options, const std::string& name, ParameterSet& parameters);

  [[nodiscard]] LayerNeeds needs(ComputeContext& compute, const StreamShape& shape,
                                 LayerAllocators& memory) const override;
  void keep(BranchCall call, const Tensor& x) override;
  void result(BranchCall call, const Tensor& residual, const Tensor& y) override;
  void backward_input(BranchCall call, const Tensor& dy, const Tensor& dx) override;
  void backward_weight(BranchCall call, const Tensor& x, const Tensor& dy) override;

 private:
  struct Kept {
    Tensor raised;         // until the input gradient: the up matmul's result
    Tensor hidden;         // until the weight gradient: after the activation
    Tensor draised;        // gradients
    Linear::ShardSum sum;  // scratch
  };
  Kept allocate(const StreamShape& shape, LayerAllocators& memory) const;
  [[nodiscard]] Activation activation() const {
    return kind_ == Kind::kGelu ? Activation::kGelu : Activation::kSwiglu;
  }

  Kind kind_;
  DType precision_;
  BranchResult result_;
  Linear up_, down_;
};

// Causal self-attention with grouped queries (Ainslie et al. 2023): queries, keys and values by one
// matmul, perhaps a norm of each query and key and rotary positions, attention, and a matmul of
// its result. Shards have heads of keys and values, with the heads of queries over them; what is
// kept of heads is panels, as Linear's.
class SelfAttention final : public Branch {
 public:
  struct Options {
    std::int64_t width = 0;
    int heads = 0, kv_heads = 0, head_dim = 0;
    std::optional<RotaryPositions> positions = std::nullopt;
    std::optional<float> qk_norm = std::nullopt;  // set: norm of queries and keys, its epsilon
    int window = 0;                               // as AttentionShape's
    DropoutSite probabilities = {};
    // Keep only queries, keys and values; backward_input computes attention again.
    bool recompute = false;
    double output_deviation = 0.02;  // standard deviation of the last matmul's initial weights
    bool qkv_bias = false, output_bias = false;
    DType precision = DType::kF32;
    BranchResult result = {};
    Shards shards = {};
  };
  // Its parameters are <name>qkv.weight, <name>output.weight and so on.
  SelfAttention(const Options& options, const std::string& name, ParameterSet& parameters);

  [[nodiscard]] LayerNeeds needs(ComputeContext& compute, const StreamShape& shape,
                                 LayerAllocators& memory) const override;
  void keep(BranchCall call, const Tensor& x) override;
  void result(BranchCall call, const Tensor& residual, const Tensor& y) override;
  void backward_input(BranchCall call, const Tensor& dy, const Tensor& dx) override;
  void backward_weight(BranchCall call, const Tensor& x, const Tensor& dy) override;

 private:
  struct Kept {
    Tensor qkv;                          // until the input gradient
    Tensor raw, stats;                   // likewise, of queries and keys before their norm
    std::byte* probabilities = nullptr;  // likewise; recomputed: scratch
    Tensor mixed;                        // until the weight gradient; recomputed: gradients
    Tensor dqkv, dgains;                 // gradients
    Tensor dmixed;                       // scratch
    Linear::ShardSum sum;                // likewise
  };
  // What a shard of this rank has, among its heads.
  struct Heads {
    int first = 0, kv_first = 0;  // of the model's
    int heads = 0, kv_heads = 0;
  };
  [[nodiscard]] static std::vector<Heads> heads_of(const Options& options);
  [[nodiscard]] static ShardRanges ranges_of(const Options& options, bool queries_alone);
  [[nodiscard]] AttentionShape attention_shape(const BlockShape& shape, const Heads& heads) const;
  // work(shape, kept, shard) with what is kept of each shard of this rank that has heads.
  template <typename Work>
  void for_shards(const BlockShape& shape, const Kept& all, const Work& work) const;
  Kept allocate(const StreamShape& shape, LayerAllocators& memory) const;
  [[nodiscard]] Dropout mask(const BranchCall& call) const;
  // Computes probabilities and mixed from qkv.
  void attend(const BranchCall& call, const Kept& kept) const;

  int all_heads_, head_dim_, window_;
  std::vector<Heads> heads_;       // of each shard
  std::int64_t normed_heads_ = 0;  // of queries and keys, of all of them
  DType precision_;
  BranchResult result_;
  std::optional<RotaryPositions> positions_;
  DropoutSite probabilities_;
  bool recompute_;
  Linear qkv_;
  std::optional<QueryKeyNorm> norm_;
  Linear output_;
};

}  // namespace sluice::nn
