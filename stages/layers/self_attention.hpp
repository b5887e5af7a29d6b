// Causal self-attention with grouped queries (Ainslie et al. 2023): queries, keys and values by one
// product, perhaps a norm of each query and key and rotary positions, attention, and a product of
// its result. What a residual branch and a layer of a Sequential are made of.
#pragma once

#include <optional>
#include <string>

#include "stages/layers/layer.hpp"
#include "stages/layers/parts.hpp"

namespace sluice {

class SelfAttention {
 public:
  struct Options {
    std::string name = {};  // of <name>.qkv.weight and <name>.output.weight
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
    DType result = DType::kF32;  // f32, or the precision
    DType sum = DType::kF32;     // of the result with a residual; likewise
  };
  SelfAttention(const Options& options, ParameterSet& parameters, WeightCopies& copies);

  // Allocates all that it uses in any phase; the other calls find it at the same place.
  void measure(const BlockShape& shape, LayerAllocators& memory) const;
  [[nodiscard]] OperatorMemory operators(ComputeContext& compute, const BlockShape& shape) const;
  [[nodiscard]] std::string note(ComputeContext& compute, const BlockShape& shape) const;
  // Forward in two calls: keep() computes what is kept from x [rows, width], result() writes y
  // [rows, width] of Options::result from it, or of Options::sum with `residual` added where that
  // has data. Operands below: as in ResidualLayer.
  void keep(StreamCall& call, LayerAllocators memory, const Tensor& x);
  void result(StreamCall& call, LayerAllocators memory, const Tensor& residual, const Tensor& y);
  // dx with null data: not needed.
  void backward_input(StreamCall& call, LayerAllocators memory, const Tensor& dy, const Tensor& dx);
  void backward_weight(StreamCall& call, LayerAllocators memory, const Tensor& x, const Tensor& dy);

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
  [[nodiscard]] Dropout mask(const StreamCall& call) const;
  // Computes probabilities and mixed from qkv.
  void attend(StreamCall& call, const Kept& kept) const;

  int heads_, kv_heads_, head_dim_, window_;
  DType precision_, result_, sum_;
  std::optional<RotaryPositions> positions_;
  DropoutSite probabilities_;
  bool recompute_;
  Linear qkv_;
  std::optional<QueryKeyNorm> norm_;
  Linear output_;
};

}  // namespace sluice
