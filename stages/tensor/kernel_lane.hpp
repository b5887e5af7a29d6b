// The operations that stages/tensor/kernel_math.hpp is written in, for one number at a time: the
// value type is float, words are uint32_t. Compiles as device code of CUDA and as plain C++;
// stages/cpu_kernels/vector.hpp has the same operations for vectors.
//
// Contraction must be off: a product and a sum are one rounding only where fma() says so.
// SLUICE_KERNEL_NAMESPACE names the namespace, one per way of compiling.
#pragma once

#include <math.h>
#include <stdint.h>

#include "stages/tensor/kernel_arguments.hpp"

#if defined(__CUDACC__)
#define SLUICE_MATH static __device__ __forceinline__
#else
#define SLUICE_MATH static inline __attribute__((always_inline))
#endif

namespace sluice::SLUICE_KERNEL_NAMESPACE {

// Types that go with a value type: as many signed and unsigned 32-bit words.
template <typename V>
struct Lanes;
template <>
struct Lanes<float> {
  using Int = int32_t;
  using Word = uint32_t;
};

// `value` in every lane of a T.
template <typename T, typename From>
SLUICE_MATH T constant(From value) {
  return static_cast<T>(value);
}
// The bits of `from` as a value of another type of the same size.
template <typename To, typename From>
SLUICE_MATH To bits_as(From from) {
  return __builtin_bit_cast(To, from);
}

SLUICE_MATH float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
// The second operand where either is NaN.
SLUICE_MATH float maximum(float a, float b) { return a > b ? a : b; }
SLUICE_MATH float minimum(float a, float b) { return a < b ? a : b; }
// 1 / a; on a GPU within 2 ulp for a from 2^-126 to 2^126, and 0 above that (CUDA C++ Programming
// Guide, intrinsic functions). A division takes a GPU as long as the rest of a sigmoid.
SLUICE_MATH float reciprocal(float a) {
#if defined(__CUDA_ARCH__)
  return __fdividef(1.0F, a);
#else
  return 1.0F / a;
#endif
}
SLUICE_MATH float fast_square_root(float a) { return ::sqrtf(a); }

}  // namespace sluice::SLUICE_KERNEL_NAMESPACE
