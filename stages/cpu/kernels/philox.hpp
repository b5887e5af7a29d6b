// Philox4x32-10 (Salmon et al. 2011) over runs of consecutive counters; the scalar form, which says
// what the words mean, is in stages/random.cpp.
#pragma once

#include "stages/cpu/kernels/vector.hpp"

namespace sluice::SLUICE_KERNEL_NAMESPACE {

typedef uint64_t VecW __attribute__((vector_size(kLanes * 4)));

// Products of the lanes' low halves.
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

// Random words of up to kWords consecutive elements.
class DropoutWords {
 public:
  static constexpr int kWords = 256;

  // Words of elements first .. first + kWords - 1; valid until the next call.
  const uint32_t* fill(const DropoutArguments& dropout, uint64_t first) {
    for (int word = 0; word < kWords + 4; word += 4 * kBlocks) {
      make_blocks(dropout, first / 4 + static_cast<uint64_t>(word / 4), words_ + word);
    }
    return words_ + first % 4;
  }

 private:
  static constexpr int kBlocks = kLanes / 2;  // made at once

  // One block of four words per lane; only the low half of a lane means something.
  static SLUICE_INLINE void make_blocks(const DropoutArguments& dropout, uint64_t counter,
                                        uint32_t* words) {
    VecW a{}, c{}, d{};
    for (int i = 0; i < kBlocks; ++i) a[i] = counter + static_cast<uint64_t>(i);
    VecW b = a >> 32;
    uint32_t key0 = dropout.key[0], key1 = dropout.key[1];
    for (int round = 0; round < 10; ++round) {
      const VecW p = multiply_low(a, VecW{} + 0xD2511F53U);
      const VecW q = multiply_low(c, VecW{} + 0xCD9E8D57U);
      a = (q >> 32) ^ b ^ uint64_t { key0 };
      b = q;
      c = (p >> 32) ^ d ^ uint64_t { key1 };
      d = p;
      key0 += 0x9E3779B9U;
      key1 += 0xBB67AE85U;
    }
    const VecW low = (a & 0xFFFFFFFFU) | (b << 32), high = (c & 0xFFFFFFFFU) | (d << 32);
    for (int i = 0; i < kBlocks; ++i) {
      const uint64_t pair[2] = {low[i], high[i]};
      __builtin_memcpy(words + 4 * i, pair, sizeof pair);
    }
  }

  uint32_t words_[kWords + 64];
};

}  // namespace sluice::SLUICE_KERNEL_NAMESPACE
