// Causal self-attention with grouped queries (Ainslie et al. 2023) as a residual branch.
#pragma once

#include <optional>
#include <string>

#include "stages/layers/residual.hpp"

namespace sluice {

class AttentionLayer final : public ResidualLayer {
 public:
  struct Options : ResidualOptions {
    int heads = 0, kv_heads = 0;
    std::optional<float> rotary_base = std::nullopt;  // set: rotary positions
    DropoutSite probabilities = {};
    // Keep only queries, keys and values; backward_input computes attention again.
    bool recompute = false;
  };
  AttentionLayer(const Options& options, ParameterSet& parameters, WeightCopies& copies);

  [[nodiscard]] std::string note(ComputeContext& compute, const BlockShape& shape) const override;

 protected:
  void measure(const BlockShape& shape, LayerAllocators& memory) const override;
  [[nodiscard]] OperatorMemory branch_operators(ComputeContext& compute,
                                                const BlockShape& shape) const override;
  void branch_keep(StreamCall& call, LayerAllocators memory, const Tensor& x) override;
  void branch_result(StreamCall& call, LayerAllocators memory, const Tensor& y) override;
  void branch_backward_input(StreamCall& call, LayerAllocators memory, const Tensor& dy,
                             const Tensor& dx) override;
  void branch_backward_weight(StreamCall& call, LayerAllocators memory, const Tensor& x,
                              const Tensor& dy) override;

 private:
  struct Kept {
    Tensor qkv;                          // until the input gradient
    std::byte* probabilities = nullptr;  // likewise; recomputed: scratch
    Tensor mixed;                        // until the weight gradient; recomputed: gradients
    Tensor dqkv;                         // gradients
    Tensor dmixed;                       // scratch
  };
  [[nodiscard]] AttentionShape attention_shape(const BlockShape& shape) const;
  Kept allocate(const BlockShape& shape, LayerAllocators& memory) const;
  [[nodiscard]] Dropout mask(const StreamCall& call) const;
  // Computes probabilities and mixed from qkv.
  void attend(StreamCall& call, const Kept& kept) const;

  int heads_, kv_heads_, head_dim_;
  std::optional<float> rotary_base_;
  DropoutSite probabilities_;
  bool recompute_;
  Linear qkv_, output_;
};

}  // namespace sluice
