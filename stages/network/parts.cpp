#include "stages/network/parts.hpp"

#include <algorithm>
#include <numeric>

#include "stages/compute/internal_operators.hpp"

namespace sluice::nn {

BlockShape block_shape(const TensorSpec& input, DeviceKind device, std::int64_t by_sample_from) {
  const int rank = input.shape.rank(), end = is_float(input.dtype) ? rank - 1 : rank;
  BlockShape shape{.samples = input.shape[0], .sequence = 1, .device = device};
  for (int d = 1; d < end; ++d) shape.sequence *= input.shape[d];
  shape.by_sample = device == DeviceKind::kCpu && shape.sequence >= by_sample_from;
  return shape;
}

StreamShape stream_shape(const TensorSpec& stream, const Shards& shards, DeviceKind device,
                         std::int64_t by_sample_from) {
  StreamShape shape(block_shape(stream, device, by_sample_from), shards);
  shape.dealt = stream.shape.rank() == 4;
  if (!shape.dealt) return shape;
  shape.whole.sequence *= shape.ranks();
  shape.whole.by_sample = device == DeviceKind::kCpu && shape.whole.sequence >= by_sample_from;
  return shape;
}

TensorSpec dealt_stream(const TensorSpec& whole, const Shards& shards) {
  const Shape& shape = whole.shape;
  const bool deals =
      shards.deals_positions && shards.local < shards.count && shape[1] % shards.count == 0;
  if (!deals) return whole;
  return {whole.dtype, {shape[0], shards.local, shape[1] / shards.count, shape[2]}};
}

void gather_rows(const StageContext& stage, const StreamShape& shape, const Tensor& mine,
                 const Tensor& whole) {
  stage.tensor->all_gather(mine, whole, &stage.compute, shape.whole.samples);
}

void sum_rows(const StageContext& stage, const StreamShape& shape, const Tensor& all,
              const Tensor& mine) {
  if (shape.dealt) {
    return stage.tensor->reduce_scatter(all, mine, &stage.compute, shape.whole.samples);
  }
  stage.tensor->sum({all.as<float>(), static_cast<std::size_t>(all.elements())}, &stage.compute);
}

std::vector<PlannedCollective> gathers(const StreamShape& shape, DType type, std::int64_t width) {
  if (!shape.dealt) return {};
  return {{.axis = CollectiveAxis::kTensor,
           .kind = CollectiveKind::kAllGather,
           .bytes = TensorSpec{type, {shape.mine.rows(), width}}.bytes(),
           .type = type}};
}

namespace {

std::vector<SlicePart> parts_of(const Linear::Options& options) {
  const bool rows = options.split == Linear::Split::kRows;
  const std::int64_t whole = rows ? options.in : options.out;
  std::vector<SlicePart> parts;
  for (std::size_t i = 0; i < options.ranges.size(); ++i) {
    for (const RowRange& range : options.ranges[i]) {
      parts.push_back({{rows ? 1 : 0, range.begin, range.length, whole},
                       options.shards.first + static_cast<int>(i)});
    }
  }
  return parts;
}

Parameter& add_weight(const std::string& name, const Linear::Options& options,
                      ParameterSet& parameters) {
  const Shape shape{options.out, options.in};
  if (options.split == Linear::Split::kNone || options.shards.count == 1) {
    return parameters.add(name, shape, options.weight, true, options.tied);
  }
  return parameters.add_parts(name, shape, options.weight, true, options.tied, parts_of(options));
}

}  // namespace

ShardRanges unit_ranges(const Shards& shards, std::int64_t rows, std::int64_t unit) {
  const std::int64_t units = (rows + unit - 1) / unit;
  ShardRanges ranges;
  for (int shard = shards.first; shard < shards.first + shards.local; ++shard) {
    const std::int64_t begin = std::min(rows, shards.begin(shard, units) * unit);
    const std::int64_t end = std::min(rows, shards.begin(shard + 1, units) * unit);
    ranges.push_back({{begin, end - begin}});
  }
  return ranges;
}

Linear::Linear(const std::string& name, const Options& options, ParameterSet& parameters)
    : split_(options.shards.count == 1 ? Split::kNone : options.split),
      shards_(options.shards),
      weight_(&add_weight(name + "weight", options, parameters)),
      rounds_bias_(options.bias && options.rounds_bias),
      precision_(options.precision) {
  if (split_ != Split::kNone) {
    for (const std::vector<RowRange>& ranges : options.ranges) {
      std::int64_t& size = sizes_.emplace_back(0);
      for (const RowRange& range : ranges) size += range.length;
    }
  }
  if (precision_ != DType::kF32) weight_->keeps_bf16 = Bf16Copy::kEverywhere;
  if (!options.bias) return;
  const Shape shape{options.out};
  if (split_ == Split::kColumns) {
    bias_ = &parameters.add_parts(name + "bias", shape, options.bias_init, false, false,
                                  parts_of(options));
  } else {
    bias_ = &parameters.add(name + "bias", shape, options.bias_init, false);
    if (split_ == Split::kRows) bias_->shares = shards_.local;
  }
  if (rounds_bias_ && precision_ != DType::kF32) bias_->keeps_bf16 = Bf16Copy::kOnGpus;
}

Tensor Linear::bias_for(const Tensor& y) const {
  if (bias_ == nullptr) return {};
  const bool in_bf16 = y.spec.dtype != DType::kF32 && bias_->bf16_copy.data != nullptr;
  return in_bf16 ? bias_->bf16_copy : bias_->value;
}

template <typename Work>
void Linear::for_shards(const Work& work) const {
  if (split_ == Split::kNone) return work(std::size_t{0});
  for (std::size_t shard = 0; shard < sizes_.size(); ++shard) {
    if (sizes_[shard] > 0) work(shard);
  }
}

std::int64_t Linear::before(std::size_t shard) const {
  return std::accumulate(sizes_.begin(), sizes_.begin() + static_cast<std::ptrdiff_t>(shard),
                         std::int64_t{0});
}

Tensor Linear::weight_panel(const Tensor& all, std::size_t shard) const {
  if (split_ == Split::kNone) return all;
  const std::int64_t size = sizes_[shard];
  return split_ == Split::kRows ? tensor_at(all, before(shard) * out(), {out(), size})
                                : tensor_at(all, before(shard) * in(), {size, in()});
}

Tensor Linear::bias_panel(const Tensor& all, std::size_t shard) const {
  return split_ == Split::kColumns ? tensor_at(all, before(shard), {sizes_[shard]}) : all;
}

Tensor Linear::panel(const Tensor& all, std::size_t shard) const {
  if (split_ == Split::kNone) return all;
  const std::int64_t rows = leading_rows(all), columns = all.shape()[all.shape().rank() - 1];
  const auto part = [&](std::int64_t size) { return size * columns / divided(); };
  return tensor_at(all, rows * part(before(shard)), {rows, part(sizes_[shard])});
}

std::size_t Linear::workspace(ComputeContext& ctx, std::int64_t rows, DType result,
                              std::optional<Activation> before) const {
  std::size_t bytes = 0;
  for_shards([&](std::size_t shard) {
    const Shape weight = weight_panel(weight_->value, shard).shape();
    const LinearShape shape = {.rows = rows,
                               .in = split_ == Split::kNone ? in() : weight[1],
                               .out = split_ == Split::kNone ? out() : weight[0],
                               .operands = precision_,
                               .result = result,
                               .bias = bias_ != nullptr};
    LinearShape forward = shape;
    // A GPU's matmul rounds a bias itself where it has no copy.
    if (rounds_bias_ && ctx.device().kind != DeviceKind::kCpu) forward.bias = false;
    bytes = std::max({bytes, linear_forward_workspace(ctx, forward),
                      linear_backward_weight_workspace(ctx, shape)});
    if (!before) return;
    bytes = std::max(bytes, linear_activation_backward_input_workspace(ctx, *before, shape));
  });
  if (split_ == Split::kNone) return bytes;
  const bool by_rows = split_ == Split::kRows, over_ranks = shards_.local < shards_.count;
  return std::max(
      bytes, sum_of_shards_workspace(ctx, rows, by_rows ? out() : in(), sizes_.size(), precision_,
                                     over_ranks ? DType::kF32 : (by_rows ? result : precision_)));
}

Linear::ShardSum Linear::shard_sum(BumpAllocator& scratch, const StreamShape& shape,
                                   DType result) const {
  ShardSum sum;
  if (split_ == Split::kNone || shards_.local == shards_.count) return sum;
  const std::int64_t width = split_ == Split::kRows ? out() : in();
  const bool serves = result == DType::kF32;
  if (!serves || shape.dealt) sum.all = scratch.tensor(DType::kF32, shape.whole.rows(), width);
  if (!serves && shape.dealt) sum.mine = scratch.tensor(DType::kF32, shape.mine.rows(), width);
  return sum;
}

std::vector<PlannedCollective> Linear::sums_over_ranks(const StreamShape& shape) const {
  if (split_ == Split::kNone || shards_.local == shards_.count) return {};
  const TensorSpec sum{DType::kF32, {shape.whole.rows(), split_ == Split::kRows ? out() : in()}};
  return {{.axis = CollectiveAxis::kTensor,
           .kind = shape.dealt ? CollectiveKind::kReduceScatter : CollectiveKind::kSum,
           .bytes = sum.bytes(),
           .type = DType::kF32}};
}

void Linear::sum_shards(const StageContext& stage, const StreamShape& shape, bool backward,
                        const Tensor& operand, const Tensor& residual, const Tensor& result,
                        const ShardSum& sum) const {
  const Tensor bias = backward || bias_ == nullptr ? Tensor{} : bias_->value;
  if (shards_.local == shards_.count) {
    return sum_of_shards(stage.compute, operand, this->operand(), sizes_, backward, bias, residual,
                         result);
  }
  const bool serves = result.spec.dtype == DType::kF32;
  const Tensor& all = serves && !shape.dealt ? result : sum.all;
  const Tensor& mine = !shape.dealt ? all : serves ? result : sum.mine;
  sum_of_shards(stage.compute, operand, this->operand(), sizes_, backward, {}, {}, all);
  sum_rows(stage, shape, all, mine);
  finish_sum(stage.compute, mine, bias, residual, result);
}

void Linear::forward(ComputeContext& ctx, const Tensor& x, const Tensor& y,
                     const Tensor& residual) const {
  if (residual.data != nullptr) {
    return linear_residual_forward(ctx, x, operand(), bias_for(y), residual, y);
  }
  for_shards([&](std::size_t shard) {
    linear_forward(ctx, x, weight_panel(operand(), shard), bias_panel(bias_for(y), shard),
                   panel(y, shard));
  });
}

void Linear::forward(const StageContext& stage, const StreamShape& shape, const Tensor& x,
                     const Tensor& y, const Tensor& residual, const ShardSum& sum) const {
  if (split_ != Split::kRows) return forward(stage.compute, x, y, residual);
  sum_shards(stage, shape, false, x, residual, y, sum);
}

void Linear::forward(ComputeContext& ctx, Activation activation, const Tensor& x,
                     const Tensor& raised, const Tensor& y) const {
  for_shards([&](std::size_t shard) {
    linear_activation_forward(ctx, activation, x, weight_panel(operand(), shard),
                              bias_panel(bias_for(raised), shard), panel(raised, shard),
                              panel(y, shard));
  });
}

void Linear::backward_input(ComputeContext& ctx, Activation activation, const Tensor& dy,
                            const Tensor& raised, const Tensor& draised) const {
  for_shards([&](std::size_t shard) {
    linear_activation_backward_input(ctx, activation, dy, weight_panel(operand(), shard),
                                     panel(raised, shard), panel(draised, shard));
  });
}

void Linear::backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& dx) const {
  for_shards([&](std::size_t shard) {
    linear_backward_input(ctx, dy, weight_panel(operand(), shard), panel(dx, shard));
  });
}

