// Optimizer updates and the sums of squares behind norms and losses.
#pragma once

#include "stages/cpu/kernels/vector.hpp"

namespace sluice::SLUICE_KERNEL_NAMESPACE {

typedef float HalfF __attribute__((vector_size(kLanes * 2)));
typedef double VecD __attribute__((vector_size(kLanes * 4)));

SLUICE_INLINE VecD load_double(const float* from) {
  HalfF value;
  __builtin_memcpy(&value, from, sizeof value);
  return __builtin_convertvector(value, VecD);
}

// Decoupled weight decay first, then the step, as in PyTorch.
inline void adamw(const AdamWArguments* arguments, float* value, const float* grad, float* first,
                  float* second, int64_t n) {
  const AdamWArguments a = *arguments;
  const float keep = 1.0F - a.learning_rate * a.decay;
  const float rate = a.learning_rate * a.inverse1;
  for_vectors(n, [&](int64_t i, auto part) SLUICE_LAMBDA {
    fetch_ahead(grad + i);
    fetch_ahead(first + i);
    fetch_ahead(second + i);
    fetch_ahead(value + i);
    const VecF g = load(grad + i, part) * a.grad_scale;
    const VecF m = load(first + i, part) * a.beta1 + g * (1.0F - a.beta1);
    const VecF v = load(second + i, part) * a.beta2 + g * g * (1.0F - a.beta2);
    const VecF step = m * rate * reciprocal(fast_square_root(v * a.inverse2) + a.epsilon);
    store(first + i, m, part);
    store(second + i, v, part);
    store(value + i, load(value + i, part) * keep - step, part);
  });
}

inline void sgd(const SgdArguments* arguments, float* value, const float* grad, float* velocity,
                int64_t n) {
  const SgdArguments a = *arguments;
  for_vectors(n, [&](int64_t i, auto part) SLUICE_LAMBDA {
    VecF g = load(grad + i, part) * a.grad_scale + load(value + i, part) * a.decay;
    if (velocity != nullptr) {
      g = load(velocity + i, part) * a.momentum + g;
      store(velocity + i, g, part);
    }
    store(value + i, load(value + i, part) - g * a.learning_rate, part);
  });
}

inline double sum_of_squares(const float* values, int64_t n) {
  constexpr int kStep = kLanes / 2;
  VecD low{}, high{};
  int64_t i = 0;
  for (; i + 2 * kStep <= n; i += 2 * kStep) {
    fetch_ahead(values + i);
    const VecD a = load_double(values + i), b = load_double(values + i + kStep);
    low += a * a;
    high += b * b;
  }
  double sum = 0;
  for (int lane = 0; lane < kStep; ++lane) sum += low[lane] + high[lane];
  for (; i < n; ++i) sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  return sum;
}

inline double squared_error(float* outputs, const float* targets, float factor, bool gradient,
                            int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float difference = outputs[i] - targets[i];
    sum += static_cast<double>(difference) * static_cast<double>(difference);
    if (gradient) outputs[i] = factor * difference;
  }
  return sum;
}

}  // namespace sluice::SLUICE_KERNEL_NAMESPACE
