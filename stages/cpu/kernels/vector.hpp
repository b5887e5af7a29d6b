// Vectors of floats as wide as the kernel set's registers, in the set's own namespace. Compiled
// with contraction off: a product and a sum are one rounding only where fma() says so.
#pragma once

#include <stdint.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "stages/cpu/kernels/kernels.hpp"

#define SLUICE_INLINE inline __attribute__((always_inline))
#define SLUICE_LAMBDA __attribute__((always_inline))

namespace sluice::SLUICE_KERNEL_NAMESPACE {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
// For the zero-masking forms of intrinsics whose plain forms GCC warns of (their own undefined
// operand).
constexpr uint16_t kAllLanes = 0xFFFF;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float VecF __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecU __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecH __attribute__((vector_size(kLanes * 2)));

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

SLUICE_INLINE VecF splat(float value) { return value - VecF{}; }
SLUICE_INLINE VecI splat(int32_t value) { return value - VecI{}; }

SLUICE_INLINE VecF fma(VecF a, VecF b, VecF c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

SLUICE_INLINE VecF square_root(VecF a) {
#if defined(__AVX512F__)
  return _mm512_maskz_sqrt_ps(kAllLanes, a);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(a);
#elif defined(__SSE2__)
  return _mm_sqrt_ps(a);
#else
  for (int i = 0; i < kLanes; ++i) a[i] = __builtin_sqrtf(a[i]);
  return a;
#endif
}

// The second operand where either is NaN, as the instructions have it.
SLUICE_INLINE VecF maximum(VecF a, VecF b) {
#if defined(__AVX512F__)
  return _mm512_maskz_max_ps(kAllLanes, a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
SLUICE_INLINE VecF minimum(VecF a, VecF b) {
#if defined(__AVX512F__)
  return _mm512_maskz_min_ps(kAllLanes, a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// 1 / a to about 1 ulp, for a whose reciprocal is a normal number. With AVX-512 an estimate of 14
// bits and a Newton step: a division takes twice as long as all the rest of a sigmoid.
SLUICE_INLINE VecF reciprocal(VecF a) {
#if defined(__AVX512F__)
  const VecF estimate = _mm512_maskz_rcp14_ps(kAllLanes, a);
  return fma(fma(-a, estimate, splat(1.0F)), estimate, estimate);
#else
  return 1.0F / a;
#endif
}

// Square root to about 1 ulp, for a >= 0; below the smallest normal number about 1e-19.
SLUICE_INLINE VecF fast_square_root(VecF a) {
#if defined(__AVX512F__)
  const VecF normal = maximum(splat(1.2e-38F), a);
  const VecF estimate = _mm512_maskz_rsqrt14_ps(kAllLanes, normal);
  const VecF root = normal * estimate;
  return fma(fma(-root, root, normal), estimate * 0.5F, root);
#else
  return square_root(a);
#endif
}

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

SLUICE_INLINE VecF widen(VecH half) { return (VecF)(__builtin_convertvector(half, VecU) << 16); }
// To nearest even; NaN becomes the quiet NaN 0x7FC0.
SLUICE_INLINE VecH narrow(VecF value) {
  const VecU bits = (VecU)value;
  const VecU rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  return __builtin_convertvector(value == value ? rounded : VecU{} + 0x7FC0U, VecH);
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
  return __builtin_shuffle(value, (lane_index() + distance) & (kLanes - 1));
}
// Pairs far apart first: the order is fixed by the width of the vector.
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

// e^x to about 1 ulp for x in [-86.9, high], the nearest end's value outside, NaN for NaN; high is
// at most 88.3. Range
// reduction by a two-part ln 2 and Cephes' expf polynomial; 2^n by adding to the exponent.
SLUICE_INLINE VecF exponential(VecF x, float high = 88.3F) {
  const VecF magic = splat(12582912.0F);  // 1.5 * 2^23
  x = minimum(splat(high), maximum(splat(-86.9F), x));
  const VecF shifted = fma(x, splat(1.44269504088896341F), magic);
  const VecF n = shifted - magic;
  VecF r = fma(n, splat(-0.693359375F), x);
  r = fma(n, splat(2.12194440e-4F), r);
  VecF p = splat(1.9875691500e-4F);
  p = fma(p, r, splat(1.3981999507e-3F));
  p = fma(p, r, splat(8.3334519073e-3F));
  p = fma(p, r, splat(4.1665795894e-2F));
  p = fma(p, r, splat(1.6666665459e-1F));
  p = fma(p, r, splat(5.0000001201e-1F));
  p = fma(p, r * r, r) + 1.0F;
  return (VecF)((VecI)p + ((VecI)shifted << 23));
}

// At least e^-80, so that nothing here is ever denormal.
SLUICE_INLINE VecF sigmoid(VecF x) { return reciprocal(1.0F + exponential(-x, 80.0F)); }

}  // namespace sluice::SLUICE_KERNEL_NAMESPACE
