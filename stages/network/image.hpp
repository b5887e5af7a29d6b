// What layers of images f32 [samples, channels, height, width] share. Internal to stages/.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <sluice/layers.hpp>
#include <sluice/tensor.hpp>

#include "stages/network/specs.hpp"

namespace sluice::nn {

// channels 0: any.
inline void require_image(const TensorSpec& input, std::int64_t channels) {
  const Shape& shape = input.shape;
  const bool right = input.dtype == DType::kF32 && shape.rank() == 4 && shape[2] > 0 &&
                     shape[3] > 0 && (channels == 0 || shape[1] == channels);
  if (right) return;
  if (channels == 0) {
    throw_usage("the input is {}; legal: f32 [samples, channels, height, width]", to_string(input));
  }
  throw_usage("the input is {}; legal: f32 [samples, {}, height, width]", to_string(input),
              channels);
}

// A window that moves over an image, for height and width.
struct Window {
  std::array<std::int64_t, 2> kernel = {}, stride = {}, padding = {};

  Window(HeightWidth size, HeightWidth step, HeightWidth border)
      : kernel{size.height, size.width},
        stride{step.height, step.width},
        padding{border.height, border.width} {
    for (std::size_t d = 0; d < 2; ++d) {
      require_positive(kernel[d], "the kernel");
      require_positive(stride[d], "the stride");
      if (padding[d] < 0) throw_usage("the padding is {}; legal: at least 0", padding[d]);
    }
  }

  // [samples, channels, ...] of the windows' places. Throws where none fits.
  [[nodiscard]] TensorSpec places(const TensorSpec& input, std::int64_t channels) const {
    std::array<std::int64_t, 2> sizes{};
    for (std::size_t d = 0; d < 2; ++d) {
      const std::int64_t size = input.shape[2 + static_cast<int>(d)] + 2 * padding[d];
      if (size < kernel[d]) {
        throw_usage("a kernel of {} x {} does not fit the input {} with a padding of {} x {}",
                    kernel[0], kernel[1], to_string(input), padding[0], padding[1]);
      }
      sizes[d] = (size - kernel[d]) / stride[d] + 1;
    }
    return {DType::kF32, {input.shape[0], channels, sizes[0], sizes[1]}};
  }
};

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

}  // namespace sluice::nn
