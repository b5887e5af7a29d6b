// Sums whose bits do not depend on the compiler's vectors. Internal to stages/.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace sluice {

// Sums of term(i) over [0, count) in eight lanes, which are added in order: vectors of the compiler
// give the same bits as one number at a time.
template <typename Term>
double sum_of(std::int64_t count, const Term& term) {
  constexpr std::int64_t kLanes = 8;
  std::array<double, kLanes> lanes{};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[static_cast<std::size_t>(lane)] += term(i + lane);
    }
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  for (; i < count; ++i) sum += term(i);
  return sum;
}

}  // namespace sluice
