// Sums and products of sizes in bytes that never wrap around. What std::size_t cannot hold is
// kTooManyBytes: no memory has as many, so whoever compares or allocates it refuses it. round_up()
// keeps it.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <limits>

namespace sluice {

inline constexpr std::size_t kTooManyBytes = std::numeric_limits<std::size_t>::max();

constexpr void add_bytes(std::size_t& sum, std::size_t bytes) {
  sum = bytes > kTooManyBytes - sum ? kTooManyBytes : sum + bytes;
}

[[nodiscard]] constexpr std::size_t sum_of_bytes(std::initializer_list<std::size_t> parts) {
  std::size_t sum = 0;
  for (const std::size_t bytes : parts) add_bytes(sum, bytes);
  return sum;
}

[[nodiscard]] constexpr std::size_t multiply_bytes(std::size_t bytes, std::size_t count) {
  return count > 0 && bytes > kTooManyBytes / count ? kTooManyBytes : bytes * count;
}

}  // namespace sluice
