// Sums of products over shards on a GPU: each shard's product is a matmul of the library by itself.
#include "comm/base/sum_tree.hpp"
#include "stages/cuda/cuda_backend.hpp"
#include "stages/cuda_kernels/kernels.hpp"

namespace sluice::cuda {

namespace {

// Of all rows in one place, so that each sum starts at a multiple of kBufferAlignment.
std::size_t sum_bytes(std::int64_t rows, std::int64_t width) {
  return round_up(TensorSpec{DType::kF32, {rows, width}}.bytes(), kBufferAlignment);
}

}  // namespace

std::size_t sum_of_shards_workspace(ComputeContext& /*ctx*/, std::int64_t rows, std::int64_t width,
                                    std::size_t shards, DType /*operands*/, DType result) {
  const std::size_t besides = result == DType::kF32 ? 1 : 0;  // the first one is in the result
  return (sum_places(shards) - besides) * sum_bytes(rows, width);
}

void sum_of_shards(ComputeContext& ctx, const Tensor& x, const Tensor& weight,
                   std::span<const std::int64_t> sizes, bool backward, const Tensor& bias,
                   const Tensor& residual, const Tensor& y) {
  const DType operands = x.spec.dtype, result = y.spec.dtype;
  const std::int64_t rows = leading_rows(y), width = y.shape()[y.shape().rank() - 1];
  std::byte* const sums = ctx.workspace(
      cuda::sum_of_shards_workspace(ctx, rows, width, sizes.size(), operands, result));
  const auto sum_at = [&](std::size_t leaf) {
    std::size_t place = sum_place(leaf);
    const TensorSpec spec{DType::kF32, {rows, width}};
    if (result == DType::kF32 && place-- == 0) return Tensor{y.data, spec};
    return Tensor{sums + place * sum_bytes(rows, width), spec};
  };
  const auto from = [&](const Tensor& all, std::int64_t element) {
    return all.as<const std::byte>() + element * static_cast<std::int64_t>(size_of(operands));
  };
  std::int64_t before = 0;
  for (std::size_t leaf = 0; leaf < sizes.size(); ++leaf) {
    const std::int64_t size = sizes[leaf];
    const Tensor sum = sum_at(leaf);
    if (size == 0) {
      fill_zero_async(sum.data, sum.spec.bytes(), ctx.stream());
    } else {
      LinearShape shape = {.rows = rows, .in = size, .out = width, .operands = operands};
      if (backward) std::swap(shape.in, shape.out);
      MatmulSpec spec = backward ? linear_input_matmul(shape) : linear_matmul(shape);
      spec.result = DType::kF32;
      backend_of(ctx).matmuls().run(
          {spec}, {.a = from(x, rows * before), .b = from(weight, width * before), .c = sum.data});
    }
    before += size;
    add_leaf(leaf, sizes.size(), [&](std::size_t into, std::size_t added) {
      cuda::add(ctx, sum_at(added), sum_at(into));
    });
  }
  cuda::finish_sum(ctx, sum_at(0), bias, residual, y);
}

}  // namespace sluice::cuda
