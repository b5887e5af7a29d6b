// LayerNorm and RMSNorm: rows go to threads; weight gradients: columns do.
#include <algorithm>

#include "stages/cpu/cpu_backend.hpp"
#include "stages/cpu/parallel.hpp"

namespace sluice::cpu {

namespace {

struct NormShape {
  std::int64_t rows, width;
};

NormShape norm_shape_of(const Tensor& x, const Tensor& gamma) {
  const std::int64_t width = gamma.elements();
  return {width == 0 ? 0 : x.elements() / width, width};
}

// `type`: of dy or y.
const NormKernels& norm_kernels_for(ComputeContext& ctx, const Tensor& x, DType type) {
  const TypedKernels& kernels = kernels_for(ctx, type);
  return x.spec.dtype == DType::kBf16 ? kernels.norm_typed : kernels.norm;
}

// From an element on; null stays null.
void* from(const Tensor& tensor, std::int64_t first) {
  return tensor.data == nullptr ? nullptr : element(tensor, first);
}

}  // namespace

std::size_t norm_backward_workspace(ComputeContext& /*ctx*/, std::int64_t /*rows*/,
                                    std::int64_t /*width*/, int /*terms*/) {
  return 0;
}

void layer_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& gamma,
                        const Tensor& beta, float epsilon, const Tensor& y, const Tensor& stats) {
  const NormShape shape = norm_shape_of(x, gamma);
  const NormKernels& kernels = norm_kernels_for(ctx, x, y.spec.dtype);
  parallel_range(ctx, shape.rows, 1, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin * shape.width;
    kernels.layer_forward(element(x, first), gamma.as<float>(), beta.as<float>(), epsilon,
                          element(y, first), stats.as<float>() + 2 * begin, end - begin,
                          shape.width);
  });
}

void layer_norm_backward(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                         const Tensor& gamma, const Tensor& stats, const NormGradients& gradients) {
  const NormShape shape = norm_shape_of(x, gamma);
  const NormKernels& kernels = norm_kernels_for(ctx, x, dy.spec.dtype);
  if (gradients.dx.data != nullptr) {
    parallel_range(ctx, shape.rows, 1, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t first = begin * shape.width;
      kernels.layer_backward(element(dy, first), element(x, first), gamma.as<float>(),
                             stats.as<float>() + 2 * begin, from(gradients.residual, first),
                             element(gradients.dx, first), from(gradients.rounded, first),
                             end - begin, shape.width);
    });
  }
  if (gradients.dgamma.data == nullptr) return;
  parallel_range(ctx, shape.width, kColumnGrain, [&](std::int64_t begin, std::int64_t end) {
    if (gradients.write == Write::kOverwrite) {
      std::fill_n(gradients.dgamma.as<float>() + begin, end - begin, 0.0F);
      std::fill_n(gradients.dbeta.as<float>() + begin, end - begin, 0.0F);
    }
    kernels.layer_weights(element(dy, begin), element(x, begin), stats.as<float>(), shape.width,
                          shape.rows, end - begin, gradients.dgamma.as<float>() + begin,
                          gradients.dbeta.as<float>() + begin);
  });
}

void rms_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& gamma, float epsilon,
                      const Tensor& y, const Tensor& stats) {
  const NormShape shape = norm_shape_of(x, gamma);
  const NormKernels& kernels = norm_kernels_for(ctx, x, y.spec.dtype);
  parallel_range(ctx, shape.rows, 1, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin * shape.width;
    kernels.rms_forward(element(x, first), gamma.as<float>(), epsilon, element(y, first),
                        stats.as<float>() + begin, end - begin, shape.width);
  });
}

void rms_norm_backward(ComputeContext& ctx, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                       const Tensor& stats, const NormGradients& gradients) {
  const NormShape shape = norm_shape_of(x, gamma);
  const NormKernels& kernels = norm_kernels_for(ctx, x, dy.spec.dtype);
  if (gradients.dx.data != nullptr) {
    parallel_range(ctx, shape.rows, 1, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t first = begin * shape.width;
      kernels.rms_backward(element(dy, first), element(x, first), gamma.as<float>(),
                           stats.as<float>() + begin, from(gradients.residual, first),
                           element(gradients.dx, first), from(gradients.rounded, first),
                           end - begin, shape.width);
    });
  }
  if (gradients.dgamma.data == nullptr) return;
  parallel_range(ctx, shape.width, kColumnGrain, [&](std::int64_t begin, std::int64_t end) {
    if (gradients.write == Write::kOverwrite) {
      std::fill_n(gradients.dgamma.as<float>() + begin, end - begin, 0.0F);
    }
    kernels.rms_weights(element(dy, begin), element(x, begin), stats.as<float>(), shape.width,
                        shape.rows, end - begin, gradients.dgamma.as<float>() + begin);
  });
}

}  // namespace sluice::cpu
