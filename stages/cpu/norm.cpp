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

// `terms`: 2 for LayerNorm, 1 for RMSNorm, of statistics and weights. `type`: of dy or y.
const NormKernels& norm_kernels_for(ComputeContext& ctx, int terms, const Tensor& x, DType type) {
  const TypedKernels& kernels = kernels_for(ctx, type);
  const bool typed = x.spec.dtype == DType::kBf16;
  if (terms == 2) return typed ? kernels.layer_norm_typed : kernels.layer_norm;
  return typed ? kernels.rms_norm_typed : kernels.rms_norm;
}

// From an element on; null stays null.
void* from(const Tensor& tensor, std::int64_t first) {
  return tensor.data == nullptr ? nullptr : element(tensor, first);
}

void norm_forward(ComputeContext& ctx, int terms, const Tensor& x, const Tensor& gamma,
                  const Tensor& beta, float epsilon, const Tensor& y, const Tensor& stats) {
  const NormShape shape = norm_shape_of(x, gamma);
  const NormKernels& kernels = norm_kernels_for(ctx, terms, x, y.spec.dtype);
  parallel_range(ctx, shape.rows, 1, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin * shape.width;
    kernels.forward(element(x, first), gamma.as<float>(), beta.as<float>(), epsilon,
                    element(y, first), stats.as<float>() + terms * begin, end - begin, shape.width);
  });
}

void norm_backward(ComputeContext& ctx, int terms, const Tensor& dy, const Tensor& x,
                   const Tensor& gamma, const Tensor& stats, const NormGradients& gradients) {
  const NormShape shape = norm_shape_of(x, gamma);
  const NormKernels& kernels = norm_kernels_for(ctx, terms, x, dy.spec.dtype);
  if (gradients.dx.data != nullptr) {
    parallel_range(ctx, shape.rows, 1, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t first = begin * shape.width;
      kernels.backward(element(dy, first), element(x, first), gamma.as<float>(),
                       stats.as<float>() + terms * begin, from(gradients.residual, first),
                       element(gradients.dx, first), from(gradients.rounded, first), end - begin,
                       shape.width);
    });
  }
  if (gradients.dgamma.data == nullptr) return;
  parallel_range(ctx, shape.width, kColumnGrain, [&](std::int64_t begin, std::int64_t end) {
    auto* const dgamma = static_cast<float*>(from(gradients.dgamma, begin));
    auto* const dbeta = static_cast<float*>(from(gradients.dbeta, begin));
    for (float* const each : {dgamma, dbeta}) {
      if (gradients.write == Write::kOverwrite && each != nullptr) {
        std::fill_n(each, end - begin, 0.0F);
      }
    }
    kernels.weights(element(dy, begin), element(x, begin), stats.as<float>(), shape.width,
                    shape.rows, end - begin, dgamma, dbeta);
  });
}

}  // namespace

std::size_t norm_backward_workspace(ComputeContext& /*ctx*/, std::int64_t /*rows*/,
                                    std::int64_t /*width*/, int /*terms*/) {
  return 0;
}

void layer_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& gamma,
                        const Tensor& beta, float epsilon, const Tensor& y, const Tensor& stats) {
  norm_forward(ctx, 2, x, gamma, beta, epsilon, y, stats);
}

void layer_norm_backward(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                         const Tensor& gamma, const Tensor& stats, const NormGradients& gradients) {
  norm_backward(ctx, 2, dy, x, gamma, stats, gradients);
}

void rms_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& gamma, float epsilon,
                      const Tensor& y, const Tensor& stats) {
  norm_forward(ctx, 1, x, gamma, {}, epsilon, y, stats);
}

void rms_norm_backward(ComputeContext& ctx, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                       const Tensor& stats, const NormGradients& gradients) {
  norm_backward(ctx, 1, dy, x, gamma, stats, gradients);
}

}  // namespace sluice::cpu