void Linear::backward_input(const StageContext& stage, const StreamShape& shape, const Tensor& dy,
                            const Tensor& dx, const ShardSum& sum) const {
  if (split_ != Split::kColumns) return backward_input(stage.compute, dy, dx);
  sum_shards(stage, shape, true, dy, {}, dx, sum);
}

void Linear::backward_weight(ComputeContext& ctx, const BlockShape& shape, const Tensor& x,
                             const Tensor& dy) const {
  const bool by_rows = split_ == Split::kRows;  // then the bias's gradient is shares
  Parameter* const bias = by_rows ? nullptr : bias_;
  for_summed_rows(shape, [&](std::int64_t first, std::int64_t rows) {
    const Write write = next_write({weight_, bias}, ctx.stream());
    for_shards([&](std::size_t shard) {
      linear_backward_weight(ctx, rows_from(by_rows ? panel(x, shard) : x, first, rows),
                             rows_from(by_rows ? dy : panel(dy, shard), first, rows),
                             weight_panel(weight_->grad, shard),
                             bias != nullptr ? bias_panel(bias->grad, shard) : Tensor{}, write);
    });
  });
  if (!by_rows || bias_ == nullptr) return;
  for_shared_rows({shape, shards_}, [&](std::size_t share, std::int64_t first, std::int64_t rows) {
    // A matmul of no columns: the sums over rows alone.
    linear_backward_weight(ctx, {nullptr, {dy.spec.dtype, {rows, 0}}}, rows_from(dy, first, rows),
                           {nullptr, {DType::kF32, {out(), 0}}}, bias_->share_grads[share]);
  });
}

