// Parts that layers share: a linear map and a norm with their parameters, the copies of weights in
// the products' precision, and dropout keyed by place. Internal to stages/.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include <sluice/parameter.hpp>

#include "stages/layers/layer.hpp"

namespace sluice {

// Copies of weights in a product's precision, one set per stage: what Parameter::rounded is of. In
// f32 the values themselves are used: then nothing is copied, and no call but add() is needed.
class WeightCopies {
 public:
  explicit WeightCopies(DType precision) : precision_(precision) {}

  // This weight as products read it. The reference stays valid, and is complete after
  // ParameterSet::allocate() and allocate().
  const Tensor& add(Parameter& parameter);
  // A bias of a product with a result of this precision: a GPU adds it rounded. A CPU adds the
  // value; there it has no copy.
  void add_bias(Parameter& parameter);
  // Whether biases have copies on such a device.
  [[nodiscard]] bool rounds_biases(DeviceKind device) const {
    return precision_ != DType::kF32 && device != DeviceKind::kCpu;
  }
  // Bytes that allocate() takes.
  [[nodiscard]] std::size_t bytes(DeviceKind device) const;
  // After ParameterSet::allocate.
  void allocate(const DeviceMemory& memory);
  // Converts the values whose copies are old. An optimizer may have written both.
  void refresh(ComputeContext& ctx);
  [[nodiscard]] DType precision() const { return precision_; }

 private:
  DType precision_;
  std::vector<Parameter*> weights_, biases_;
  std::vector<Conversion> conversions_;  // of one call
  Buffer memory_;
};

// y = x weightᵀ + bias, with parameters <name>.weight [out, in] and, if asked, <name>.bias [out].
class Linear {
 public:
  struct Options {
    std::int64_t in = 0, out = 0;
    double deviation = 0.02;  // of the initial weights
    bool bias = false;
    bool rounds_bias = false;  // y may have the products' precision: WeightCopies::add_bias()
    bool tied = false;
  };
  Linear(const std::string& name, const Options& options, ParameterSet& parameters,
         WeightCopies& copies);

  [[nodiscard]] std::int64_t in() const { return weight_->shape[1]; }
  [[nodiscard]] std::int64_t out() const { return weight_->shape[0]; }
  // The largest ctx.workspace() of a call. `result`: type of y; `before`: the activation that
  // precedes the product.
  [[nodiscard]] std::size_t workspace(ComputeContext& ctx, std::int64_t rows, DType result,
                                      std::optional<Activation> before = std::nullopt) const;
  // residual: with data, y = residual + the product.
  void forward(ComputeContext& ctx, const Tensor& x, const Tensor& y,
               const Tensor& residual = {}) const;
  void backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& dx) const;
  void backward_weight(ComputeContext& ctx, const BlockShape& shape, const Tensor& x,
                       const Tensor& dy) const;
  // With the activation that follows (precedes) the product; raised is what it was applied to.
  void forward(ComputeContext& ctx, Activation activation, const Tensor& x, const Tensor& raised,
               const Tensor& y) const;
  void backward_input(ComputeContext& ctx, Activation activation, const Tensor& dy,
                      const Tensor& raised, const Tensor& draised) const;

 private:
  // As a product with this result adds it.
  [[nodiscard]] Tensor bias_for(const Tensor& y) const;

  Parameter* weight_;
  Parameter* bias_ = nullptr;
  bool rounds_bias_;
  const Tensor* operand_;  // the weight in the products' precision
  DType operand_type_;
};

// LayerNorm with weight and bias, or RMSNorm with a weight.
class Norm {
 public:
  enum class Kind { kLayer, kRms };
  Norm(Kind kind, const std::string& name, std::int64_t width, float epsilon,
       ParameterSet& parameters);

  [[nodiscard]] std::int64_t stats_per_row() const { return kind_ == Kind::kLayer ? 2 : 1; }
  // The largest ctx.workspace() of a call.
  [[nodiscard]] std::size_t workspace(ComputeContext& ctx, std::int64_t rows) const;
  void forward(ComputeContext& ctx, const Tensor& x, const Tensor& y, const Tensor& stats) const;
  // dx = residual + the gradient; residual: NormGradients. dx without data: not wanted.
  void backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& x, const Tensor& stats,
                      const Tensor& residual, const StreamGradient& dx) const;
  void backward_weight(ComputeContext& ctx, const BlockShape& shape, const Tensor& dy,
                       const Tensor& x, const Tensor& stats) const;
  // Both, in one pass on a GPU, with the same bits.
  void backward(ComputeContext& ctx, const BlockShape& shape, const Tensor& dy, const Tensor& x,
                const Tensor& stats, const Tensor& residual, const StreamGradient& dx) const;

 private:
  void backward(ComputeContext& ctx, const Tensor& dy, const Tensor& x, const Tensor& stats,
                const NormGradients& gradients) const;

  Kind kind_;
  float epsilon_;
  Parameter* weight_;
  Parameter* bias_ = nullptr;
};

// RMSNorm of each head of queries and keys in a packed qkv, with weights <name>.query_norm.weight
// and <name>.key_norm.weight. `gains`: their gradients of one micro-batch, from the input gradient
// to the weight gradient.
class QueryKeyNorm {
 public:
  QueryKeyNorm(const std::string& name, std::int64_t head_dim, float epsilon,
               ParameterSet& parameters);

  [[nodiscard]] static std::size_t workspace(ComputeContext& ctx, const AttentionShape& shape) {
    return query_key_norm_backward_workspace(ctx, shape);
  }
  // f32 [n, head_dim]: two rows for each part whose sums are added up by themselves.
  [[nodiscard]] static Shape gains(const BlockShape& shape, std::int64_t head_dim) {
    return {2 * (shape.by_sample ? shape.samples : 1), head_dim};
  }
  void forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
               const Tensor& raw, const Tensor& stats) const;
  void backward_input(ComputeContext& ctx, const AttentionShape& shape, const Tensor& raw,
                      const Tensor& stats, const Tensor& dqkv, const Tensor& gains) const;
  void backward_weight(ComputeContext& ctx, const Tensor& gains) const;

 private:
  float epsilon_;
  Parameter *query_, *key_;
};

// A place in the model where dropout may happen; none outside training.
struct DropoutSite {
  float probability = 0;
  std::uint32_t site = 0;  // random_site(layer, place)

  [[nodiscard]] bool active(const StreamCall& call) const {
    return probability > 0 && call.stage.phase == Phase::kTrain;
  }
  // elements_per_sample: of the operand.
  [[nodiscard]] Dropout at(const StreamCall& call, std::int64_t elements_per_sample) const;
};

// to = from: bytes of equal tensors, or a conversion where the types differ.
void copy_or_convert(ComputeContext& ctx, const Tensor& from, const Tensor& to);
void fill_zero(ComputeContext& ctx, const Tensor& tensor);
// The same memory as [rows, last dimension].
[[nodiscard]] Tensor as_rows(const Tensor& tensor);

}  // namespace sluice
