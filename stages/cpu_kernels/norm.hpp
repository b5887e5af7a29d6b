// Normalisation over rows of the residual stream of type X, float or Half; y and dy of type T.
// Mean, then variance about the mean, each in one pass over a row that is in the first-level cache
// by then.
#pragma once

#include "stages/cpu_kernels/activation.hpp"
#include "stages/cpu_kernels/vector.hpp"

namespace sluice::SLUICE_KERNEL_NAMESPACE {

// Rows of a norm's input gradient: what to add to, and where the sums go.
template <typename X>
struct StreamGradient {
  const X* residual;  // null: zeros
  X* dx;
  Half* rounded;  // may be null

  static SLUICE_INLINE StreamGradient of(const void* residual, void* dx, void* rounded) {
    return {static_cast<const X*>(residual), static_cast<X*>(dx), static_cast<Half*>(rounded)};
  }
  template <typename Count>
  SLUICE_INLINE void put(int64_t i, VecF change, Count part) const {
    const VecF sum = (residual == nullptr ? VecF{} : load(residual + i, part)) + change;
    store(dx + i, sum, part);
    if (rounded != nullptr) store(rounded + i, sum, part);
  }
};

// LayerNorm, or RMSNorm, which has no mean and no beta.
enum class NormOf { kLayer, kRms };

template <NormOf kNorm, typename T, typename X>
void norm_forward(const void* x_data, const float* gamma, const float* beta, float epsilon,
                  void* y_data, float* stats, int64_t rows, int64_t width) {
  constexpr bool kLayer = kNorm == NormOf::kLayer;
  const float inverse = 1.0F / static_cast<float>(width);
  const X* x = static_cast<const X*>(x_data);
  for (int64_t row = 0; row < rows; ++row, x += width) {
    float mean = 0;
    if constexpr (kLayer) {
      mean = inverse * sum_vectors(width, [&](int64_t i, auto part)
                                              SLUICE_LAMBDA { return load(x + i, part); });
    }
    const float variance = inverse * sum_vectors(width, [&](int64_t i, auto part) SLUICE_LAMBDA {
                             VecF d = load(x + i, part);
                             if constexpr (kLayer) d = d - mean;
                             return d * d;
                           });
    const float rstd = 1.0F / __builtin_sqrtf(variance + epsilon);
    T* y = static_cast<T*>(y_data) + row * width;
    for_vectors(width, [&](int64_t i, auto part) SLUICE_LAMBDA {
      const VecF v = load(x + i, part), scale = load(gamma + i, part);
      if constexpr (kLayer) {
        store(y + i, layer_norm_value(v, mean, rstd, scale, load(beta + i, part)), part);
      } else {
        store(y + i, rms_norm_value(v, rstd, scale), part);
      }
    });
    if constexpr (kLayer) *stats++ = mean;
    *stats++ = rstd;
  }
}

template <NormOf kNorm, typename T, typename X>
void norm_backward(const void* dy_data, const void* x_data, const float* gamma, const float* stats,
                   const void* residual, void* dx, void* rounded, int64_t rows, int64_t width) {
  constexpr bool kLayer = kNorm == NormOf::kLayer;
  const float inverse = 1.0F / static_cast<float>(width);
  const auto to = StreamGradient<X>::of(residual, dx, rounded);
  const X* x = static_cast<const X*>(x_data);
  for (int64_t row = 0; row < rows; ++row, x += width) {
    const T* dy = static_cast<const T*>(dy_data) + row * width;
    NormGradient gradient{};
    if constexpr (kLayer) {
      const float mean = stats[2 * row], rstd = stats[2 * row + 1];
      VecF sums{}, dots{};
      for_vectors(width, [&](int64_t i, auto part) SLUICE_LAMBDA {
        fetch_ahead(x + i);
        const VecF g = load(dy + i, part) * load(gamma + i, part);
        sums += g;
        dots = fma(g, load(x + i, part) - mean, dots);
      });
      gradient = layer_norm_gradient(mean, rstd, lane_sum(sums), lane_sum(dots), inverse);
    } else {
      const float dot = sum_vectors(width, [&](int64_t i, auto part) SLUICE_LAMBDA {
        return load(dy + i, part) * load(gamma + i, part) * load(x + i, part);
      });
      gradient = rms_norm_gradient(stats[row], dot, inverse);
    }
    for_vectors(width, [&](int64_t i, auto part) SLUICE_LAMBDA {
      const VecF g = load(dy + i, part) * load(gamma + i, part), v = load(x + i, part);
      to.put(row * width + i,
             kLayer ? layer_norm_change(gradient, g, v) : rms_norm_change(gradient, g, v), part);
    });
  }
}

template <typename T, typename X>
void layer_norm_weights(const void* dy_data, const void* x_data, const float* stats, int64_t ld,
                        int64_t rows, int64_t width, float* dgamma, float* dbeta) {
  const T* dy = static_cast<const T*>(dy_data);
  const X* x = static_cast<const X*>(x_data);
  int64_t row = 0;
  for (; row + 2 <= rows; row += 2, dy += 2 * ld, x += 2 * ld, stats += 4) {
    for_vectors(width, [&](int64_t i, auto part) SLUICE_LAMBDA {
      fetch_ahead(x + i);
      fetch_ahead(x + ld + i);
      const VecF d0 = load(dy + i, part), d1 = load(dy + ld + i, part);
      const VecF n0 = (load(x + i, part) - stats[0]) * stats[1];
      const VecF n1 = (load(x + ld + i, part) - stats[2]) * stats[3];
      store(dgamma + i, load(dgamma + i, part) + fma(d0, n0, d1 * n1), part);
      store(dbeta + i, load(dbeta + i, part) + (d0 + d1), part);
    });
  }
  if (row == rows) return;
  for_vectors(width, [&](int64_t i, auto part) SLUICE_LAMBDA {
    const VecF d = load(dy + i, part);
    const VecF normal = (load(x + i, part) - stats[0]) * stats[1];
    store(dgamma + i, fma(d, normal, load(dgamma + i, part)), part);
    store(dbeta + i, load(dbeta + i, part) + d, part);
  });
}

template <typename T, typename X>
void rms_norm_weights(const void* dy_data, const void* x_data, const float* stats, int64_t ld,
                      int64_t rows, int64_t width, float* dgamma, float* /*dbeta*/) {
  const T* dy = static_cast<const T*>(dy_data);
  const X* x = static_cast<const X*>(x_data);
  for (int64_t row = 0; row < rows; ++row, dy += ld, x += ld) {
    for_vectors(width, [&](int64_t i, auto part) SLUICE_LAMBDA {
      const VecF normal = load(x + i, part) * stats[row];
      store(dgamma + i, fma(load(dy + i, part), normal, load(dgamma + i, part)), part);
    });
  }
}

template <typename T>
void head_norm_forward(void* x_data, int64_t heads, int64_t head_dim, const float* gain,
                       float epsilon, void* raw_data, float* stats) {
  const float inverse = 1.0F / static_cast<float>(head_dim);
  T* x = static_cast<T*>(x_data);
  T* raw = static_cast<T*>(raw_data);
  for (int64_t head = 0; head < heads; ++head, x += head_dim, raw += head_dim) {
    const float square = inverse * sum_vectors(head_dim, [&](int64_t i, auto part) SLUICE_LAMBDA {
                           const VecF v = load(x + i, part);
                           store(raw + i, v, part);
                           return v * v;
                         });
    const float rstd = 1.0F / __builtin_sqrtf(square + epsilon);
    for_vectors(head_dim, [&](int64_t i, auto part) SLUICE_LAMBDA {
      store(x + i, rms_norm_value(load(x + i, part), rstd, load(gain + i, part)), part);
    });
    stats[head] = rstd;
  }
}

template <typename T>
void head_norm_backward(void* dx_data, const void* raw_data, int64_t heads, int64_t head_dim,
                        const float* gain, const float* stats, float* dgain) {
  const float inverse = 1.0F / static_cast<float>(head_dim);
  T* dx = static_cast<T*>(dx_data);
  const T* raw = static_cast<const T*>(raw_data);
  for (int64_t head = 0; head < heads; ++head, dx += head_dim, raw += head_dim) {
    const float rstd = stats[head];
    const float dot = sum_vectors(head_dim, [&](int64_t i, auto part) SLUICE_LAMBDA {
      return load(dx + i, part) * load(gain + i, part) * load(raw + i, part);
    });
    const NormGradient gradient = rms_norm_gradient(rstd, dot, inverse);
    for_vectors(head_dim, [&](int64_t i, auto part) SLUICE_LAMBDA {
      const VecF dy = load(dx + i, part), x = load(raw + i, part);
      store(dgain + i, fma(dy, x * rstd, load(dgain + i, part)), part);
      store(dx + i, rms_norm_change(gradient, dy * load(gain + i, part), x), part);
    });
  }
}

}  // namespace sluice::SLUICE_KERNEL_NAMESPACE
