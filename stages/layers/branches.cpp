#include "stages/layers/branches.hpp"

#include <algorithm>
#include <utility>

#include "comm/base/byte_sums.hpp"
#include "comm/base/throw_error.hpp"

namespace sluice::nn {

namespace {

// Rows of a weight that makes gates, then what they let through.
ShardRanges gated(ShardRanges ranges, std::int64_t hidden) {
  for (std::vector<RowRange>& shard : ranges) {
    shard.push_back({shard[0].begin + hidden, shard[0].length});
  }
  return ranges;
}

}  // namespace

Mlp::Mlp(const Options& options, const std::string& name, ParameterSet& parameters)
    : kind_(options.kind),
      precision_(options.precision),
      result_(options.result),
      up_(name + (options.kind == Kind::kGelu ? "up." : "gate_up."),
          {.in = options.width,
           .out = options.hidden * (options.kind == Kind::kGelu ? 1 : 2),
           .bias = options.bias,
           .precision = precision_,
           .rounds_bias = true,
           .split = Linear::Split::kColumns,
           .shards = options.shards,
           .ranges = options.kind == Kind::kGelu
                         ? unit_ranges(options.shards, options.hidden, kColumnUnit)
                         : gated(unit_ranges(options.shards, options.hidden, kColumnUnit),
                                 options.hidden)},
          parameters),
      down_(name + "down.",
            {.in = options.hidden,
             .out = options.width,
             .weight = Init::normal(options.output_deviation),
             .bias = options.bias,
             .precision = precision_,
             .rounds_bias = options.result.alone != DType::kF32,
             .split = Linear::Split::kRows,
             .shards = options.shards,
             .ranges = unit_ranges(options.shards, options.hidden, kColumnUnit)},
            parameters) {}

Mlp::Kept Mlp::allocate(const StreamShape& shape, LayerAllocators& memory) const {
  const std::int64_t rows = shape.whole.rows();
  Kept kept;
  kept.raised = memory.until_input.tensor(precision_, rows, up_.out());
  kept.hidden = memory.until_weight.tensor(precision_, rows, down_.in());
  kept.draised = memory.gradients.tensor(precision_, rows, up_.out());
  kept.sum = up_.shard_sum(memory.scratch, shape, precision_);  // of either matmul
  return kept;
}

LayerNeeds Mlp::needs(ComputeContext& compute, const StreamShape& shape,
                      LayerAllocators& memory) const {
  (void)allocate(shape, memory);
  const std::int64_t rows = shape.whole.rows();
  return {.memory = memory.used(),
          .operator_bytes = std::max({up_.workspace(compute, rows, precision_),
                                      down_.workspace(compute, rows, result_.sum, activation()),
                                      down_.workspace(compute, rows, result_.alone, activation())}),
          .collectives = {.forward = down_.sums_over_ranks(shape),
                          .backward_input = up_.sums_over_ranks(shape)}};
}

void Mlp::keep(BranchCall call, const Tensor& x) {
  const Kept kept = allocate(call.stream, call.memory);
  up_.forward(call.compute(), activation(), x, kept.raised, kept.hidden);
}

void Mlp::result(BranchCall call, const Tensor& residual, const Tensor& y) {
  const Kept kept = allocate(call.stream, call.memory);
  down_.forward(call.layer.stage, call.stream, kept.hidden, y, residual, kept.sum);
}

void Mlp::backward_input(BranchCall call, const Tensor& dy, const Tensor& dx) {
  const Kept kept = allocate(call.stream, call.memory);
  down_.backward_input(call.compute(), activation(), dy, kept.raised, kept.draised);
  if (dx.data != nullptr)
    up_.backward_input(call.layer.stage, call.stream, kept.draised, dx, kept.sum);
}

void Mlp::backward_weight(BranchCall call, const Tensor& x, const Tensor& dy) {
  const Kept kept = allocate(call.stream, call.memory);
  down_.backward_weight(call.compute(), call.shape(), kept.hidden, dy);
  up_.backward_weight(call.compute(), call.shape(), x, kept.draised);
}

std::vector<SelfAttention::Heads> SelfAttention::heads_of(const Options& options) {
  const int group = options.heads / options.kv_heads;
  std::vector<Heads> heads;
  for (int i = 0; i < options.shards.local; ++i) {
    const int shard = options.shards.first + i;
    const auto begin = static_cast<int>(options.shards.begin(shard, options.kv_heads));
    const auto end = static_cast<int>(options.shards.begin(shard + 1, options.kv_heads));
    heads.push_back({begin * group, begin, (end - begin) * group, end - begin});
  }
  return heads;
}

ShardRanges SelfAttention::ranges_of(const Options& options, bool queries_alone) {
  const std::int64_t dim = options.head_dim;
  const std::int64_t keys = options.heads * dim, values = keys + options.kv_heads * dim;
  ShardRanges ranges;
  for (const Heads& heads : heads_of(options)) {
    const std::int64_t first = heads.kv_first * dim, rows = heads.kv_heads * dim;
    ranges.push_back({{heads.first * dim, heads.heads * dim}});
    if (queries_alone) continue;
    ranges.back().push_back({keys + first, rows});
    ranges.back().push_back({values + first, rows});
  }
  return ranges;
}

SelfAttention::SelfAttention(const Options& options, const std::string& name,
                             ParameterSet& parameters)
    : all_heads_(options.heads),
      head_dim_(options.head_dim),
      window_(options.window),
      heads_(heads_of(options)),
      precision_(options.precision),
      result_(options.result),
      positions_(options.positions),
      probabilities_(options.probabilities),
      recompute_(options.recompute),
      qkv_(name + "qkv.",
           {.in = options.width,
            .out = std::int64_t{options.heads + 2 * options.kv_heads} * head_dim_,
            .bias = options.qkv_bias,
            .precision = precision_,
            .rounds_bias = true,
            .split = Linear::Split::kColumns,
            .shards = options.shards,
            .ranges = ranges_of(options, false)},
           parameters),
      norm_(options.qk_norm
                ? std::optional<QueryKeyNorm>(std::in_place, name, head_dim_, *options.qk_norm,
                                              parameters, options.shards)
                : std::nullopt),
      output_(name + "output.",
              {.in = std::int64_t{options.heads} * head_dim_,
               .out = options.width,
               .weight = Init::normal(options.output_deviation),
               .bias = options.output_bias,
               .precision = precision_,
               .rounds_bias = options.result.alone != DType::kF32,
               .split = Linear::Split::kRows,
               .shards = options.shards,
               .ranges = ranges_of(options, true)},
              parameters) {
  for (const Heads& heads : heads_) normed_heads_ += heads.heads + heads.kv_heads;
}

AttentionShape SelfAttention::attention_shape(const BlockShape& shape, const Heads& heads) const {
  return {.samples = shape.samples,
          .sequence = shape.sequence,
          .heads = heads.heads,
          .kv_heads = heads.kv_heads,
          .head_dim = head_dim_,
          .window = window_,
          .first_head = heads.first,
          .all_heads = all_heads_};
}

template <typename Work>
void SelfAttention::for_shards(const BlockShape& shape, const Kept& all, const Work& work) const {
  const std::int64_t rows = shape.rows();
  std::int64_t queries = 0, keys = 0, gains = 0;  // heads of the shards before, and rows of gains
  BumpAllocator probabilities(all.probabilities);
  for (std::size_t shard = 0; shard < heads_.size(); ++shard) {
    const Heads& mine = heads_[shard];
    const AttentionShape part = attention_shape(shape, mine);
    const auto panel = [&](const Tensor& of, std::int64_t before, std::int64_t columns) {
      return tensor_at(of, rows * before, {rows, columns});
    };
    const std::int64_t packed = (queries + 2 * keys) * head_dim_, mixed = queries * head_dim_;
    const std::int64_t mixed_width = std::int64_t{mine.heads} * head_dim_;
    const std::int64_t normed = queries + keys, normed_heads = mine.heads + mine.kv_heads;
    Kept kept;
    kept.qkv = panel(all.qkv, packed, part.packed_width());
    kept.dqkv = panel(all.dqkv, packed, part.packed_width());
    kept.mixed = panel(all.mixed, mixed, mixed_width);
    kept.dmixed = panel(all.dmixed, mixed, mixed_width);
    kept.raw = panel(all.raw, normed * head_dim_, normed_heads * head_dim_);
    kept.stats = panel(all.stats, normed, normed_heads);
    const Shape each = QueryKeyNorm::gains(shape, head_dim_);
    kept.dgains = tensor_at(all.dgains, gains * head_dim_, each);
    gains += each[0];
    queries += mine.heads;
    keys += mine.kv_heads;
    if (mine.heads == 0) continue;
    kept.probabilities = probabilities.bytes(attention_state_bytes(shape.device, part, precision_));
    work(part, kept, shard);
  }
}

SelfAttention::Kept SelfAttention::allocate(const StreamShape& stream,
                                            LayerAllocators& memory) const {
  const BlockShape& shape = stream.whole;
  const std::int64_t rows = shape.rows();
  BumpAllocator& probabilities = recompute_ ? memory.scratch : memory.until_input;
  BumpAllocator& mixed = recompute_ ? memory.gradients : memory.until_weight;
  Kept kept;
  kept.qkv = memory.until_input.tensor(precision_, rows, qkv_.out());
  if (norm_) {
    kept.raw = memory.until_input.tensor(precision_, rows, normed_heads_ * head_dim_);
    kept.stats = memory.until_input.tensor(DType::kF32, rows, normed_heads_);
    const Shape gains = QueryKeyNorm::gains(shape, head_dim_);
    kept.dgains = memory.gradients.tensor(
        DType::kF32, gains[0] * static_cast<std::int64_t>(heads_.size()), gains[1]);
  }
  std::size_t bytes = 0;
  for_shards(shape, {}, [&](const AttentionShape& part, const Kept& /*kept*/, std::size_t) {
    add_bytes(bytes,
              round_up(attention_state_bytes(shape.device, part, precision_), kBufferAlignment));
  });
  kept.probabilities = probabilities.bytes(bytes);
  kept.mixed = mixed.tensor(precision_, rows, output_.in());
  kept.dqkv = memory.gradients.tensor(precision_, rows, qkv_.out());
  kept.dmixed = memory.scratch.tensor(precision_, rows, output_.in());
  kept.sum = qkv_.shard_sum(memory.scratch, stream, precision_);  // of either matmul
  return kept;
}

// The note names the engine of training. Evaluation drops nothing and may use another one.
LayerNeeds SelfAttention::needs(ComputeContext& compute, const StreamShape& stream,
                                LayerAllocators& memory) const {
  // A shard's panels begin at multiples of 16 bytes, whatever rank has it: a GPU's library chooses
  // by that too.
  const auto unit = static_cast<int>(16 / size_of(precision_));
  if (stream.shards.count > 1 && compute.device().kind != DeviceKind::kCpu &&
      head_dim_ % unit != 0) {
    throw_usage("heads of {} in {} with {} shards on {}; legal there: a multiple of {}, or 1 shard",
                head_dim_, name_of(precision_), stream.shards.count, to_string(compute.device()),
                unit);
  }
  const Kept kept = allocate(stream, memory);
  const BlockShape& batch = stream.whole;
  const bool drops = probabilities_.probability > 0;
  const std::int64_t rows = batch.rows();
  LayerNeeds needs{.memory = memory.used(),
                   .operator_bytes = std::max({qkv_.workspace(compute, rows, precision_),
                                               output_.workspace(compute, rows, result_.alone),
                                               output_.workspace(compute, rows, result_.sum)}),
                   .collectives = {.forward = output_.sums_over_ranks(stream),
                                   .backward_input = qkv_.sums_over_ranks(stream)}};
  for_shards(batch, kept, [&](const AttentionShape& shape, const Kept& /*kept*/, std::size_t) {
    const std::string engine = attention_engine(compute, shape, precision_, drops);
    if (!engine.empty()) needs.note = "attention: " + engine;
    if (positions_) {
      needs.table_bytes = ComputeContext::rotary_table_bytes(shape.sequence, head_dim_);
    }
    needs.operator_bytes = std::max(
        {needs.operator_bytes, attention_forward_workspace(compute, shape, precision_, false),
         attention_forward_workspace(compute, shape, precision_, drops),
         attention_backward_workspace(compute, shape, precision_, drops),
         norm_ ? query_key_norm_backward_workspace(compute, shape) : 0});
  });
  return needs;
}

Dropout SelfAttention::mask(const BranchCall& call) const {
  return probabilities_.at(call.layer, all_heads_ * call.shape().sequence * call.shape().sequence);
}

void SelfAttention::attend(const BranchCall& call, const Kept& all) const {
  for_shards(call.shape(), all, [&](const AttentionShape& shape, const Kept& kept, std::size_t) {
    attention_forward(call.compute(), shape, kept.qkv, mask(call), kept.mixed, kept.probabilities);
  });
}

void SelfAttention::keep(BranchCall call, const Tensor& x) {
  const Kept all = allocate(call.stream, call.memory);
  ComputeContext& compute = call.compute();
  qkv_.forward(compute, x, all.qkv);
  for_shards(call.shape(), all, [&](const AttentionShape& shape, const Kept& kept, std::size_t) {
    if (norm_) norm_->forward(compute, shape, kept.qkv, kept.raw, kept.stats);
    if (positions_) rotary(compute, shape, *positions_, kept.qkv, false);
  });
  attend(call, all);
}

void SelfAttention::result(BranchCall call, const Tensor& residual, const Tensor& y) {
  const Kept kept = allocate(call.stream, call.memory);
  output_.forward(call.layer.stage, call.stream, kept.mixed, y, residual, kept.sum);
}

void SelfAttention::backward_input(BranchCall call, const Tensor& dy, const Tensor& dx) {
  const Kept all = allocate(call.stream, call.memory);
  ComputeContext& compute = call.compute();
  if (recompute_) attend(call, all);
  output_.backward_input(compute, dy, all.dmixed);
  for_shards(call.shape(), all, [&](const AttentionShape& shape, const Kept& kept, std::size_t) {
    attention_backward(compute, shape, kept.qkv, kept.mixed, kept.dmixed, mask(call),
                       kept.probabilities, kept.dqkv);
    if (positions_) rotary(compute, shape, *positions_, kept.dqkv, true);
    if (norm_) norm_->backward_input(compute, shape, kept.raw, kept.stats, kept.dqkv, kept.dgains);
  });
  if (dx.data != nullptr) qkv_.backward_input(call.layer.stage, call.stream, all.dqkv, dx, all.sum);
}

void SelfAttention::backward_weight(BranchCall call, const Tensor& x, const Tensor& dy) {
  const Kept all = allocate(call.stream, call.memory);
  output_.backward_weight(call.compute(), call.shape(), all.mixed, dy);
  for_shards(call.shape(), all, [&](const AttentionShape&, const Kept& kept, std::size_t shard) {
    if (norm_) norm_->backward_weight(call.compute(), kept.dgains, shard);
  });
  qkv_.backward_weight(call.compute(), call.shape(), x, all.dqkv);
}

}  // namespace sluice::nn
