// Tensors whose dimension 0 is the sample, and of which another one may count positions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/error.hpp>
#include <sluice/stage.hpp>
#include <sluice/tensor.hpp>

namespace sluice {

// `spec`, which has a dimension, with shape.samples in its first one, and in `dimension`
// shape.positions, unless these are 0. Allocates nothing.
[[nodiscard]] inline TensorSpec with_shape(const TensorSpec& spec, UnitShape shape, int dimension) {
  std::array<std::int64_t, Shape::kMaxDims> dims = {shape.samples};
  for (int d = 1; d < spec.shape.rank(); ++d) {
    const bool counts = d == dimension && shape.positions > 0;
    dims[static_cast<std::size_t>(d)] = counts ? shape.positions : spec.shape[d];
  }
  const auto rank = static_cast<std::size_t>(spec.shape.rank());
  return {spec.dtype, Shape(std::span<const std::int64_t>(dims.data(), rank))};
}
// The same of each.
[[nodiscard]] inline std::vector<TensorSpec> with_shape(std::vector<TensorSpec> specs,
                                                        UnitShape shape, int dimension) {
  for (TensorSpec& spec : specs) spec = with_shape(spec, shape, dimension);
  return specs;
}
[[nodiscard]] inline TensorSpec with_samples(const TensorSpec& spec, std::int64_t samples) {
  return with_shape(spec, {.samples = samples}, 0);
}

// How many positions a sample of `source` has; 0: it counts none. Throws Error(kUsage) where its
// position_dimension() is none of each input and target, and where they differ in their number.
[[nodiscard]] std::int64_t positions_of(const DataSource& source);

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
