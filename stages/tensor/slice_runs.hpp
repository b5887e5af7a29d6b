// Where the elements of a slice lie in the whole.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include <sluice/tensor.hpp>

namespace sluice {

// `shape` with `rows` in place of dimension `axis`.
[[nodiscard]] inline Shape with_rows(const Shape& shape, int axis, std::int64_t rows) {
  std::int64_t dims[Shape::kMaxDims] = {};
  for (int d = 0; d < shape.rank(); ++d) dims[d] = d == axis ? rows : shape[d];
  return Shape(std::span<const std::int64_t>(dims, static_cast<std::size_t>(shape.rank())));
}

// The shape of a slice of a whole of `shape`.
[[nodiscard]] inline Shape slice_shape(const Shape& shape, const Slice& slice) {
  return slice.all() ? shape : with_rows(shape, slice.axis, slice.length);
}

// Calls visit(here, in_whole, elements) for each run of elements that follow each other in the
// slice, which has `shape`, and in the whole, in order of the slice: of its `count` elements from
// `first` on.
template <typename Visit>
void for_runs(const Shape& shape, const Slice& slice, std::int64_t first, std::int64_t count,
              const Visit& visit) {
  if (count == 0) return;
  if (slice.all()) return visit(first, first, count);
  std::int64_t inner = 1;  // elements of a row
  for (int d = slice.axis + 1; d < shape.rank(); ++d) inner *= shape[d];
  const std::int64_t run = slice.length * inner;
  for (std::int64_t here = first; here < first + count;) {
    const std::int64_t offset = here % run;
    const std::int64_t elements = std::min(run - offset, first + count - here);
    visit(here, here / run * slice.whole * inner + slice.begin * inner + offset, elements);
    here += elements;
  }
}

}  // namespace sluice
