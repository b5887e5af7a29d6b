// Optimizer updates, and the sums of squares of norms and losses.
#pragma once

#include "stages/cpu_kernels/vector.hpp"

namespace sluice::SLUICE_KERNEL_NAMESPACE {

typedef float HalfF __attribute__((vector_size(kLanes * 2)));
typedef double VecD __attribute__((vector_size(kLanes * 4)));

SLUICE_INLINE VecD load_double(const float* from) {
  HalfF value;
  __builtin_memcpy(&value, from, sizeof value);
  return __builtin_convertvector(value, VecD);
}

inline void adamw(const AdamWArguments* arguments, float* value, const float* grad, float* first,
                  float* second, int64_t n) {
  const AdamWArguments a = *arguments;
  for_vectors(n, [&](int64_t i, auto part) SLUICE_LAMBDA {
    fetch_ahead(grad + i);
    fetch_ahead(first + i);
    fetch_ahead(second + i);
    fetch_ahead(value + i);
    VecF w = load(value + i, part), m = load(first + i, part), v = load(second + i, part);
    adamw_update(a, load(grad + i, part), w, m, v);
    store(first + i, m, part);
    store(second + i, v, part);
    store(value + i, w, part);
  });
}

inline void sgd(const SgdArguments* arguments, float* value, const float* grad, float* velocity,
                int64_t n) {
  const SgdArguments a = *arguments;
  for_vectors(n, [&](int64_t i, auto part) SLUICE_LAMBDA {
    const VecF w = load(value + i, part);
    VecF direction = sgd_direction(a, load(grad + i, part), w);
    if (velocity != nullptr) {
      const VecF moved = sgd_momentum(a, direction, load(velocity + i, part));
      store(velocity + i, moved, part);
      direction = sgd_step(a, direction, moved);
    }
    store(value + i, sgd_value(a, w, direction), part);
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