Norm::Norm(Kind kind, const std::string& name, std::int64_t width, float epsilon,
           ParameterSet& parameters, const Shards& shards)
    : kind_(kind),
      epsilon_(epsilon),
      shards_(shards),
      weight_(&parameters.add(name + "weight", Shape{width}, Init::constant(1), false)) {
  if (kind == Kind::kLayer) {
    bias_ = &parameters.add(name + "bias", Shape{width}, Init::constant(0), false);
  }
  if (shards.count == 1) return;
  weight_->shares = shards.local;
  if (bias_ != nullptr) bias_->shares = shards.local;
}

std::size_t Norm::workspace(ComputeContext& ctx, std::int64_t rows) const {
  return norm_backward_workspace(ctx, rows, weight_->shape[0], kind_ == Kind::kLayer ? 2 : 1);
}

void Norm::forward(ComputeContext& ctx, const Tensor& x, const Tensor& y,
                   const Tensor& stats) const {
  if (kind_ == Kind::kLayer) {
    layer_norm_forward(ctx, x, weight_->value, bias_->value, epsilon_, y, stats);
  } else {
    rms_norm_forward(ctx, x, weight_->value, epsilon_, y, stats);
  }
}

void Norm::backward(ComputeContext& ctx, const Tensor& dy, const Tensor& x, const Tensor& stats,
                    const NormGradients& gradients) const {
  if (kind_ == Kind::kLayer) {
    layer_norm_backward(ctx, dy, x, weight_->value, stats, gradients);
  } else {
    rms_norm_backward(ctx, dy, x, weight_->value, stats, gradients);
  }
}

