// Tensors whose dimension 0 is the sample.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/tensor.hpp>

namespace sluice {

// `spec`, which has a dimension, with `samples` in its first one. Allocates nothing.
[[nodiscard]] inline TensorSpec with_samples(const TensorSpec& spec, std::int64_t samples) {
  std::array<std::int64_t, Shape::kMaxDims> dims = {samples};
  for (int d = 1; d < spec.shape.rank(); ++d) dims[static_cast<std::size_t>(d)] = spec.shape[d];
  const auto rank = static_cast<std::size_t>(spec.shape.rank());
  return {spec.dtype, Shape(std::span<const std::int64_t>(dims.data(), rank))};
}

// `one` sample's type and shape after a dimension for their number. Throws Error(kUsage) for more
// dimensions than a tensor may have.
[[nodiscard]] inline TensorSpec batch_of(const TensorSpec& one, std::int64_t samples) {
  std::array<std::int64_t, Shape::kMaxDims> dims = {samples};
  const auto rank = static_cast<std::size_t>(one.shape.rank());
  if (rank == dims.size()) {
    throw Error(ErrorCode::kUsage, "a sample is " + to_string(one) +
                                       "; legal: at most five dimensions, before them the sample");
  }
  for (int d = 0; d < one.shape.rank(); ++d) dims[static_cast<std::size_t>(d) + 1] = one.shape[d];
  return {one.dtype, Shape(std::span<const std::int64_t>(dims.data(), rank + 1))};
}
// The same of each.
[[nodiscard]] inline std::vector<TensorSpec> batches_of(const std::vector<TensorSpec>& ones,
                                                        std::int64_t samples) {
  std::vector<TensorSpec> batches;
  for (const TensorSpec& one : ones) batches.push_back(batch_of(one, samples));
  return batches;
}

}  // namespace sluice
