// Dropout in CUDA kernels: the CPU's masks, element by element (<sluice/tensor.hpp>).
#pragma once

#include "stages/cuda_kernels/elements.cuh"

namespace sluice::cuda {

// With the key of the step in device memory, if there is one.
SLUICE_MATH DropoutArguments at_step(DropoutArguments dropout) {
  if (dropout.step != nullptr) {
    philox_stream_key<uint32_t>(dropout.seed, dropout.site, *dropout.step, dropout.key);
  }
  return dropout;
}

struct PhiloxWords {
  uint32_t at[4];
};

// Words of elements 4 * block to 4 * block + 3.
SLUICE_MATH PhiloxWords philox_words(const uint32_t (&key)[2], uint64_t block) {
  PhiloxWords words = {{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), 0, 0}};
  philox_rounds(key, words.at[0], words.at[1], words.at[2], words.at[3]);
  return words;
}
// The word of one element.
SLUICE_MATH uint32_t philox_word(const uint32_t (&key)[2], uint64_t index) {
  const PhiloxWords words = philox_words(key, index / 4);
  const uint32_t low = index % 2 == 0 ? words.at[0] : words.at[1];
  const uint32_t high = index % 2 == 0 ? words.at[2] : words.at[3];
  return index % 4 < 2 ? low : high;
}

// drop() of kernel_math.hpp; the threshold is below 2^24.
SLUICE_MATH float drop_by(const DropoutArguments& dropout, uint32_t word, float value) {
  return word >= dropout.threshold << 8 ? value * dropout.factor : 0.0F;
}

// Dropout of the element of global index `index`.
SLUICE_MATH float drop_one(const DropoutArguments& dropout, uint64_t index, float value) {
  return drop_by(dropout, philox_word(dropout.key, index), value);
}

// Of N elements from `index` on, a multiple of 4 unless N is 1.
template <int N>
SLUICE_MATH void drop_consecutive(const DropoutArguments& dropout, uint64_t index,
                                  Floats<N>& values) {
  if constexpr (N == 1) {
    values.at[0] = drop_one(dropout, index, values.at[0]);
  } else {
    static_assert(N % 4 == 0);
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const PhiloxWords words = philox_words(dropout.key, (index + static_cast<uint64_t>(i)) / 4);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        values.at[i + k] = drop_by(dropout, words.at[k], values.at[i + k]);
      }
    }
  }
}

// Which elements 4 * block to 4 * block + 3 are kept, in bits 0 to 3.
SLUICE_MATH uint32_t kept_of_block(const DropoutArguments& dropout, uint64_t block) {
  const PhiloxWords words = philox_words(dropout.key, block);
  uint32_t kept = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (words.at[k] >= dropout.threshold << 8) kept |= 1U << k;  // word >> 8 >= threshold < 2^24
  }
  return kept;
}
// Of elements `index` to `index` + 3. kAligned: `index` is a multiple of 4.
template <bool kAligned>
SLUICE_MATH uint32_t kept_of_four(const DropoutArguments& dropout, uint64_t index) {
  const uint32_t kept = kept_of_block(dropout, index / 4);
  if constexpr (kAligned) return kept;
  const uint32_t both = kept | kept_of_block(dropout, index / 4 + 1) << 4;
  return both >> (index % 4) & 0xFU;
}

}  // namespace sluice::cuda
