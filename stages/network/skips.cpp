#include "stages/network/skips.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/operators.hpp>

#include "comm/base/throw_error.hpp"

namespace sluice {
namespace {

std::string name_of(const Skip& skip) { return fmt::format("skip({}, {})", skip.from, skip.to); }

// A tensor as `blocks` blocks of `numbers` numbers, one after the other: the dimensions from the
// concatenated one on.
struct Blocks {
  std::int64_t blocks = 1, numbers = 1;
  Blocks(const Shape& shape, int axis) {
    for (int d = 0; d < shape.rank(); ++d) (d < axis ? blocks : numbers) *= shape[d];
  }
};

// Copies or adds blocks between tensors whose blocks lie `from_stride` and `to_stride` apart.
void move_blocks(const Blocks& blocks, const float* from, std::int64_t from_stride, float* to,
                 std::int64_t to_stride, bool adds) {
  for (std::int64_t b = 0; b < blocks.blocks; ++b, from += from_stride, to += to_stride) {
    if (!adds) {
      std::copy_n(from, blocks.numbers, to);
      continue;
    }
    for (std::int64_t i = 0; i < blocks.numbers; ++i) to[i] += from[i];
  }
}

void copy_or_add(ComputeContext& compute, const Tensor& from, const Tensor& to, bool adds) {
  if (adds) return add(compute, from, to);
  copy_async(to.data, from.data, from.spec.bytes(), compute.stream());
}

}  // namespace

void require_skips(std::span<const Skip> skips, int layers) {
  std::set<std::pair<int, int>> seen;
  for (const Skip& skip : skips) {
    if (skip.from < -1 || skip.to > layers || skip.to < skip.from + 2) {
      throw_usage(
          "{}: legal in a model of {} layers: from -1, the model's input, and to a layer at least "
          "2 later, at most {}, the model's output",
          name_of(skip), layers, layers);
    }
    if (skip.axis < 1 || skip.axis >= Shape::kMaxDims) {
      throw_usage("{}: axis is {}; legal: 1 to {}", name_of(skip), skip.axis, Shape::kMaxDims - 1);
    }
    if (skip.join != Join::kAdd && skip.join != Join::kConcatenate) {
      throw_usage("{}: join {}; legal: Join::kAdd and Join::kConcatenate", name_of(skip),
                  static_cast<int>(skip.join));
    }
    if (!seen.emplace(skip.from, skip.to).second) throw_usage("{} is given twice", name_of(skip));
  }
}

TensorSpec joined(const Skip& skip, const TensorSpec& input, const TensorSpec& skipped) {
  const bool adds = skip.join == Join::kAdd;
  const int rank = input.shape.rank();
  bool fits = input.dtype == DType::kF32 && skipped.dtype == DType::kF32 &&
              skipped.shape.rank() == rank && (adds || skip.axis < rank);
  std::vector<std::int64_t> dims;
  for (int d = 0; fits && d < rank; ++d) {
    const bool grows = !adds && d == skip.axis;
    fits = grows || input.shape[d] == skipped.shape[d];
    dims.push_back(grows ? input.shape[d] + skipped.shape[d] : input.shape[d]);
  }
  if (fits) return {DType::kF32, Shape(std::span<const std::int64_t>(dims))};
  throw_usage("{}: {} {} and {}; legal: f32 of the same shape{}", name_of(skip),
              adds ? "adds" : "joins", to_string(input), to_string(skipped),
              adds ? std::string() : fmt::format(" but for dimension {}", skip.axis));
}

void join_forward(ComputeContext& compute, const Skip& skip, const Tensor& input,
                  const Tensor& skipped, const Tensor& y) {
  if (skip.join == Join::kAdd) {
    copy_or_add(compute, input, y, /*adds=*/false);
    return add(compute, skipped, y);
  }
  const Blocks first(input.shape(), skip.axis), second(skipped.shape(), skip.axis);
  const std::int64_t stride = first.numbers + second.numbers;
  move_blocks(first, input.as<float>(), first.numbers, y.as<float>(), stride, /*adds=*/false);
  move_blocks(second, skipped.as<float>(), second.numbers, y.as<float>() + first.numbers, stride,
              /*adds=*/false);
}

void join_backward(ComputeContext& compute, const Skip& skip, const Tensor& dy,
                   const Tensor& dinput, const Tensor& dskipped, bool adds) {
  if (skip.join == Join::kAdd) {
    if (dinput.data != nullptr) copy_or_add(compute, dy, dinput, /*adds=*/false);
    if (dskipped.data != nullptr) copy_or_add(compute, dy, dskipped, adds);
    return;
  }
  const Blocks first(dinput.shape(), skip.axis), second(dskipped.shape(), skip.axis);
  const std::int64_t stride = first.numbers + second.numbers;
  if (dinput.data != nullptr) {
    move_blocks(first, dy.as<float>(), stride, dinput.as<float>(), first.numbers, /*adds=*/false);
  }
  if (dskipped.data != nullptr) {
    move_blocks(second, dy.as<float>() + first.numbers, stride, dskipped.as<float>(),
                second.numbers, adds);
  }
}

StageSkips::StageSkips(std::span<const Skip> skips, int begin, int end, int layers) {
  const bool last = end == layers;
  std::set<int> in, out, used;
  for (const Skip& skip : skips) {
    if (skip.from < begin - 1 && skip.to >= begin) in.insert(skip.from);
    if (skip.from < end - 1 && skip.to >= end && !last) out.insert(skip.from);
    if (skip.to < begin || (skip.to >= end && !last)) continue;
    joins_.push_back(skip);
    used.insert(skip.from);
  }
  std::stable_sort(joins_.begin(), joins_.end(),
                   [](const Skip& a, const Skip& b) { return a.to < b.to; });
  used.insert(in.begin(), in.end());
  used.insert(out.begin(), out.end());
  for (const int from : used) {
    Source source{.from = from};
    if (from == begin - 1) source.input = 0;
    if (in.contains(from)) source.input = static_cast<int>(inputs_++);
    if (out.contains(from)) source.output = static_cast<int>(outputs_++);
    sources_.push_back(source);
  }
}

std::size_t StageSkips::source_of(int from) const {
  const auto found = std::find_if(sources_.begin(), sources_.end(),
                                  [from](const Source& source) { return source.from == from; });
  return static_cast<std::size_t>(found - sources_.begin());
}

}  // namespace sluice
