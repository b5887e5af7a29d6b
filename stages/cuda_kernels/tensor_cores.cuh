// Instructions for matmuls on tensor cores, from compute capability 8.0 on: a warp's matmul of
// two small matrices, the loads that give each lane its part of them, and copies from global to
// shared memory that pass by the registers and run beside what follows.
//
// The parts that lanes hold ("fragments") are those of the PTX ISA, "Matrix Fragments for
// mma.m16n8k16" and "mma.m16n8k8". With group = lane / 4 and place = lane % 4:
//
//   sums      16 x 8    [0], [1]: row group, columns 2 place, 2 place + 1; [2], [3]: row group + 8
//   a, bf16   16 x 16   pairs of neighbours in a row; [0]: row group, columns 2 place, + 1;
//                       [1]: row group + 8; [2], [3]: the same, 8 columns further
//   b, bf16   16 x 8    pairs of neighbours in a column; [0]: column group, rows 2 place, + 1;
//                       [1]: 8 rows further
//   a, TF32   16 x 8    [0]: row group, column place; [1]: row group + 8; [2], [3]: 4 columns
//                       further
//   b, TF32   8 x 8     [0]: row place, column group; [1]: 4 rows further
//
// All 32 lanes reach a call together. The emulation of the tests computes the same from the same
// layouts (tests/emulated_cuda/tensor_core.hpp), but for the rounding of a matmul's sums, which
// NVIDIA does not specify.
#pragma once

#include "stages/cuda_kernels/elements.cuh"

namespace sluice::cuda {

// sums += a b, of bf16 numbers.
SLUICE_MATH void multiply_bf16(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if SLUICE_EMULATED_CUDA
  emulated::mma_m16n8k16_bf16(sums, a, {b0, b1});
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// sums += a b, of TF32 numbers: the low 13 bits of a word do not count.
SLUICE_MATH void multiply_tf32(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if SLUICE_EMULATED_CUDA
  emulated::mma_m16n8k8_tf32(sums, a, {b0, b1});
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// To nearest, ties away from zero.
SLUICE_MATH uint32_t round_to_tf32(uint32_t bits) {
#if SLUICE_EMULATED_CUDA
  return emulated::round_to_tf32(bits);
#else
  uint32_t rounded = 0;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
#endif
}

// Four matrices of 8 rows of 16 bytes in shared memory: lane l gives the address of row l % 8 of
// matrix l / 8, a multiple of 16 bytes, and gets word l % 4 of row l / 4 of each.
SLUICE_MATH void load_matrices(uint32_t (&words)[4], const void* row) {
#if SLUICE_EMULATED_CUDA
  emulated::ldmatrix_x4(words, row, /*transposed=*/false);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
#endif
}

// The same of the transposed matrices, of 8 x 8 elements of 2 bytes.
SLUICE_MATH void load_transposed(uint32_t (&words)[4], const void* row) {
#if SLUICE_EMULATED_CUDA
  emulated::ldmatrix_x4(words, row, /*transposed=*/true);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
#endif
}

// Starts to copy kBytes, 4 or 16, from global to shared memory, both addresses multiples of kBytes;
// zeros instead, and nothing is read, unless `exists`. The copies of a thread that were started
// are there after its finish_copies(), for others after a barrier that follows.
template <int kBytes>
SLUICE_MATH void start_copy(void* to, const void* from, bool exists) {
  static_assert(kBytes == 4 || kBytes == 16);
#if SLUICE_EMULATED_CUDA
  emulated::copy_later(to, from, kBytes, exists ? kBytes : 0);
#else
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const int bytes = exists ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from),
                 "r"(bytes)
                 : "memory");
  }
#endif
}
SLUICE_MATH void finish_copies() {
#if SLUICE_EMULATED_CUDA
  emulated::finish_copies();
#else
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// The compiler takes `value` for changed: in a loop it computes what depends on it again instead of
// keeping it in registers, of which the kernels here have none to spare.
SLUICE_MATH void forget([[maybe_unused]] uint32_t& value) {
#if !SLUICE_EMULATED_CUDA
  asm volatile("" : "+r"(value));
#endif
}

// 2^x to 2^-22 of it, 0 for minus infinity and where it would be denormal, NaN for NaN.
SLUICE_MATH float power_of_two(float x) {
#if defined(__CUDA_ARCH__)
  float power = 0;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return ::exp2f(x);
#endif
}

}  // namespace sluice::cuda
