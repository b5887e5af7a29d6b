// Element-wise kernels; T is float or Half. Arithmetic is in float.
#pragma once

#include "stages/cpu_kernels/philox.hpp"
#include "stages/cpu_kernels/vector.hpp"

namespace sluice::SLUICE_KERNEL_NAMESPACE {

template <typename T, typename Function>
void pointwise_forward(const void* x_data, void* y_data, int64_t n) {
  const T* x = static_cast<const T*>(x_data);
  T* y = static_cast<T*>(y_data);
  for_vectors(n, [&](int64_t i, auto part) SLUICE_LAMBDA {
    fetch_ahead(y + i);
    store(y + i, Function{}.value(load(x + i, part)), part);
  });
}

template <typename T, typename Function>
void pointwise_backward(const void* x_data, const void* dy_data, void* dx_data, int64_t n) {
  const T* x = static_cast<const T*>(x_data);
  const T* dy = static_cast<const T*>(dy_data);
  T* dx = static_cast<T*>(dx_data);
  for_vectors(n, [&](int64_t i, auto part) SLUICE_LAMBDA {
    fetch_ahead(x + i);
    store(dx + i, Function{}.gradient(load(x + i, part), load(dy + i, part)), part);
  });
}

template <typename T>
void swiglu_forward(const void* gate_up_data, void* y_data, int64_t rows, int64_t hidden) {
  for (int64_t row = 0; row < rows; ++row) {
    const T* gate = static_cast<const T*>(gate_up_data) + row * 2 * hidden;
    const T* up = gate + hidden;
    T* y = static_cast<T*>(y_data) + row * hidden;
    for_vectors(hidden, [&](int64_t i, auto part) SLUICE_LAMBDA {
      fetch_ahead(y + i);
      store(y + i, swiglu(load(gate + i, part), load(up + i, part)), part);
    });
  }
}

template <typename T>
void swiglu_backward(const void* gate_up_data, const void* dy_data, void* dgate_up_data,
                     int64_t rows, int64_t hidden) {
  for (int64_t row = 0; row < rows; ++row) {
    const T* gate = static_cast<const T*>(gate_up_data) + row * 2 * hidden;
    const T* up = gate + hidden;
    const T* dy = static_cast<const T*>(dy_data) + row * hidden;
    T* dgate = static_cast<T*>(dgate_up_data) + row * 2 * hidden;
    T* dup = dgate + hidden;
    for_vectors(hidden, [&](int64_t i, auto part) SLUICE_LAMBDA {
      fetch_ahead(gate + i);
      fetch_ahead(up + i);
      VecF gate_gradient, up_gradient;
      swiglu_gradient(load(gate + i, part), load(up + i, part), load(dy + i, part), gate_gradient,
                      up_gradient);
      store(dgate + i, gate_gradient, part);
      store(dup + i, up_gradient, part);
    });
  }
}

// put(i, dropped, part) gets what stays of from[i], and zeros. It may overwrite from[i].
template <typename From, typename Put>
SLUICE_INLINE void for_dropped(const DropoutArguments& dropout, const From* from, int64_t n,
                               const Put& put) {
  RandomWords random;
  for (int64_t start = 0; start < n; start += RandomWords::kWords) {
    const uint32_t* words = random.fill(dropout.key, dropout.first + static_cast<uint64_t>(start));
    const int64_t count = n - start < RandomWords::kWords ? n - start : RandomWords::kWords;
    for_vectors(count, [&](int64_t i, auto part) SLUICE_LAMBDA {
      VecU word;
      __builtin_memcpy(&word, words + i, sizeof word);  // words_ has a vector to spare
      put(start + i, drop(load(from + start + i, part), word, dropout), part);
    });
  }
}

template <typename From, typename To>
void dropout(const DropoutArguments* arguments, const void* x, void* y, int64_t n) {
  To* to = static_cast<To*>(y);
  for_dropped(*arguments, static_cast<const From*>(x), n,
              [&](int64_t i, VecF dropped, auto part)
                  SLUICE_LAMBDA { store(to + i, dropped, part); });
}

template <typename From, typename To>
void dropout_residual(const DropoutArguments* arguments, const void* x, const void* before, void* y,
                      int64_t n) {
  const To* residual = static_cast<const To*>(before);
  To* to = static_cast<To*>(y);
  for_dropped(*arguments, static_cast<const From*>(x), n,
              [&](int64_t i, VecF dropped, auto part)
                  SLUICE_LAMBDA { store(to + i, load(residual + i, part) + dropped, part); });
}

template <typename From, typename To>
void add(const void* x, void* y, int64_t n) {
  const From* from = static_cast<const From*>(x);
  To* to = static_cast<To*>(y);
  for_vectors(n, [&](int64_t i, auto part) SLUICE_LAMBDA {
    store(to + i, load(to + i, part) + load(from + i, part), part);
  });
}

template <typename From, typename To>
void convert(const void* x, void* y, int64_t n) {
  const From* from = static_cast<const From*>(x);
  To* to = static_cast<To*>(y);
  for_vectors(
      n, [&](int64_t i, auto part) SLUICE_LAMBDA { store(to + i, load(from + i, part), part); });
}

// Four rows at a time; the order of the sum depends only on the number of rows.
template <typename T>
void column_sums(const void* x_data, int64_t ld, int64_t rows, int64_t width, float* sums) {
  const T* x = static_cast<const T*>(x_data);
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4, x += 4 * ld) {
    for_vectors(width, [&](int64_t i, auto part) SLUICE_LAMBDA {
      for (int next = 4; next < 8; ++next) __builtin_prefetch(x + next * ld + i);
      const VecF low = load(x + i, part) + load(x + ld + i, part);
      const VecF high = load(x + 2 * ld + i, part) + load(x + 3 * ld + i, part);
      store(sums + i, load(sums + i, part) + (low + high), part);
    });
  }
  for (; row < rows; ++row, x += ld) add<T, float>(x, sums, width);
}

template <typename T>
void rotate(void* x_data, int64_t heads, int64_t head_dim, const float* cosine, const float* sine) {
  const int64_t half = head_dim / 2;
  for (int64_t head = 0; head < heads; ++head) {
    T* low = static_cast<T*>(x_data) + head * head_dim;
    T* high = low + half;
    for_vectors(half, [&](int64_t i, auto part) SLUICE_LAMBDA {
      VecF a = load(low + i, part), b = load(high + i, part);
      turn(a, b, load(cosine + i, part), load(sine + i, part));
      store(low + i, a, part);
      store(high + i, b, part);
    });
  }
}

}  // namespace sluice::SLUICE_KERNEL_NAMESPACE
