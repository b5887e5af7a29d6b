// Causal self-attention with grouped queries (Ainslie et al. 2023): queries, keys and values by one
// product, perhaps a norm of each query and key and rotary positions, attention, and a product of
// its result.
#pragma once

#include <optional>
#include <string>

#include "stages/layers/branch.hpp"

namespace sluice {

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
    double output_deviation = 0.02;  // standard deviation of the last product's initial weights
    bool qkv_bias = false, output_bias = false;
    DType precision = DType::kF32;
    BranchResult result = {};
  };
  // Its parameters are <name>qkv.weight, <name>output.weight and so on.
  SelfAttention(const Options& options, const std::string& name, ParameterSet& parameters);

  void measure(const BlockShape& shape, LayerAllocators& memory) const override;
  [[nodiscard]] OperatorMemory operators(ComputeContext& compute,
                                         const BlockShape& shape) const override;
  [[nodiscard]] std::string note(ComputeContext& compute, const BlockShape& shape) const override;
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
  };
  [[nodiscard]] AttentionShape attention_shape(const BlockShape& shape) const;
  Kept allocate(const BlockShape& shape, LayerAllocators& memory) const;
  [[nodiscard]] Dropout mask(const BranchCall& call) const;
  // Computes probabilities and mixed from qkv.
  void attend(const BranchCall& call, const Kept& kept) const;

  int heads_, kv_heads_, head_dim_, window_;
  DType precision_;
  BranchResult result_;
  std::optional<RotaryPositions> positions_;
  DropoutSite probabilities_;
  bool recompute_;
  Linear qkv_;
  std::optional<QueryKeyNorm> norm_;
  Linear output_;
};

}  // namespace sluice
