// Philox over runs of consecutive counters.
#pragma once

#include "stages/cpu_kernels/vector.hpp"

namespace sluice::SLUICE_KERNEL_NAMESPACE {

// Random words of up to kWords consecutive elements.
class RandomWords {
 public:
  static constexpr int kWords = 256;

  // Words of elements first .. first + kWords - 1 under `key`; valid until the next call. A vector
  // may be read past their end.
  const uint32_t* fill(const uint32_t (&key)[2], uint64_t first) {
    for (int word = 0; word < kWords + 4; word += 4 * kBlocks) {
      make_blocks(key, first / 4 + static_cast<uint64_t>(word / 4), words_ + word);
    }
    return words_ + first % 4;
  }

 private:
  static constexpr int kBlocks = kLanes / 2;  // made at once

  // One block of four words per lane; only the low half of a lane means something.
  static SLUICE_INLINE void make_blocks(const uint32_t (&key)[2], uint64_t counter,
                                        uint32_t* words) {
    VecW a{}, c{}, d{};
    for (int i = 0; i < kBlocks; ++i) a[i] = counter + static_cast<uint64_t>(i);
    VecW b = a >> 32;
    philox_rounds(key, a, b, c, d);
    const VecW low = (a & 0xFFFFFFFFU) | (b << 32), high = (c & 0xFFFFFFFFU) | (d << 32);
    for (int i = 0; i < kBlocks; ++i) {
      const uint64_t pair[2] = {low[i], high[i]};
      __builtin_memcpy(words + 4 * i, pair, sizeof pair);
    }
  }

  uint32_t words_[kWords + 64];
};

}  // namespace sluice::SLUICE_KERNEL_NAMESPACE