void Norm::backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                          const Tensor& stats, const Tensor& residual,
                          const StreamGradient& dx) const {
  if (dx.value.data == nullptr) return;
  backward(ctx, dy, x, stats, {.dx = dx.value, .residual = residual, .rounded = dx.rounded});
}

void Norm::backward_weight(ComputeContext& ctx, const StreamShape& shape, const Tensor& dy,
                           const Tensor& x, const Tensor& stats) const {
  if (shards_.count > 1) {
    return for_shared_rows(shape, [&](std::size_t share, std::int64_t first, std::int64_t rows) {
      backward(ctx, rows_from(dy, first, rows), rows_from(x, first, rows),
               rows_from(stats, first, rows),
               {.dgamma = weight_->share_grads[share],
                .dbeta = bias_ != nullptr ? bias_->share_grads[share] : Tensor{}});
    });
  }
  for_summed_rows(shape.whole, [&](std::int64_t first, std::int64_t rows) {
    backward(ctx, rows_from(dy, first, rows), rows_from(x, first, rows),
             rows_from(stats, first, rows),
             {.dgamma = weight_->grad,
              .dbeta = bias_ != nullptr ? bias_->grad : Tensor{},
              .write = next_write({weight_, bias_}, ctx.stream())});
  });
}

void Norm::backward(ComputeContext& ctx, const StreamShape& shape, const Tensor& dy,
                    const Tensor& x, const Tensor& stats, const Tensor& residual,
                    const StreamGradient& dx) const {
  if (shape.whole.by_sample || shards_.count > 1) {
    backward_weight(ctx, shape, dy, x, stats);  // dx may be dy's memory
    return backward_input(ctx, dy, x, stats, residual, dx);
  }
  if (dx.value.data == nullptr) return backward_weight(ctx, shape, dy, x, stats);
  backward(ctx, dy, x, stats,
           {.dx = dx.value,
            .residual = residual,
            .rounded = dx.rounded,
            .dgamma = weight_->grad,
            .dbeta = bias_ != nullptr ? bias_->grad : Tensor{},
            .write = next_write({weight_, bias_}, ctx.stream())});
}

