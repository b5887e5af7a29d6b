// Whole numbers at random.
#pragma once

#include <cstdint>

#include <sluice/tensor.hpp>

namespace sluice {

// A number in [0, bound), bound > 0, from 64 random bits: the upper half of their product. Its bias
// is at most bound / 2^64.
[[nodiscard]] inline std::int64_t draw_below(std::int64_t bound, const RandomKey& key,
                                             std::int64_t sample) {
  const auto words = philox(key, 0, static_cast<std::uint64_t>(sample));
  const std::uint64_t bits = static_cast<std::uint64_t>(words[0]) << 32 | words[1];
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::int64_t>(Wide{bits} * static_cast<std::uint64_t>(bound) >> 64);
}

}  // namespace sluice
