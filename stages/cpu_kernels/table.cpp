#include "stages/cpu_kernels/activation.hpp"
#include "stages/cpu_kernels/kernels.hpp"
#include "stages/cpu_kernels/norm.hpp"
#include "stages/cpu_kernels/softmax.hpp"
#include "stages/cpu_kernels/update.hpp"

namespace sluice::SLUICE_KERNEL_NAMESPACE {

namespace {

template <NormOf kNorm, typename T, typename X>
constexpr NormKernels norm_kernels() {
  return {
      .forward = norm_forward<kNorm, T, X>,
      .backward = norm_backward<kNorm, T, X>,
      .weights = kNorm == NormOf::kLayer ? layer_norm_weights<T, X> : rms_norm_weights<T, X>,
  };
}

#define SLUICE_KERNELS(name) {pointwise_forward<T, name>, pointwise_backward<T, name>},
template <typename T>
constexpr PointwiseKernels kPointwise[] = {SLUICE_POINTWISE(SLUICE_KERNELS)};

template <typename T>
constexpr TypedKernels typed_kernels() {
  return {
      .pointwise = kPointwise<T>,
      .swiglu_forward = swiglu_forward<T>,
      .swiglu_backward = swiglu_backward<T>,
      .dropout = dropout<T, T>,
      .dropout_from_float = dropout<float, T>,
      .dropout_residual = dropout_residual<T, float>,
      .dropout_residual_typed = dropout_residual<T, T>,
      .add = add<T, float>,
      .add_typed = add<T, T>,
      .to_float = convert<T, float>,
      .from_float = convert<float, T>,
      .column_sums = column_sums<T>,
      .head_norm_forward = head_norm_forward<T>,
      .head_norm_backward = head_norm_backward<T>,
      .rotate = rotate<T>,
      .layer_norm = norm_kernels<NormOf::kLayer, T, float>(),
      .rms_norm = norm_kernels<NormOf::kRms, T, float>(),
      .layer_norm_typed = norm_kernels<NormOf::kLayer, T, T>(),
      .rms_norm_typed = norm_kernels<NormOf::kRms, T, T>(),
      .causal_softmax = causal_softmax<T>,
      .causal_softmax_backward = causal_softmax_backward<T>,
      .row_dots = row_dots<T>,
      .cross_entropy = cross_entropy<T>,
      .panel_maxima = panel_maxima<T>,
      .panel_sums = panel_sums<T>,
      .panel_gradient = panel_gradient<T>,
      .adamw = adamw<T>,
  };
}

#define SLUICE_TEXT(name) #name
#define SLUICE_NAME(name) SLUICE_TEXT(name)

}  // namespace

constinit const Kernels kKernels = {
    .name = SLUICE_NAME(SLUICE_KERNEL_NAMESPACE),
    .f32 = typed_kernels<float>(),
    .bf16 = typed_kernels<Half>(),
    .squared_error = squared_error,
    .sgd = sgd,
    .sum_of_squares = sum_of_squares,
    .row_losses = row_losses,
};

}  // namespace sluice::SLUICE_KERNEL_NAMESPACE
