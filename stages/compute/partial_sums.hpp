// Partial sums that losses and sums of squares are formed of, on every backend. Internal to
// stages/.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sluice {

// Elements of a partial sum, where sums run over blocks; part of the results' definition.
inline constexpr std::int64_t kSumBlock = 16384;

// What one sum in double per block of `elements`, or per row, takes.
[[nodiscard]] constexpr std::size_t block_sum_bytes(std::int64_t elements) {
  return static_cast<std::size_t>((elements + kSumBlock - 1) / kSumBlock) * sizeof(double);
}
[[nodiscard]] constexpr std::size_t row_sum_bytes(std::int64_t rows) {
  return static_cast<std::size_t>(rows) * sizeof(double);
}

}  // namespace sluice
