// Values of parameters by their names: values() of golden.py.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace sluice::testing {

// A gain is near 1, other values lie in [-0.5, 0.5).
inline void fill_by_name(std::string_view name, bool gain, std::span<float> values) {
  std::uint32_t seed = 2166136261U;
  for (const char letter : name) seed = (seed ^ static_cast<unsigned char>(letter)) * 16777619U;
  std::uint32_t i = 0;
  for (float& value : values) {
    std::uint32_t x = i++ * 2654435761U + seed;
    x ^= x >> 15;
    x *= 739982445U;
    x ^= x >> 12;
    const float unit = static_cast<float>(x >> 12) / 0x1p19F - 1;
    value = gain ? 1 + unit / 4 : unit / 2;
  }
}

}  // namespace sluice::testing
