// Where the elements of a slice lie in the whole.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

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

// Elements of a part in the memory that it shares with others.
struct PlacedPart {
  Slice slice;
  int shard = 0;
  std::int64_t first = 0, count = 0;
  [[nodiscard]] std::int64_t end() const { return first + count; }
};

// Of a parameter with `elements` in this memory: its parts in order, or the one that `slice` is.
// `elements` are those of `slice`, all of its rows together.
[[nodiscard]] inline std::vector<PlacedPart> placed_parts(const Slice& slice,
                                                          std::span<const SlicePart> parts,
                                                          std::int64_t elements) {
  if (parts.empty()) return {{slice, 0, 0, elements}};
  std::vector<PlacedPart> placed;
  std::int64_t first = 0;
  const std::int64_t row = slice.length == 0 ? 0 : elements / slice.length;
  for (const SlicePart& part : parts) {
    placed.push_back({part.slice, part.shard, first, part.slice.length * row});
    first = placed.back().end();
  }
  return placed;
}

// for_runs() of elements of such memory.
template <typename Visit>
void for_part_runs(const Shape& whole, std::span<const PlacedPart> parts, std::int64_t first,
                   std::int64_t count, const Visit& visit) {
  for (const PlacedPart& part : parts) {
    const std::int64_t from = std::max(first, part.first);
    const std::int64_t to = std::min(first + count, part.end());
    if (from >= to) continue;
    for_runs(slice_shape(whole, part.slice), part.slice, from - part.first, to - from,
             [&](std::int64_t here, std::int64_t in_whole, std::int64_t elements) {
               visit(part.first + here, in_whole, elements);
             });
  }
}

// The elements of each shard, in order: those of its parts. Of a parameter without parts: all.
[[nodiscard]] inline std::vector<std::int64_t> shard_elements(const Slice& slice,
                                                              std::span<const SlicePart> parts,
                                                              std::int64_t elements) {
  std::vector<std::int64_t> counts;
  int last = -1;
  for (const PlacedPart& part : placed_parts(slice, parts, elements)) {
    if (counts.empty() || part.shard != last) counts.push_back(0);
    counts.back() += part.count;
    last = part.shard;
  }
  return counts;
}

}  // namespace sluice
