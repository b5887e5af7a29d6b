// Loads, stores, loops and sums over vectors, whole and in part.
#pragma once

#include "stages/cpu_kernels/lanes.hpp"
#include "stages/tensor/kernel_math.hpp"

namespace sluice::SLUICE_KERNEL_NAMESPACE {

struct Half {
  uint16_t bits;
};

// How much of a vector counts: all lanes, or the first `count`.
struct Whole {
  static constexpr int count = kLanes;
};
struct Part {
  int count;
};

SLUICE_INLINE VecI lane_index() {
  VecI lanes{};
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

// Lanes from `count` on become `otherwise`.
SLUICE_INLINE VecF first_lanes(VecF value, int count, VecF otherwise = VecF{}) {
  return lane_index() < splat(count) ? value : otherwise;
}
SLUICE_INLINE VecF only(VecF value, Whole) { return value; }
SLUICE_INLINE VecF only(VecF value, Part part) { return first_lanes(value, part.count); }

// GCC 12 makes five instructions of a conversion for AVX2's two or one.
SLUICE_INLINE VecF widen(VecH half) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (VecF)((VecU)_mm256_cvtepu16_epi32((__m128i)half) << 16);
#else
  return (VecF)(__builtin_convertvector(half, VecU) << 16);
#endif
}
SLUICE_INLINE VecH narrow(VecF value) {
  const VecU bits = round_to_bf16(value);
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (VecH)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)bits),
                                _mm256_extracti128_si256((__m256i)bits, 1));
#else
  return __builtin_convertvector(bits, VecH);
#endif
}

SLUICE_INLINE VecF load(const float* from, Whole) {
  VecF value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}
SLUICE_INLINE VecF load(const float* from, Part part) {
  VecF value{};
  __builtin_memcpy(&value, from, static_cast<unsigned>(part.count) * sizeof(float));
  return value;
}
SLUICE_INLINE VecF load(const Half* from, Whole) {
  VecH value;
  __builtin_memcpy(&value, from, sizeof value);
  return widen(value);
}
SLUICE_INLINE VecF load(const Half* from, Part part) {
  VecH value{};
  __builtin_memcpy(&value, from, static_cast<unsigned>(part.count) * sizeof(Half));
  return widen(value);
}
SLUICE_INLINE void store(float* to, VecF value, Whole) {
  __builtin_memcpy(to, &value, sizeof value);
}
SLUICE_INLINE void store(float* to, VecF value, Part part) {
  __builtin_memcpy(to, &value, static_cast<unsigned>(part.count) * sizeof(float));
}
SLUICE_INLINE void store(Half* to, VecF value, Whole) {
  const VecH half = narrow(value);
  __builtin_memcpy(to, &half, sizeof half);
}
SLUICE_INLINE void store(Half* to, VecF value, Part part) {
  const VecH half = narrow(value);
  __builtin_memcpy(to, &half, static_cast<unsigned>(part.count) * sizeof(Half));
}

// For streams that were last used long before: asks for what is used 4 KiB later, in another page,
// which the hardware does not. Harmless past the end.
template <typename T>
SLUICE_INLINE void fetch_ahead(const T* from) {
  __builtin_prefetch(reinterpret_cast<const char*>(from) + 4096);
}

// body(i, part) for every vector of [0, n).
template <typename Body>
SLUICE_INLINE void for_vectors(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, Whole{});
  if (i < n) body(i, Part{static_cast<int>(n - i)});
}

// Lanes moved down by `distance`, around the end.
SLUICE_INLINE VecF turned(VecF value, int distance) {
#if defined(__clang__)
  VecF moved{};
  for (int i = 0; i < kLanes; ++i) moved[i] = value[(i + distance) & (kLanes - 1)];
  return moved;
#else
  return __builtin_shuffle(value, (lane_index() + distance) & (kLanes - 1));
#endif
}
// Adds distant pairs first; the vector's width fixes the order.
SLUICE_INLINE float lane_sum(VecF value) {
  for (int half = kLanes / 2; half > 0; half /= 2) value += turned(value, half);
  return value[0];
}
SLUICE_INLINE float lane_max(VecF value) {
  for (int half = kLanes / 2; half > 0; half /= 2) value = maximum(value, turned(value, half));
  return value[0];
}

// Sum over [0, n) of what body(i, part) gives, in four interleaved partial sums.
template <typename Body>
SLUICE_INLINE float sum_vectors(int64_t n, Body body) {
  VecF a{}, b{}, c{}, d{};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    a += body(i, Whole{});
    b += body(i + kLanes, Whole{});
    c += body(i + 2 * kLanes, Whole{});
    d += body(i + 3 * kLanes, Whole{});
  }
  for (; i + kLanes <= n; i += kLanes) a += body(i, Whole{});
  if (i < n) {
    const Part part{static_cast<int>(n - i)};
    b += only(body(i, part), part);
  }
  return lane_sum((a + b) + (c + d));
}

}  // namespace sluice::SLUICE_KERNEL_NAMESPACE
