#include "stages/network/parts.hpp"

#include <algorithm>

namespace sluice::nn {

BlockShape block_shape(const TensorSpec& input, DeviceKind device, std::int64_t by_sample_from) {
  const int rank = input.shape.rank(), end = is_float(input.dtype) ? rank - 1 : rank;
  BlockShape shape{.samples = input.shape[0], .sequence = 1, .device = device};
  for (int d = 1; d < end; ++d) shape.sequence *= input.shape[d];
  shape.by_sample = device == DeviceKind::kCpu && shape.sequence >= by_sample_from;
  return shape;
}

Linear::Linear(const std::string& name, const Options& options, ParameterSet& parameters)
    : weight_(&parameters.add(name + "weight", Shape{options.out, options.in}, options.weight, true,
                              options.tied)),
      rounds_bias_(options.bias && options.rounds_bias),
      precision_(options.precision) {
  if (precision_ != DType::kF32) weight_->keeps_bf16 = Bf16Copy::kEverywhere;
  if (!options.bias) return;
  bias_ = &parameters.add(name + "bias", Shape{options.out}, options.bias_init, false);
  if (rounds_bias_ && precision_ != DType::kF32) bias_->keeps_bf16 = Bf16Copy::kOnGpus;
}

Tensor Linear::bias_for(const Tensor& y) const {
  if (bias_ == nullptr) return {};
  const bool in_bf16 = y.spec.dtype != DType::kF32 && bias_->bf16_copy.data != nullptr;
  return in_bf16 ? bias_->bf16_copy : bias_->value;
}

std::size_t Linear::workspace(ComputeContext& ctx, std::int64_t rows, DType result,
                              std::optional<Activation> before) const {
  const LinearShape shape = {.rows = rows,
                             .in = in(),
                             .out = out(),
                             .operands = precision_,
                             .result = result,
                             .bias = bias_ != nullptr};
  LinearShape forward = shape;
  // A GPU's matmul rounds a bias itself where it has no copy.
  if (rounds_bias_ && ctx.device().kind != DeviceKind::kCpu) forward.bias = false;
  const std::size_t bytes = std::max(linear_forward_workspace(ctx, forward),
                                     linear_backward_weight_workspace(ctx, shape));
  return before ? std::max(bytes, linear_activation_backward_input_workspace(ctx, *before, shape))
                : bytes;
}

void Linear::forward(ComputeContext& ctx, const Tensor& x, const Tensor& y,
                     const Tensor& residual) const {
  if (residual.data == nullptr) return linear_forward(ctx, x, operand(), bias_for(y), y);
  linear_residual_forward(ctx, x, operand(), bias_for(y), residual, y);
}

void Linear::forward(ComputeContext& ctx, Activation activation, const Tensor& x,
                     const Tensor& raised, const Tensor& y) const {
  linear_activation_forward(ctx, activation, x, operand(), bias_for(raised), raised, y);
}

void Linear::backward_input(ComputeContext& ctx, Activation activation, const Tensor& dy,
                            const Tensor& raised, const Tensor& draised) const {
  linear_activation_backward_input(ctx, activation, dy, operand(), raised, draised);
}

void Linear::backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& dx) const {
  linear_backward_input(ctx, dy, operand(), dx);
}

void Linear::backward_weight(ComputeContext& ctx, const BlockShape& shape, const Tensor& x,
                             const Tensor& dy) const {
  for_summed_rows(shape, [&](std::int64_t first, std::int64_t rows) {
    linear_backward_weight(ctx, rows_from(x, first, rows), rows_from(dy, first, rows),
                           weight_->grad, bias_ != nullptr ? bias_->grad : Tensor{},
                           next_write({weight_, bias_}, ctx.stream()));
  });
}

Norm::Norm(Kind kind, const std::string& name, std::int64_t width, float epsilon,
           ParameterSet& parameters)
    : kind_(kind),
      epsilon_(epsilon),
      weight_(&parameters.add(name + "weight", Shape{width}, Init::constant(1), false)) {
  if (kind == Kind::kLayer) {
    bias_ = &parameters.add(name + "bias", Shape{width}, Init::constant(0), false);
  }
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

void Norm::backward_weight(ComputeContext& ctx, const BlockShape& shape, const Tensor& dy,
                           const Tensor& x, const Tensor& stats) const {
  for_summed_rows(shape, [&](std::int64_t first, std::int64_t rows) {
    backward(ctx, rows_from(dy, first, rows), rows_from(x, first, rows),
             rows_from(stats, first, rows),
             {.dgamma = weight_->grad,
              .dbeta = bias_ != nullptr ? bias_->grad : Tensor{},
              .write = next_write({weight_, bias_}, ctx.stream())});
  });
}

void Norm::backward(ComputeContext& ctx, const BlockShape& shape, const Tensor& dy, const Tensor& x,
                    const Tensor& stats, const Tensor& residual, const StreamGradient& dx) const {
  if (shape.by_sample) {
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
                           ParameterSet& parameters)
    : epsilon_(epsilon),
      query_(
          &parameters.add(name + "query_norm.weight", Shape{head_dim}, Init::constant(1), false)),
      key_(&parameters.add(name + "key_norm.weight", Shape{head_dim}, Init::constant(1), false)) {}

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

void QueryKeyNorm::backward_weight(ComputeContext& ctx, const Tensor& gains) const {
  const std::int64_t head_dim = gains.shape()[1];
  const TensorSpec gain{DType::kF32, Shape{head_dim}};
  for (std::int64_t part = 0; part < gains.shape()[0]; part += 2) {
    float* const place = gains.as<float>() + part * head_dim;
    const Tensor query{place, gain}, key{place + head_dim, gain};
    if (next_write({query_, key_}, ctx.stream()) == Write::kOverwrite) {
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

Tensor as_rows(const Tensor& tensor) {
  const Shape& shape = tensor.shape();
  const std::int64_t columns = shape.rank() == 0 ? 1 : shape[shape.rank() - 1];
  return {tensor.data, {tensor.spec.dtype, Shape{leading_rows(tensor), columns}}};
}

}  // namespace sluice::nn
