// Values whose sums show the order in which they were added.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sluice::testing {

// Of one rank: signs and magnitudes mixed so that the order of a sum shows in its bits.
inline std::vector<float> addends(int rank, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto hash =
        static_cast<std::uint32_t>((i + 1) * 2654435761U + static_cast<std::size_t>(rank) * 40503U);
    const float fraction = 1.0F + static_cast<float>(hash % 8191U) / 8191.0F;
    const float sign = (hash >> 16U) % 2U == 0 ? 1.0F : -1.0F;
    values[i] = sign * std::ldexp(fraction, static_cast<int>((hash >> 20U) % 12U));
  }
  return values;
}

// How many values differ in their bits; one more where there are not as many.
inline std::size_t differing(const std::vector<float>& a, const std::vector<float>& b) {
  std::size_t count = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) {
    count += std::bit_cast<std::uint32_t>(a[i]) != std::bit_cast<std::uint32_t>(b[i]) ? 1 : 0;
  }
  return count;
}

}  // namespace sluice::testing
