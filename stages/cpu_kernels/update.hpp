// Optimizer updates, and the sums of squares of norms and losses.
#pragma once

#include "stages/cpu_kernels/philox.hpp"
#include "stages/cpu_kernels/vector.hpp"

namespace sluice::SLUICE_KERNEL_NAMESPACE {

typedef float HalfF __attribute__((vector_size(kLanes * 2)));
typedef double VecD __attribute__((vector_size(kLanes * 4)));

SLUICE_INLINE VecD load_double(const float* from) {
  HalfF value;
  __builtin_memcpy(&value, from, sizeof value);
  return __builtin_convertvector(value, VecD);
}

// Moments [0, n) of type T; `random` has a word per element where T is bf16.
SLUICE_INLINE void store_moment(float* to, VecF moment, VecU /*random*/, Whole part) {
  store(to, moment, part);
}
SLUICE_INLINE void store_moment(float* to, VecF moment, VecU /*random*/, Part part) {
  store(to, moment, part);
}
template <typename Count>
SLUICE_INLINE void store_moment(Half* to, VecF moment, VecU random, Count part) {
  const VecH half = __builtin_convertvector(round_at_random(moment, random), VecH);
  __builtin_memcpy(to, &half, static_cast<unsigned>(part.count) * sizeof(Half));
}

template <typename T>
SLUICE_INLINE void adamw_part(const AdamWArguments& a, float* value, const float* grad, T* first,
                              T* second, Half* bf16_copy, const uint32_t* words, int64_t n) {
  for_vectors(n, [&](int64_t i, auto part) SLUICE_LAMBDA {
    fetch_ahead(grad + i);
    fetch_ahead(first + i);
    fetch_ahead(second + i);
    fetch_ahead(value + i);
    VecU random{};
    if (words != nullptr) __builtin_memcpy(&random, words + i, sizeof random);
    VecF w = load(value + i, part), m = load(first + i, part), v = load(second + i, part);
    adamw_update(a, load(grad + i, part), w, m, v);
    store_moment(first + i, m, random, part);
    store_moment(second + i, v, random >> 16, part);
    store(value + i, w, part);
    if (bf16_copy != nullptr) store(bf16_copy + i, w, part);
  });
}

template <typename T>
void adamw(const AdamWArguments* arguments, const AdamWRange* range, int64_t n) {
  const AdamWArguments a = *arguments;
  const AdamWRange r = *range;
  T* const first = static_cast<T*>(r.first);
  T* const second = static_cast<T*>(r.second);
  Half* const bf16_copy = static_cast<Half*>(r.bf16_copy);
  if constexpr (sizeof(T) == sizeof(float)) {
    adamw_part(a, r.value, r.grad, first, second, bf16_copy, nullptr, n);
  } else {
    RandomWords random;
    for (int64_t start = 0; start < n; start += RandomWords::kWords) {
      const uint32_t* words = random.fill(r.key, r.element + static_cast<uint64_t>(start));
      const int64_t count = n - start < RandomWords::kWords ? n - start : RandomWords::kWords;
      adamw_part(a, r.value + start, r.grad + start, first + start, second + start,
                 bf16_copy == nullptr ? nullptr : bf16_copy + start, words, count);
    }
  }
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
