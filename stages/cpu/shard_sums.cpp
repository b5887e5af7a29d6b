// Sums of products over shards. The products of a block of rows, each in memory of its own, are
// added while they are in the second-level cache.
#include "comm/base/sum_tree.hpp"
#include "stages/cpu/cpu_backend.hpp"
#include "stages/cpu/parallel.hpp"

namespace sluice::cpu {

namespace {

// Bits do not depend on it where blocks of rows have passed their check.
std::int64_t block_rows(ComputeContext& ctx, DType operands, std::int64_t rows) {
  return std::min(rows, row_matmuls_of(ctx).blocks(ctx, operands).block(rows));
}

}  // namespace

std::size_t sum_of_shards_workspace(ComputeContext& ctx, std::int64_t rows, std::int64_t width,
                                    std::size_t shards, DType operands, DType result) {
  const std::size_t besides = result == DType::kF32 ? 1 : 0;  // the first one is in the result
  return (sum_places(shards) - besides) *
         TensorSpec{DType::kF32, {block_rows(ctx, operands, rows), width}}.bytes();
}

void sum_of_shards(ComputeContext& ctx, const Tensor& x, const Tensor& weight,
                   std::span<const std::int64_t> sizes, bool backward, const Tensor& bias,
                   const Tensor& residual, const Tensor& y) {
  const DType operands = x.spec.dtype, result = y.spec.dtype;
  const std::int64_t all = leading_rows(y), width = y.shape()[y.shape().rank() - 1];
  const std::int64_t block = block_rows(ctx, operands, all);
  const Tensor sums{
      ctx.workspace(cpu::sum_of_shards_workspace(ctx, all, width, sizes.size(), operands, result)),
      {DType::kF32, {static_cast<std::int64_t>(sum_places(sizes.size())) * block, width}}};
  const auto add = kernels_of(ctx).f32.add;
  for (std::int64_t first = 0; first < all; first += block) {
    const std::int64_t rows = std::min(block, all - first);
    const Tensor y_rows = rows_from(y, first, rows);
    const auto sum_at = [&](std::size_t leaf) {
      std::size_t place = sum_place(leaf);
      if (result == DType::kF32 && place-- == 0) return y_rows;
      return rows_from(sums, static_cast<std::int64_t>(place) * block, rows);
    };
    std::int64_t before = 0;
    for (std::size_t leaf = 0; leaf < sizes.size(); ++leaf) {
      const std::int64_t size = sizes[leaf];
      LinearShape shape = {.rows = rows, .in = size, .out = width, .operands = operands};
      if (backward) std::swap(shape.in, shape.out);
      MatmulSpec spec = backward ? linear_input_matmul(shape) : linear_matmul(shape);
      spec.result = DType::kF32;
      row_matmuls_of(ctx).run(spec, element(x, all * before + first * size),
                              element(weight, width * before), nullptr, sum_at(leaf).data);
      before += size;
      add_leaf(leaf, sizes.size(), [&](std::size_t into, std::size_t from) {
        const Tensor sum = sum_at(into), added = sum_at(from);
        parallel_range(ctx, rows * width, kElementGrain, [&](std::int64_t begin, std::int64_t end) {
          add(element(added, begin), element(sum, begin), end - begin);
        });
      });
    }
    cpu::finish_sum(ctx, sum_at(0), bias, rows_from(residual, first, rows), y_rows);
  }
}

void finish_sum(ComputeContext& ctx, const Tensor& sum, const Tensor& bias, const Tensor& residual,
                const Tensor& y) {
  const std::int64_t width = sum.shape()[1];
  const bool rounds = y.spec.dtype != DType::kF32;
  if (!rounds && bias.data == nullptr && residual.data == nullptr) return;
  const TypedKernels& kernels = kernels_for(ctx, y.spec.dtype);
  parallel_range(ctx, sum.shape()[0], 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      std::byte* const values = element(sum, row * width);
      if (bias.data != nullptr) kernels_of(ctx).f32.add(bias.data, values, width);
      if (residual.data != nullptr) kernels.add(element(residual, row * width), values, width);
      if (rounds) kernels.from_float(values, element(y, row * width), width);
    }
  });
}

}  // namespace sluice::cpu