QueryKeyNorm::QueryKeyNorm(const std::string& name, std::int64_t head_dim, float epsilon,
                           ParameterSet& parameters, const Shards& shards)
    : epsilon_(epsilon),
      query_(
          &parameters.add(name + "query_norm.weight", Shape{head_dim}, Init::constant(1), false)),
      key_(&parameters.add(name + "key_norm.weight", Shape{head_dim}, Init::constant(1), false)) {
  if (shards.count > 1) query_->shares = key_->shares = shards.local;
}

void QueryKeyNorm::forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                           const Tensor& raw, const Tensor& stats) const {
  query_key_norm_forward(ctx, shape, qkv, query_->value, key_->value, epsilon_, raw, stats);
}

void QueryKeyNorm::backward_input(ComputeContext& ctx, const AttentionShape& shape,
                                  const Tensor& raw, const Tensor& stats, const Tensor& dqkv,
                                  const Tensor& gains) const {
  const std::int64_t parts = gains.shape()[0] / 2;
  AttentionShape part = shape;
  part.samples = shape.samples / parts;
  for (std::int64_t i = 0; i < parts; ++i) {
    const std::int64_t first = i * part.rows();
    query_key_norm_backward(ctx, part, rows_from(raw, first, part.rows()), query_->value,
                            key_->value, rows_from(stats, first, part.rows()),
                            rows_from(dqkv, first, part.rows()), rows_from(gains, 2 * i, 2));
  }
}

void QueryKeyNorm::backward_weight(ComputeContext& ctx, const Tensor& gains,
                                   std::size_t shard) const {
  const std::int64_t head_dim = gains.shape()[1];
  const TensorSpec gain{DType::kF32, Shape{head_dim}};
  for (std::int64_t part = 0; part < gains.shape()[0]; part += 2) {
    float* const place = gains.as<float>() + part * head_dim;
    const Tensor query{place, gain}, key{place + head_dim, gain};
    if (query_->shares > 0) {
      add(ctx, query, query_->share_grads[shard]);
      add(ctx, key, key_->share_grads[shard]);
    } else if (next_write({query_, key_}, ctx.stream()) == Write::kOverwrite) {
      copy_async(query_->grad.data, query.data, query.spec.bytes(), ctx.stream());
      copy_async(key_->grad.data, key.data, key.spec.bytes(), ctx.stream());
    } else {
      add(ctx, query, query_->grad);
      add(ctx, key, key_->grad);
    }
  }
}

Dropout DropoutSite::at(const LayerCall& call, std::int64_t elements_per_sample) const {
  if (!active(call)) {
    return {};
  }
  return {probability,
          {call.stage.seed, site, call.stage.step},
          static_cast<std::uint64_t>(call.stage.first_sample) *
              static_cast<std::uint64_t>(elements_per_sample),
          call.stage.step.on_device};
}

Tensor tensor_at(const Tensor& all, std::int64_t first, const Shape& shape) {
  if (all.data == nullptr) return {nullptr, {all.spec.dtype, shape}};
  return {all.as<std::byte>() + first * static_cast<std::int64_t>(size_of(all.spec.dtype)),
          {all.spec.dtype, shape}};
}

Tensor as_rows(const Tensor& tensor) {
  const Shape& shape = tensor.shape();
  const std::int64_t columns = shape.rank() == 0 ? 1 : shape[shape.rank() - 1];
  return {tensor.data, {tensor.spec.dtype, Shape{leading_rows(tensor), columns}}};
}

}  // namespace sluice::nn
