// Softmax of causal scores, of all or in a window, its gradient, and cross-entropy.
#pragma once

#include "stages/cpu_kernels/vector.hpp"

namespace sluice::SLUICE_KERNEL_NAMESPACE {

constexpr float kLowest = -3.4e38F;

constexpr int64_t round_to_lanes(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

template <typename T>
void zero_columns(T* row, int64_t from, int64_t to) {
  for (int64_t i = from; i < to; i += kLanes) store(row + i, VecF{}, Whole{});
}

// Lanes [from, to) of a vector count.
struct Between {
  int from, to;
};
SLUICE_INLINE VecF pick(VecF value, Whole, VecF /*otherwise*/ = VecF{}) { return value; }
SLUICE_INLINE VecF pick(VecF value, Between lanes, VecF otherwise = VecF{}) {
  const VecF below = first_lanes(value, lanes.to, otherwise);
  return lane_index() < splat(lanes.from) ? otherwise : below;
}

// body(i, lanes) for every whole vector that has columns of [from, to); i ascends.
template <typename Body>
SLUICE_INLINE void for_seen(int64_t from, int64_t to, Body body) {
  int64_t i = from / kLanes * kLanes;
  if (i < from) {
    const int64_t left = to - i;
    body(i, Between{static_cast<int>(from - i), static_cast<int>(left < kLanes ? left : kLanes)});
    i += kLanes;
  }
  for (; i + kLanes <= to; i += kLanes) body(i, Whole{});
  if (i < to) body(i, Between{0, static_cast<int>(to - i)});
}

template <typename T>
void causal_softmax(float* scores, int64_t ld, int64_t first, int64_t rows, int64_t seen,
                    int64_t begin, int64_t end, float scale, void* probabilities) {
  T* out = static_cast<T*>(probabilities);
  for (int64_t row = first; row < first + rows; ++row, scores += ld, out += ld) {
    const int64_t from = row < seen ? 0 : row + 1 - seen, to = row + 1;
    VecF top = splat(kLowest);
    for_seen(from, to, [&](int64_t i, auto lanes) SLUICE_LAMBDA {
      top = maximum(pick(load(scores + i, Whole{}), lanes, splat(kLowest)), top);
    });
    const float shift = -scale * lane_max(top);
    VecF sum{};
    for_seen(from, to, [&](int64_t i, auto lanes) SLUICE_LAMBDA {
      const VecF s = pick(load(scores + i, Whole{}), lanes);
      const VecF v = pick(exponential(fma(s, splat(scale), splat(shift))), lanes);
      store(scores + i, v, Whole{});
      sum += v;
    });
    const float inverse = 1.0F / lane_sum(sum);
    const int64_t start = from / kLanes * kLanes, used = round_to_lanes(to);
    for (int64_t i = start; i < used; i += kLanes) {
      store(out + i, load(scores + i, Whole{}) * inverse, Whole{});
    }
    zero_columns(out, begin, start);
    zero_columns(out, used, round_to_lanes(end));
  }
}

template <typename T>
void causal_softmax_backward(const void* probabilities, const float* dp, const float* delta,
                             int64_t ld, int64_t first, int64_t rows, int64_t seen, int64_t begin,
                             int64_t end, float scale, void* dscores) {
  const T* p = static_cast<const T*>(probabilities);
  T* out = static_cast<T*>(dscores);
  for (int64_t row = first; row < first + rows; ++row, p += ld, dp += ld, out += ld, ++delta) {
    const int64_t from = row < seen ? 0 : row + 1 - seen, to = row + 1;
    const VecF shift = splat(*delta), factor = splat(scale);
    for_seen(from, to, [&](int64_t i, auto lanes) SLUICE_LAMBDA {
      fetch_ahead(p + i);
      const VecF change =
          softmax_gradient(load(p + i, Whole{}), load(dp + i, Whole{}), shift, factor);
      store(out + i, pick(change, lanes), Whole{});
    });
    zero_columns(out, begin, from / kLanes * kLanes);
    zero_columns(out, round_to_lanes(to), round_to_lanes(end));
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
    losses[row] = rounded_loss(__builtin_log(static_cast<double>(sum)) -
                               (static_cast<double>(wanted[0]) - static_cast<double>(shift)));
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
