// Partial sums of losses and of sums of squares, on every backend. Internal to stages/.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sluice {

// Elements of one partial sum over a block. The results' bits depend on it.
inline constexpr std::int64_t kSumBlock = 16384;

// Bytes of one double per block of `elements`, or per row.
[[nodiscard]] constexpr std::size_t block_sum_bytes(std::int64_t elements) {
  return static_cast<std::size_t>((elements + kSumBlock - 1) / kSumBlock) * sizeof(double);
}
[[nodiscard]] constexpr std::size_t row_sum_bytes(std::int64_t rows) {
  return static_cast<std::size_t>(rows) * sizeof(double);
}

}  // namespace sluice
