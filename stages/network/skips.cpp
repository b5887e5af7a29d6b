#include "stages/network/skips.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/operators.hpp>

#include "comm/base/throw_error.hpp"
#include "stages/network/specs.hpp"

namespace sluice::nn {
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

// Where blocks of a tensor lie, in numbers.
struct BlockPlace {
  const Tensor& tensor;
  std::int64_t first, stride;
};

float sum_of(float a, float b) { return a + b; }
Bf16 sum_of(Bf16 a, Bf16 b) { return to_bf16(to_float(a) + to_float(b)); }

template <typename T>
void move_numbers(const Blocks& blocks, const BlockPlace& from, const BlockPlace& to, bool adds) {
  const T* source = from.tensor.as<const T>() + from.first;
  T* target = to.tensor.as<T>() + to.first;
  for (std::int64_t b = 0; b < blocks.blocks; ++b, source += from.stride, target += to.stride) {
    if (!adds) {
      std::copy_n(source, blocks.numbers, target);
      continue;
    }
    for (std::int64_t i = 0; i < blocks.numbers; ++i) target[i] = sum_of(target[i], source[i]);
  }
}

// Copies or adds.
void move_blocks(const Blocks& blocks, const BlockPlace& from, const BlockPlace& to, bool adds) {
  if (from.tensor.spec.dtype == DType::kBf16) return move_numbers<Bf16>(blocks, from, to, adds);
  move_numbers<float>(blocks, from, to, adds);
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
    if (!seen.emplace(skip.from, skip.to).second) throw_usage("{} is given twice", name_of(skip));
  }
}

TensorSpec joined(const Skip& skip, const TensorSpec& input, const TensorSpec& skipped) {
  const bool adds = skip.join == Join::kAdd;
  const int rank = input.shape.rank();
  bool fits = has_numbers(input) && skipped.dtype == input.dtype && skipped.shape.rank() == rank &&
              (adds || skip.axis < rank);
  std::vector<std::int64_t> dims;
  for (int d = 0; fits && d < rank; ++d) {
    const bool grows = !adds && d == skip.axis;
    fits = grows || input.shape[d] == skipped.shape[d];
    dims.push_back(grows ? input.shape[d] + skipped.shape[d] : input.shape[d]);
  }
  if (fits) return {input.dtype, Shape(std::span<const std::int64_t>(dims))};
  throw_usage("{}: {} {} and {}; legal: {} of the same shape{}", name_of(skip),
              adds ? "adds" : "joins", to_string(input), to_string(skipped),
              name_of(input.dtype == DType::kBf16 ? DType::kBf16 : DType::kF32),
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
  move_blocks(first, {input, 0, first.numbers}, {y, 0, stride}, /*adds=*/false);
  move_blocks(second, {skipped, 0, second.numbers}, {y, first.numbers, stride}, /*adds=*/false);
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
    move_blocks(first, {dy, 0, stride}, {dinput, 0, first.numbers}, /*adds=*/false);
  }
  if (dskipped.data != nullptr) {
    move_blocks(second, {dy, first.numbers, stride}, {dskipped, 0, second.numbers}, adds);
  }
}

StageSkips::StageSkips(std::span<const Skip> skips, int begin, int end, bool last) {
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
  const auto found = std::ranges::find(sources_, from, &Source::from);
  return static_cast<std::size_t>(found - sources_.begin());
}

}  // namespace sluice::nn
