// Specifications of matmuls, for every backend's cache of matmuls. Internal to stages/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <sluice/compute.hpp>
#include <sluice/tensor.hpp>

namespace sluice {

// One operand: element (b, i, j) is at data[b * batch + i * row + j * column], in elements. One of
// row and column is 1 (a transposed operand has row 1).
struct MatmulLayout {
  std::int64_t row = 0, column = 1, batch = 0;
  friend bool operator==(const MatmulLayout&, const MatmulLayout&) = default;
};

// For each of `batches`: c [m, n] = a [m, k] b [k, n] (+ bias [n], f32) (+ c, where accumulate).
struct MatmulSpec {
  std::int64_t batches = 1, m = 0, n = 0, k = 0;
  MatmulLayout a, b, c;
  DType operands = DType::kF32;  // kF32 or kBf16, of a and b; sums run in f32
  DType result = DType::kF32;    // of c; on a CPU kF32 where accumulate
  bool bias = false;
  bool accumulate = false;
  friend bool operator==(const MatmulSpec&, const MatmulSpec&) = default;

  [[nodiscard]] double flops() const {
    return 2.0 * static_cast<double>(batches) * static_cast<double>(m) * static_cast<double>(n) *
           static_cast<double>(k);
  }
};

[[nodiscard]] std::string to_string(const MatmulSpec& spec);

// The product of all dimensions but the last, which may be 0; 1 without any.
[[nodiscard]] inline std::int64_t leading_rows(const Tensor& tensor) {
  std::int64_t rows = 1;
  for (int d = 0; d + 1 < tensor.shape().rank(); ++d) rows *= tensor.shape()[d];
  return rows;
}

// work(first row, rows) for each part of [0, samples * rows) that sums over rows, such as weight
// gradients, add up by itself: each sample, so that they do not depend on how samples are gathered
// into micro-batches, or all of them.
template <typename Work>
void for_summed_rows(std::int64_t samples, std::int64_t rows, bool by_sample, const Work& work) {
  if (!by_sample) return work(std::int64_t{0}, samples * rows);
  for (std::int64_t sample = 0; sample < samples; ++sample) work(sample * rows, rows);
}
// `rows` of [all, width] from the row `first` on; null data stays null.
[[nodiscard]] Tensor rows_from(const Tensor& all, std::int64_t first, std::int64_t rows);

// Rows of a sample from which matmuls that sum over the rows of one are as fast as others.
inline constexpr std::int64_t kRowsToSumBySample = 256;

// The matmuls of a linear layer with weight [out, in], over shape.rows rows:
// y = x weightᵀ (+ bias), dx = dy weight, and dweight += dyᵀ x, or = dyᵀ x, in f32.
[[nodiscard]] MatmulSpec linear_matmul(const LinearShape& shape);
[[nodiscard]] MatmulSpec linear_input_matmul(const LinearShape& shape);
[[nodiscard]] MatmulSpec linear_weight_matmul(const LinearShape& shape, Write write = Write::kAdd);

// Over every field of a specification, for caches.
struct MatmulSpecHash {
  [[nodiscard]] std::size_t operator()(const MatmulSpec& spec) const;
};

// A matmul that has run. The caller owns the operands.
struct MatmulCall {
  MatmulSpec spec;
  const void* a = nullptr;
  const void* b = nullptr;
  const void* bias = nullptr;
  void* c = nullptr;
  double seconds = 0;  // of this run
};

}  // namespace sluice
