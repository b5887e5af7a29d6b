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

// At least `top`; a NaN does not count.
template <typename T>
SLUICE_INLINE float largest(const T* logits, int64_t width, float top) {
  VecF most = splat(top);
  for_vectors(width, [&](int64_t i, auto part) SLUICE_LAMBDA {
    const VecF v = load(logits + i, part);
    most = maximum(part.count == kLanes ? v : first_lanes(v, part.count, splat(kLowest)), most);
  });
  return lane_max(most);
}

// The sum of a row's exponentials. Where T holds one exactly it is kept in the logit's place for
// the gradient, if `keeps`, else computed again there.
template <typename T>
constexpr bool kHolds = sizeof(T) == sizeof(float);
template <typename T>
SLUICE_INLINE float sum_of_exponentials(T* logits, int64_t width, float shift, bool keeps) {
  return sum_vectors(width, [&](int64_t i, auto part) SLUICE_LAMBDA {
    const VecF e = exponential(load(logits + i, part) - shift);
    if (keeps && kHolds<T>) store(logits + i, e, part);
    return e;
  });
}

// The gradient of a row that has the target, or not (a negative one).
template <typename T>
SLUICE_INLINE void exponentials_to_gradient(T* logits, int64_t width, int64_t target, float shift,
                                            float scale, float sum) {
  constexpr Part kOne = {1};
  const float factor = scale / sum;
  const auto exponentials = [&](int64_t i, auto part) SLUICE_LAMBDA {
    const VecF v = load(logits + i, part);
    return kHolds<T> ? v : exponential(v - shift);
  };
  VecF wanted{};
  if (target >= 0) wanted = exponentials(target, kOne);
  for_vectors(width, [&](int64_t i, auto part) SLUICE_LAMBDA {
    store(logits + i, exponentials(i, part) * factor, part);
  });
  if (target >= 0) store(logits + target, wanted * factor - scale, kOne);
}

SLUICE_INLINE double loss_of(float sum, float wanted, float shift) {
  return rounded_loss(__builtin_log(static_cast<double>(sum)) -
                      (static_cast<double>(wanted) - static_cast<double>(shift)));
}

template <typename T>
SLUICE_INLINE void zero_row(T* row, int64_t width) {
  for_vectors(width, [&](int64_t i, auto part) SLUICE_LAMBDA { store(row + i, VecF{}, part); });
}

// Exponentials in float, their sum per vector lane in float, the logarithm in double.
template <typename T>
void cross_entropy(void* data, const int32_t* targets, float scale, bool gradient, double* losses,
                   int64_t rows, int64_t width) {
  T* logits = static_cast<T*>(data);
  for (int64_t row = 0; row < rows; ++row, logits += width) {
    const int32_t target = targets[row];
    losses[row] = 0;
    if (target < 0) {
      if (gradient) zero_row(logits, width);
      continue;
    }
    const float shift = largest(logits, width, kLowest);
    const float wanted = load(logits + target, Part{1})[0];
    const float sum = sum_of_exponentials(logits, width, shift, gradient);
    losses[row] = loss_of(sum, wanted, shift);
    if (gradient) exponentials_to_gradient(logits, width, target, shift, scale, sum);
  }
}

// The same of rows whose classes shards divide, in steps. A panel has classes [first, first +
// width) of its rows.
template <typename T>
void panel_maxima(const void* data, const int32_t* targets, float* maxima, int64_t rows,
                  int64_t width) {
  const T* logits = static_cast<const T*>(data);
  for (int64_t row = 0; row < rows; ++row, logits += width) {
    if (targets[row] >= 0) maxima[row] = largest(logits, width, maxima[row]);
  }
}

template <typename T>
void panel_sums(void* data, const int32_t* targets, int64_t first, const float* shifts,
                bool gradient, float* sums, float* wanted, int64_t rows, int64_t width) {
  T* logits = static_cast<T*>(data);
  for (int64_t row = 0; row < rows; ++row, logits += width) {
    const int64_t target = targets[row] - first;
    sums[row] = 0;
    if (targets[row] < 0) continue;
    if (target >= 0 && target < width) wanted[row] = load(logits + target, Part{1})[0];
    sums[row] = sum_of_exponentials(logits, width, shifts[row], gradient);
  }
}

template <typename T>
void panel_gradient(void* data, const int32_t* targets, int64_t first, const float* shifts,
                    float scale, const float* sums, int64_t rows, int64_t width) {
  T* logits = static_cast<T*>(data);
  for (int64_t row = 0; row < rows; ++row, logits += width) {
    if (targets[row] < 0) {
      zero_row(logits, width);
      continue;
    }
    const int64_t target = targets[row] - first;
    exponentials_to_gradient(logits, width, target < width ? target : -1, shifts[row], scale,
                             sums[row]);
  }
}

inline void row_losses(const int32_t* targets, const float* shifts, const float* sums,
                       const float* wanted, double* losses, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    losses[row] = targets[row] < 0 ? 0 : loss_of(sums[row], wanted[row], shifts[row]);
  }
}

}  // namespace sluice::SLUICE_KERNEL_NAMESPACE
