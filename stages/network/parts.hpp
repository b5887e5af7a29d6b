// Parts that layers share: a micro-batch as rows, memory cut into tensors, a linear map and norms
// with their parameters, and dropout keyed by place. Internal to stages/.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sluice/layers.hpp>
#include <sluice/operators.hpp>
#include <sluice/parameter.hpp>
#include <sluice/stage.hpp>

#include "stages/compute/matmul_spec.hpp"
#include "stages/tensor/bump_allocator.hpp"

namespace sluice::nn {

// A micro-batch, and what it is computed on: all that a layer's memory depends on.
struct BlockShape {
  std::int64_t samples = 0, sequence = 0;  // rows of a sample
  DeviceKind device = DeviceKind::kCpu;
  bool by_sample = false;  // sums over rows start anew at each sample
  [[nodiscard]] std::int64_t rows() const { return samples * sequence; }
};
// Of a tensor [samples, ..., width], or [samples, sequence] of integers. On a CPU sums go by sample
// from so many rows a sample on.
[[nodiscard]] BlockShape block_shape(const TensorSpec& input, DeviceKind device,
                                     std::int64_t by_sample_from = kRowsToSumBySample);

// The residual stream of a micro-batch, on a rank that may share its stage with others. These may
// deal its positions: then each rank has those of its own shards, [samples, shards, positions of a
// shard, width], else all, [samples, positions, width].
struct StreamShape {
  BlockShape whole, mine;
  Shards shards = {};
  bool dealt = false;
  // Of all positions, on each rank.
  StreamShape(const BlockShape& all, const Shards& of) : whole(all), mine(all), shards(of) {}
  [[nodiscard]] int ranks() const { return shards.count / shards.local; }
  // Of this rank, in each sample.
  [[nodiscard]] std::int64_t first_position() const {
    return dealt ? mine.sequence / shards.local * shards.first : 0;
  }
};
// As block_shape(); of a stream that is dealt where it has four dimensions.
[[nodiscard]] StreamShape stream_shape(const TensorSpec& stream, const Shards& shards,
                                       DeviceKind device,
                                       std::int64_t by_sample_from = kRowsToSumBySample);
// What this rank has of a stream of all positions.
[[nodiscard]] TensorSpec dealt_stream(const TensorSpec& whole, const Shards& shards);

// Rows that ranks gather from those that deal them.
void gather_rows(const StageContext& stage, const StreamShape& shape, const Tensor& mine,
                 const Tensor& whole);
// The sum over ranks of f32 rows: of all, in place, where each has all; else of this rank's.
void sum_rows(const StageContext& stage, const StreamShape& shape, const Tensor& all,
              const Tensor& mine);
// The collective that gather_rows() makes; none where each rank has all rows.
[[nodiscard]] std::vector<PlannedCollective> gathers(const StreamShape& shape, DType type,
                                                     std::int64_t width);

// work(share, first row, rows) for the rows of this rank's part of the stream of which each shard
// of it adds up a parameter's gradient that all ranks have whole: its part of the positions of each
// sample, in order of samples.
template <typename Work>
void for_shared_rows(const StreamShape& shape, const Work& work) {
  const Shards& shards = shape.shards;
  const std::int64_t sequence = shape.mine.sequence;
  for (std::int64_t sample = 0; sample < shape.mine.samples; ++sample) {
    for (int share = 0; share < shards.local; ++share) {
      const int shard = shards.first + share;
      const auto begin = [&](int after) {
        return shape.dealt ? sequence / shards.local * (share + after)
                           : shards.begin(shard + after, sequence);
      };
      const std::int64_t first = begin(0), rows = begin(1) - first;
      if (rows > 0) work(static_cast<std::size_t>(share), sample * sequence + first, rows);
    }
  }
}

// As for_summed_rows() of its samples.
template <typename Work>
void for_summed_rows(const BlockShape& shape, const Work& work) {
  sluice::for_summed_rows(shape.samples, shape.sequence, shape.by_sample, work);
}

// Where a layer allocates what it keeps, by lifetime as in LayerMemory. It finds it again by
// allocating the same tensors in the same order from the memory of a call.
struct LayerAllocators {
  BumpAllocator until_input, until_weight, gradients, scratch;

