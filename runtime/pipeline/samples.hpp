// Tensors whose dimension 0 is the sample. Internal to the pipeline.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <sluice/tensor.hpp>

namespace sluice {

// `spec`, which has a dimension, with `samples` in its first one. Allocates nothing.
[[nodiscard]] inline TensorSpec with_samples(const TensorSpec& spec, std::int64_t samples) {
  std::array<std::int64_t, Shape::kMaxDims> dims = {samples};
  for (int d = 1; d < spec.shape.rank(); ++d) dims[static_cast<std::size_t>(d)] = spec.shape[d];
  const auto rank = static_cast<std::size_t>(spec.shape.rank());
  return {spec.dtype, Shape(std::span<const std::int64_t>(dims.data(), rank))};
}

}  // namespace sluice
