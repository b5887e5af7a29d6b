// Vectors of floats as wide as the kernel set's registers, in the set's own namespace, and the
// operations on them that stages/tensor/kernel_math.hpp is written in. Compiled with contraction
// off: a product and a sum are one rounding only where fma() says so.
#pragma once

#include <stdint.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "stages/cpu_kernels/kernels.hpp"

#define SLUICE_INLINE inline __attribute__((always_inline))
#define SLUICE_MATH SLUICE_INLINE  // the functions of stages/tensor/kernel_math.hpp
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
typedef uint64_t VecW __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecH __attribute__((vector_size(kLanes * 2)));

SLUICE_INLINE VecF splat(float value) { return value - VecF{}; }
SLUICE_INLINE VecI splat(int32_t value) { return value - VecI{}; }

// What stages/tensor/kernel_math.hpp asks of a value type, with fma() and the like below.
template <typename V>
struct Lanes;
template <>
struct Lanes<VecF> {
  using Int = VecI;
  using Word = VecU;
};
template <typename T, typename From>
SLUICE_INLINE T constant(From value) {
  return value - T{};
}
template <typename To, typename From>
SLUICE_INLINE To bits_as(From from) {
  return (To)from;
}

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

// Products of the low halves of 64-bit lanes.
SLUICE_INLINE VecW multiply_low(VecW a, VecW b) {
#if defined(__AVX512F__)
  return (VecW)_mm512_maskz_mul_epu32(0xFF, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (VecW)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (VecW)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xFFFFFFFFU) * (b & 0xFFFFFFFFU);
#endif
}

}  // namespace sluice::SLUICE_KERNEL_NAMESPACE