  LayerAllocators() = default;
  explicit LayerAllocators(const LayerCall& call)
      : until_input(call.until_input),
        until_weight(call.until_weight),
        gradients(call.gradients),
        scratch(call.scratch) {}
  [[nodiscard]] LayerMemory used() const {
    return {.until_input = until_input.used(),
            .until_weight = until_weight.used(),
            .gradients = gradients.used(),
            .scratch = scratch.used()};
  }
};

// dy as matmuls read it: the copy in bf16 where a layer has it.
[[nodiscard]] inline const Tensor& operand_gradient(const LayerCall& call, const Tensor& dy) {
  return call.rounded_dy.data != nullptr ? call.rounded_dy : dy;
}

// The gradient of a norm's input. `rounded` has data where a copy of it in bf16 is wanted.
struct StreamGradient {
  Tensor value;
  Tensor rounded = {};
};

// Rows of a dimension, `length` from `begin` on.
struct RowRange {
  std::int64_t begin = 0, length = 0;
};
// Of each shard of this rank: what it has of a dimension, in order.
using ShardRanges = std::vector<std::vector<RowRange>>;
// Of a dimension dealt in units of so many rows, the last of which may be short.
[[nodiscard]] ShardRanges unit_ranges(const Shards& shards, std::int64_t rows, std::int64_t unit);
inline constexpr std::int64_t kColumnUnit = 16;  // of columns: a cache line of f32

// The input gradient of a layer whose backward_input() makes a collective, where nobody needs it.
// Has the layer called in that case.
[[nodiscard]] inline Tensor unneeded_gradient(LayerAllocators& memory, DType type,
                                              std::int64_t rows, std::int64_t width) {
  (void)memory.gradients.bytes(1);
  return memory.scratch.tensor(type, rows, width);
}

// y = x weightᵀ + bias, weight [out, in] and, if asked, bias [out].
//
// Shards may divide it. Then a tensor of what is divided is panels: that of each shard of this
// rank, dense [rows, what the shard has], one after the other in memory.
class Linear {
 public:
  // kColumns: columns of y, so rows of the weight and of the bias; x is whole. kRows: columns of
  // the weight, which go with columns of x; y is whole, and the bias too, which is added once.
  using Split = nn::Split;
  struct Options {
    std::int64_t in = 0, out = 0;
    Init weight = Init::normal(0.02), bias_init = Init::constant(0);
    bool bias = false;
    bool tied = false;
    DType precision = DType::kF32;  // of x, and of the weight as matmuls read it
    // y may have that precision: then a GPU adds a copy of the bias in it.
    bool rounds_bias = false;
    Split split = Split::kNone;  // kNone where there is one shard
    Shards shards = {};
    ShardRanges ranges = {};  // of `out` (kColumns) or `in` (kRows)
  };
  // Its parameters are <name>weight and <name>bias.
  Linear(const std::string& name, const Options& options, ParameterSet& parameters);

