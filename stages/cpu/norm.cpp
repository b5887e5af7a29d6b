// LayerNorm and RMSNorm: rows go to threads; weight gradients: columns do.
#include <algorithm>

#include "stages/cpu/cpu_backend.hpp"
#include "stages/cpu/cpu_operators.hpp"
#include "stages/cpu/parallel.hpp"

namespace sluice::cpu {

namespace {

struct NormShape {
  std::int64_t rows, width;
};

NormShape shape_of(const Tensor& x, const Tensor& gamma) {
  const std::int64_t width = gamma.elements();
  return {width == 0 ? 0 : x.elements() / width, width};
}

const void* delta_row(const Tensor& delta, std::int64_t row, std::int64_t width) {
  return delta.data == nullptr ? nullptr : element(delta, row * width);
}

bool typed_delta(const Tensor& delta) {
  return delta.data != nullptr && delta.spec.dtype == DType::kBf16;
}

std::size_t norm_backward_weight_workspace(ComputeContext& /*ctx*/, std::int64_t /*rows*/,
                                           std::int64_t /*width*/, int /*terms*/) {
  return 0;
}

void layer_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& delta,
                        const Tensor& gamma, const Tensor& beta, float epsilon, const Tensor& y,
                        const Tensor& stats) {
  const NormShape shape = shape_of(x, gamma);
  const TypedKernels& kernels = kernels_for(ctx, y.spec.dtype);
  const auto kernel =
      typed_delta(delta) ? kernels.layer_norm_forward_typed : kernels.layer_norm_forward;
  parallel_range(ctx, shape.rows, 1, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin * shape.width;
    kernel(x.as<float>() + first, delta_row(delta, begin, shape.width), gamma.as<float>(),
           beta.as<float>(), epsilon, element(y, first), stats.as<float>() + 2 * begin, end - begin,
           shape.width);
  });
}

void layer_norm_backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                               const Tensor& gamma, const Tensor& stats, const Tensor& dx) {
  const NormShape shape = shape_of(x, gamma);
  const TypedKernels& kernels = kernels_for(ctx, dy.spec.dtype);
  parallel_range(ctx, shape.rows, 1, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin * shape.width;
    kernels.layer_norm_backward(element(dy, first), x.as<float>() + first, gamma.as<float>(),
                                stats.as<float>() + 2 * begin, dx.as<float>() + first, end - begin,
                                shape.width);
  });
}

void layer_norm_backward_weight(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                                const Tensor& stats, const Tensor& dgamma, const Tensor& dbeta,
                                Write write) {
  const NormShape shape = shape_of(x, dgamma);
  const TypedKernels& kernels = kernels_for(ctx, dy.spec.dtype);
  parallel_range(ctx, shape.width, kColumnGrain, [&](std::int64_t begin, std::int64_t end) {
    if (write == Write::kOverwrite) {
      std::fill_n(dgamma.as<float>() + begin, end - begin, 0.0F);
      std::fill_n(dbeta.as<float>() + begin, end - begin, 0.0F);
    }
    kernels.layer_norm_weights(element(dy, begin), x.as<float>() + begin, stats.as<float>(),
                               shape.width, shape.rows, end - begin, dgamma.as<float>() + begin,
                               dbeta.as<float>() + begin);
  });
}

void rms_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& delta,
                      const Tensor& gamma, float epsilon, const Tensor& y, const Tensor& stats) {
  const NormShape shape = shape_of(x, gamma);
  const TypedKernels& kernels = kernels_for(ctx, y.spec.dtype);
  const auto kernel =
      typed_delta(delta) ? kernels.rms_norm_forward_typed : kernels.rms_norm_forward;
  parallel_range(ctx, shape.rows, 1, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin * shape.width;
    kernel(x.as<float>() + first, delta_row(delta, begin, shape.width), gamma.as<float>(), epsilon,
           element(y, first), stats.as<float>() + begin, end - begin, shape.width);
  });
}

void rms_norm_backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                             const Tensor& gamma, const Tensor& stats, const Tensor& dx) {
  const NormShape shape = shape_of(x, gamma);
  const TypedKernels& kernels = kernels_for(ctx, dy.spec.dtype);
  parallel_range(ctx, shape.rows, 1, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin * shape.width;
    kernels.rms_norm_backward(element(dy, first), x.as<float>() + first, gamma.as<float>(),
                              stats.as<float>() + begin, dx.as<float>() + first, end - begin,
                              shape.width);
  });
}

void rms_norm_backward_weight(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                              const Tensor& stats, const Tensor& dgamma, Write write) {
  const NormShape shape = shape_of(x, dgamma);
  const TypedKernels& kernels = kernels_for(ctx, dy.spec.dtype);
  parallel_range(ctx, shape.width, kColumnGrain, [&](std::int64_t begin, std::int64_t end) {
    if (write == Write::kOverwrite) {
      std::fill_n(dgamma.as<float>() + begin, end - begin, 0.0F);
    }
    kernels.rms_norm_weights(element(dy, begin), x.as<float>() + begin, stats.as<float>(),
                             shape.width, shape.rows, end - begin, dgamma.as<float>() + begin);
  });
}

}  // namespace

NormOperators norm_operators() {
  return {
      .layer_norm_forward = layer_norm_forward,
      .layer_norm_backward_input = layer_norm_backward_input,
      .layer_norm_backward_weight = layer_norm_backward_weight,
      .rms_norm_forward = rms_norm_forward,
      .rms_norm_backward_input = rms_norm_backward_input,
      .rms_norm_backward_weight = rms_norm_backward_weight,
      .norm_backward_weight_workspace = norm_backward_weight_workspace,
  };
}

}  // namespace sluice::cpu
