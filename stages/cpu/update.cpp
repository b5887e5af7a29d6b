// Optimizer kernels over flat vectors.
#include "stages/backends.hpp"
#include "stages/call_arguments.hpp"
#include "stages/cpu/parallel.hpp"

namespace sluice::cpu {

void adamw(ComputeContext& ctx, const AdamWStep& step, std::span<const UpdateRun> runs) {
  for (const UpdateRun& run : runs) {
    const AdamWArguments arguments = adamw_arguments(step, run.decay);
    parallel_range(ctx, run.count, kElementGrain, [&](std::int64_t begin, std::int64_t end) {
      ctx.kernels().adamw(&arguments, run.value + begin, run.grad + begin, run.first + begin,
                          run.second + begin, end - begin);
    });
  }
}

void sgd(ComputeContext& ctx, const SgdStep& step, std::span<const UpdateRun> runs) {
  for (const UpdateRun& run : runs) {
    const SgdArguments arguments = sgd_arguments(step, run.decay);
    parallel_range(ctx, run.count, kElementGrain, [&](std::int64_t begin, std::int64_t end) {
      float* speed = run.first == nullptr ? nullptr : run.first + begin;
      ctx.kernels().sgd(&arguments, run.value + begin, run.grad + begin, speed, end - begin);
    });
  }
}

void sum_of_squares(ComputeContext& ctx, std::span<const float> values, double* sum) {
  const auto count = static_cast<std::int64_t>(values.size());
  const std::int64_t blocks = (count + kSumBlock - 1) / kSumBlock;
  double one = 0;
  double* sums = &one;
  if (const std::size_t bytes = sum_of_squares_workspace(count); bytes > 0) {
    sums = reinterpret_cast<double*>(ctx.workspace(bytes));
  }
  parallel_range(ctx, blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t first = block * kSumBlock;
      sums[block] =
          ctx.kernels().sum_of_squares(values.data() + first, std::min(kSumBlock, count - first));
    }
  });
  *sum = 0;
  for (std::int64_t block = 0; block < blocks; ++block) *sum += sums[block];
}

}  // namespace sluice::cpu