  // What this rank has.
  [[nodiscard]] std::int64_t in() const { return weight_->shape[1]; }
  [[nodiscard]] std::int64_t out() const { return weight_->shape[0]; }
  // The largest ctx.workspace() of a call. `result`: type of y; `before`: the activation that
  // precedes the matmul.
  [[nodiscard]] std::size_t workspace(ComputeContext& ctx, std::int64_t rows, DType result,
                                      std::optional<Activation> before = std::nullopt) const;
  // residual: with data, y = residual + the matmul. Not of kRows.
  void forward(ComputeContext& ctx, const Tensor& x, const Tensor& y,
               const Tensor& residual = {}) const;
  // Not of kColumns.
  void backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& dx) const;
  // Of any split. The sum over all shards, in f32, rounded once with what is added to it; between
  // ranks a collective: sums_over_ranks(). y, residual and dx are this rank's part of the stream.
  // sum: shard_sum() of the result's type.
  struct ShardSum {
    Tensor all;   // f32 [rows, width]; no data where the result's memory serves
    Tensor mine;  // f32, this rank's rows; likewise
  };
  void forward(const StageContext& stage, const StreamShape& shape, const Tensor& x,
               const Tensor& y, const Tensor& residual, const ShardSum& sum) const;
  void backward_input(const StageContext& stage, const StreamShape& shape, const Tensor& dy,
                      const Tensor& dx, const ShardSum& sum) const;
  // Scratch of the two above; no data where they need none.
  [[nodiscard]] ShardSum shard_sum(BumpAllocator& scratch, const StreamShape& shape,
                                   DType result) const;
  // The collective that forward() (kRows) or backward_input() (kColumns) makes, if any.
  [[nodiscard]] std::vector<PlannedCollective> sums_over_ranks(const StreamShape& shape) const;
  void backward_weight(ComputeContext& ctx, const BlockShape& shape, const Tensor& x,
                       const Tensor& dy) const;
  // With the activation that follows (precedes) the matmul; raised is what it was applied to.
  void forward(ComputeContext& ctx, Activation activation, const Tensor& x, const Tensor& raised,
               const Tensor& y) const;
  void backward_input(ComputeContext& ctx, Activation activation, const Tensor& dy,
                      const Tensor& raised, const Tensor& draised) const;

 private:
  // The weight in the matmuls' precision.
  [[nodiscard]] const Tensor& operand() const {
    return precision_ == DType::kF32 ? weight_->value : weight_->bf16_copy;
  }
  // As a matmul with this result adds it.
  [[nodiscard]] Tensor bias_for(const Tensor& y) const;
  // work(shard) for each shard of this rank that has something of it, else for 0.
  template <typename Work>
  void for_shards(const Work& work) const;
  // What this rank's shards before `shard` have of what is divided, and all of them.
  [[nodiscard]] std::int64_t before(std::size_t shard) const;
  [[nodiscard]] std::int64_t divided() const { return split_ == Split::kRows ? in() : out(); }
  // Of a shard: what it has of the weight's memory, and of the bias's if that is divided, and of
  // panels, whose columns are those of what is divided or as many for each.
  [[nodiscard]] Tensor weight_panel(const Tensor& all, std::size_t shard) const;
  [[nodiscard]] Tensor bias_panel(const Tensor& all, std::size_t shard) const;
  [[nodiscard]] Tensor panel(const Tensor& all, std::size_t shard) const;
  void sum_shards(const StageContext& stage, const StreamShape& shape, bool backward,
                  const Tensor& operand, const Tensor& residual, const Tensor& result,
                  const ShardSum& sum) const;

  Split split_;
  Shards shards_;
  std::vector<std::int64_t> sizes_;  // of what is divided, of each shard of this rank
  Parameter* weight_;
  Parameter* bias_ = nullptr;
  bool rounds_bias_;
  DType precision_;
};

// LayerNorm with parameters <name>weight and <name>bias, or RMSNorm with the first. In a model of
// shards their gradients are shares: shard i has that of the i-th part of each sample's positions.
class Norm {
 public:
  enum class Kind { kLayer, kRms };
  Norm(Kind kind, const std::string& name, std::int64_t width, float epsilon,
       ParameterSet& parameters, const Shards& shards = {});

