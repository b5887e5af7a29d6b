// Layers and losses of one type between neighbours of another: copies of their operands are made in
// scratch at each call. Internal to stages/.
#pragma once

#include <memory>

#include <sluice/layers.hpp>

namespace sluice {

// The layer takes numbers of the type `takes`; its output becomes one of `gives`. Gradients of
// input and output have the types of those. `watched`: its first calls were, or need not be.
[[nodiscard]] std::unique_ptr<Layer> converted(std::unique_ptr<Layer> layer, DType takes,
                                               DType gives, bool watched);
// A model's input as its first layer gets it: f32 becomes the stream's type.
[[nodiscard]] inline TensorSpec at_entry(const TensorSpec& input, const Precision& precision) {
  return {input.dtype == DType::kF32 ? precision.stream : input.dtype, input.shape};
}
// The loss takes outputs in f32.
[[nodiscard]] std::unique_ptr<Loss> widened(std::unique_ptr<Loss> loss);

}  // namespace sluice
