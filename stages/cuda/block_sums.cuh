// Sums in double over fixed blocks of kSumBlock elements, and the sum of those in a fixed order:
// results depend on the number of elements alone.
#pragma once

#include "stages/backends.hpp"
#include "stages/cuda/elements.cuh"

namespace sluice::cuda {

constexpr int kSumThreads = 512;

// out[block] = sum of terms.of(i) over the block's elements.
template <typename Terms>
__global__ void __launch_bounds__(kSumThreads)
    block_sums_kernel(const Terms terms, const int64_t count, double* const out) {
  const int64_t blocks = divide_up(count, kSumBlock);
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t end = (block + 1) * kSumBlock < count ? (block + 1) * kSumBlock : count;
    double sum = 0;
#pragma unroll 8
    for (int64_t i = block * kSumBlock + threadIdx.x; i < end; i += kSumThreads) {
      sum += terms.of(i);
    }
    sum = block_sum<kSumThreads>(sum);
    if (threadIdx.x == 0) out[block] = sum;
  }
}

struct Doubles {
  const double* values;
  __device__ double of(int64_t i) const { return values[i]; }
};

// One block: *sum = sum of values[0, count), 0 for none.
template <typename Terms>
__global__ void __launch_bounds__(kSumThreads)
    total_kernel(const Terms terms, const int64_t count, double* const sum) {
  double total = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) total += terms.of(i);
  total = block_sum<kSumThreads>(total);
  if (threadIdx.x == 0) *sum = total;
}

// *sum = sum of values, in stream order; `sum` is memory that the device can write.
inline void add_up(ComputeContext& ctx, const double* values, int64_t count, double* sum) {
  launch("sum of partial sums", total_kernel<Doubles>, {1, kSumThreads}, native(ctx.stream()),
         Doubles{values}, count, sum);
}

// *sum = sum of terms.of(i) over [0, count). Takes sum_of_squares_workspace(count).
template <typename Terms>
void sum_of_blocks(ComputeContext& ctx, const char* name, const Terms& terms, int64_t count,
                   double* sum) {
  const std::size_t bytes = sum_of_squares_workspace(count);
  if (bytes == 0) {
    launch(name, total_kernel<Terms>, {1, kSumThreads}, native(ctx.stream()), terms, count, sum);
    return;
  }
  const int64_t blocks = divide_up(count, kSumBlock);
  auto* sums = reinterpret_cast<double*>(ctx.workspace(bytes));
  launch(name, block_sums_kernel<Terms>, {blocks_for(blocks, 1), kSumThreads}, native(ctx.stream()),
         terms, count, sums);
  add_up(ctx, sums, blocks, sum);
}

}  // namespace sluice::cuda