  [[nodiscard]] std::int64_t stats_per_row() const { return kind_ == Kind::kLayer ? 2 : 1; }
  // What forward keeps of so many rows until the weight gradient, f32.
  [[nodiscard]] Tensor stats(std::byte* memory, std::int64_t rows) const {
    return {memory, {DType::kF32, Shape{rows, stats_per_row()}}};
  }
  // The largest ctx.workspace() of a call.
  [[nodiscard]] std::size_t workspace(ComputeContext& ctx, std::int64_t rows) const;
  void forward(ComputeContext& ctx, const Tensor& x, const Tensor& y, const Tensor& stats) const;
  // dx = residual + the gradient; residual: NormGradients. dx without data: not wanted.
  void backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& x, const Tensor& stats,
                      const Tensor& residual, const StreamGradient& dx) const;
  // Rows are this rank's.
  void backward_weight(ComputeContext& ctx, const StreamShape& shape, const Tensor& dy,
                       const Tensor& x, const Tensor& stats) const;
  // Both, in one pass on a GPU, with the same bits.
  void backward(ComputeContext& ctx, const StreamShape& shape, const Tensor& dy, const Tensor& x,
                const Tensor& stats, const Tensor& residual, const StreamGradient& dx) const;

 private:
  void backward(ComputeContext& ctx, const Tensor& dy, const Tensor& x, const Tensor& stats,
                const NormGradients& gradients) const;

  Kind kind_;
  float epsilon_;
  Shards shards_;
  Parameter* weight_;
  Parameter* bias_ = nullptr;
};

// RMSNorm of each head of queries and keys in a packed qkv, with weights <name>query_norm.weight
// and <name>key_norm.weight. `gains`: their gradients of one micro-batch, from the input gradient
// to the weight gradient. In a model of shards a call is of the heads of one, whose share of the
// gradients they add up.
class QueryKeyNorm {
 public:
  QueryKeyNorm(const std::string& name, std::int64_t head_dim, float epsilon,
               ParameterSet& parameters, const Shards& shards = {});

  // f32 [n, head_dim]: two rows for each part whose sums are added up by themselves.
  [[nodiscard]] static Shape gains(const BlockShape& shape, std::int64_t head_dim) {
    return {2 * (shape.by_sample ? shape.samples : 1), head_dim};
  }
  void forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
               const Tensor& raw, const Tensor& stats) const;
  void backward_input(ComputeContext& ctx, const AttentionShape& shape, const Tensor& raw,
                      const Tensor& stats, const Tensor& dqkv, const Tensor& gains) const;
  // `shard`: of this rank's.
  void backward_weight(ComputeContext& ctx, const Tensor& gains, std::size_t shard = 0) const;

 private:
  float epsilon_;
  Parameter *query_, *key_;
};

// A place in the model where dropout may happen; none outside training.
struct DropoutSite {
  float probability = 0;
  std::uint32_t site = 0;  // random_site(layer, place)

  [[nodiscard]] bool active(const LayerCall& call) const {
    return probability > 0 && call.stage.phase == Phase::kTrain;
  }
  // elements_per_sample: of the operand.
  [[nodiscard]] Dropout at(const LayerCall& call, std::int64_t elements_per_sample) const;
  // work(dropout, first row, rows) of rows of the stream that lie together in the whole.
  template <typename Work>
  void for_rows(const LayerCall& call, const StreamShape& shape, std::int64_t width,
                const Work& work) const {
    const std::int64_t samples = shape.dealt ? shape.mine.samples : 1;
    const std::int64_t rows = shape.mine.rows() / samples;
    for (std::int64_t sample = 0; sample < samples; ++sample) {
      Dropout each = at(call, shape.whole.sequence * width);
      each.first_element += static_cast<std::uint64_t>(
          (sample * shape.whole.sequence + shape.first_position()) * width);
      work(each, sample * rows, rows);
    }
  }
};

// embedding(), which a transformer begins with too.
struct EmbeddingOptions {
  std::int64_t classes = 0, width = 0;
  std::int64_t positions = 0;  // 0: none learned
  std::int64_t context = 0;    // the most positions of a sample, which has one; 0: any
  const char* table_name = "weight";
  const char* positions_name = "positions";
  double deviation = 1;  // of the initial values
  bool tied = false;
  DropoutSite dropout = {};
  DType stream = DType::kF32;
};
[[nodiscard]] std::unique_ptr<Layer> make_embedding(const EmbeddingOptions& options);

// The same memory from an element on; null data stays null.
[[nodiscard]] Tensor tensor_at(const Tensor& all, std::int64_t first, const Shape& shape);
// The same memory as [rows, last dimension].
[[nodiscard]] Tensor as_rows(const Tensor& tensor);

}  // namespace sluice::nn
