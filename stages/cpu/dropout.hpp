// A dropout as the kernels take it.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "stages/cpu/kernels/kernels.hpp"
#include "stages/operators.hpp"
#include "stages/random.hpp"

namespace sluice {

// For elements from dropout.first_element + offset on. An element is kept where
// to_unit(word) >= probability.
[[nodiscard]] inline DropoutArguments dropout_arguments(const Dropout& dropout,
                                                        std::int64_t offset) {
  const std::array<std::uint32_t, 2> key = philox_key(dropout.key);
  const double threshold = std::ceil(static_cast<double>(dropout.probability) * 0x1.0p24);
  return {{key[0], key[1]},
          static_cast<std::uint32_t>(threshold),
          1.0F / (1.0F - dropout.probability),
          dropout.first_element + static_cast<std::uint64_t>(offset)};
}

}  // namespace sluice
