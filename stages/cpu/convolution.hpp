// Convolutions of images by oneDNN, made once for a shape. Images are f32 [samples, channels,
// height, width], weights [out, in / groups, kernel height, kernel width]: the library's own
// layouts are made in scratch. A call allocates nothing in Sluice. Internal to stages/.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace sluice {

struct ConvolutionShape {
  std::int64_t samples = 0, in = 0, out = 0, groups = 1;
  std::array<std::int64_t, 2> size = {}, kernel = {}, stride = {1, 1},
                              padding = {};  // height, width
  bool bias = true;

  [[nodiscard]] std::int64_t out_size(std::size_t d) const {
    return (size[d] + 2 * padding[d] - kernel[d]) / stride[d] + 1;
  }
};

// Used from one thread. Runs on its OpenMP team.
class Convolution {
 public:
  // Throws Error(kDevice) with the shape where the library has none.
  explicit Convolution(const ConvolutionShape& shape);
  ~Convolution();
  Convolution(Convolution&&) noexcept;
  Convolution& operator=(Convolution&&) noexcept;

  // The most that a call takes of `scratch`, which starts at a multiple of 64.
  [[nodiscard]] std::size_t scratch_bytes() const;
  // bias: null without one. All overwrite.
  void forward(const float* x, const float* weight, const float* bias, float* y,
               std::byte* scratch);
  void backward_input(const float* dy, const float* weight, float* dx, std::byte* scratch);
  void backward_weight(const float* x, const float* dy, float* dweight, std::byte* scratch);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice
