// Softmax of causal scores, its gradient, and cross-entropy.
#pragma once

#include "stages/cpu_kernels/vector.hpp"

namespace sluice::SLUICE_KERNEL_NAMESPACE {

constexpr float kLowest = -3.4e38F;

constexpr int64_t round_to_lanes(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

template <typename T>
void zero_columns(T* row, int64_t from, int64_t to) {
  for (int64_t i = from; i < to; i += kLanes) store(row + i, VecF{}, Whole{});
}

template <typename T>
void causal_softmax(float* scores, int64_t ld, int64_t first, int64_t rows, int64_t columns,
                    float scale, void* probabilities) {
  T* out = static_cast<T*>(probabilities);
  for (int64_t row = first; row < first + rows; ++row, scores += ld, out += ld) {
    const int64_t whole = (row + 1) / kLanes * kLanes;
    const int tail = static_cast<int>(row + 1 - whole);
    VecF top = splat(kLowest);
    for (int64_t i = 0; i < whole; i += kLanes) top = maximum(load(scores + i, Whole{}), top);
    if (tail > 0) {
      top = maximum(first_lanes(load(scores + whole, Whole{}), tail, splat(kLowest)), top);
    }
    const float shift = -scale * lane_max(top);
    VecF sum{};
    for (int64_t i = 0; i < whole; i += kLanes) {
      const VecF v = exponential(fma(load(scores + i, Whole{}), splat(scale), splat(shift)));
      store(scores + i, v, Whole{});
      sum += v;
    }
    if (tail > 0) {
      const VecF s = first_lanes(load(scores + whole, Whole{}), tail);
      const VecF v = first_lanes(exponential(fma(s, splat(scale), splat(shift))), tail);
      store(scores + whole, v, Whole{});
      sum += v;
    }
    const float inverse = 1.0F / lane_sum(sum);
    const int64_t used = round_to_lanes(row + 1);
    for (int64_t i = 0; i < used; i += kLanes) {
      store(out + i, load(scores + i, Whole{}) * inverse, Whole{});
    }
    zero_columns(out, used, round_to_lanes(columns));
  }
}

template <typename T>
void causal_softmax_backward(const void* probabilities, const float* dp, const float* delta,
                             int64_t ld, int64_t first, int64_t rows, int64_t columns, float scale,
                             void* dscores) {
  const T* p = static_cast<const T*>(probabilities);
  T* out = static_cast<T*>(dscores);
  for (int64_t row = first; row < first + rows; ++row, p += ld, dp += ld, out += ld, ++delta) {
    const int64_t whole = (row + 1) / kLanes * kLanes;
    const VecF shift = splat(*delta), factor = splat(scale);
    for (int64_t i = 0; i < whole; i += kLanes) {
      fetch_ahead(p + i);
      const VecF change =
          softmax_gradient(load(p + i, Whole{}), load(dp + i, Whole{}), shift, factor);
      store(out + i, change, Whole{});
    }
    if (whole <= row) {
      const VecF change =
          softmax_gradient(load(p + whole, Whole{}), load(dp + whole, Whole{}), shift, factor);
      store(out + whole, first_lanes(change, static_cast<int>(row + 1 - whole)), Whole{});
    }
    zero_columns(out, round_to_lanes(row + 1), round_to_lanes(columns));
  }
}

template <typename T>
void row_dots(const void* a_data, const void* b_data, int64_t ld, int64_t rows, int64_t width,
              float* delta) {
  const T* a = static_cast<const T*>(a_data);
  const T* b = static_cast<const T*>(b_data);
  for (int64_t row = 0; row < rows; ++row, a += ld, b += ld) {
    delta[row] = sum_vectors(width, [&](int64_t i, auto part) SLUICE_LAMBDA {
      return load(a + i, part) * load(b + i, part);
    });
  }
}

// Exponentials in float, their sum per vector lane in float, the logarithm in double. Where T holds
// an exponential exactly it is kept in the logit's place for the gradient, else computed again.
template <typename T>
void cross_entropy(void* data, const int32_t* targets, float scale, bool gradient, double* losses,
                   int64_t rows, int64_t width) {
  constexpr bool kKeeps = sizeof(T) == sizeof(float);
  constexpr Part kOne = {1};
  T* logits = static_cast<T*>(data);
  for (int64_t row = 0; row < rows; ++row, logits += width) {
    const int32_t target = targets[row];
    losses[row] = 0;
    if (target < 0) {
      if (gradient) {
        for_vectors(width,
                    [&](int64_t i, auto part) SLUICE_LAMBDA { store(logits + i, VecF{}, part); });
      }
      continue;
    }
    VecF top = splat(kLowest);
    for_vectors(width, [&](int64_t i, auto part) SLUICE_LAMBDA {
      const VecF v = load(logits + i, part);
      top = maximum(part.count == kLanes ? v : first_lanes(v, part.count, splat(kLowest)), top);
    });
    const float shift = lane_max(top);
    const VecF wanted = load(logits + target, kOne);
    const float sum = sum_vectors(width, [&](int64_t i, auto part) SLUICE_LAMBDA {
      const VecF e = exponential(load(logits + i, part) - shift);
      if (gradient && kKeeps) store(logits + i, e, part);
      return e;
    });
    losses[row] = __builtin_log(static_cast<double>(sum)) -
                  (static_cast<double>(wanted[0]) - static_cast<double>(shift));
    if (!gradient) continue;
    const float factor = scale / sum;
    for_vectors(width, [&](int64_t i, auto part) SLUICE_LAMBDA {
      const VecF v = load(logits + i, part);
      store(logits + i, (kKeeps ? v : exponential(v - shift)) * factor, part);
    });
    store(logits + target, exponential(wanted - shift) * factor - scale, kOne);
  }
}

}  // namespace sluice::SLUICE_KERNEL_NAMESPACE
