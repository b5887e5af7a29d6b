// Losses. Partial sums are kept per row or block and added in order, so that the result does not
// depend on the number of threads.
#include "stages/compute/call_arguments.hpp"
#include "stages/cpu/cpu_backend.hpp"
#include "stages/cpu/parallel.hpp"

namespace sluice::cpu {

namespace {

double sum_in_order(const double* values, std::int64_t count) {
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += values[i];
  return sum;
}

}  // namespace

void row_cross_entropy(ComputeContext& ctx, const Tensor& logits, const Tensor& targets,
                       StepValue<double> scale, bool gradient, double* losses) {
  const std::int64_t rows = targets.elements(), width = logits.elements() / rows;
  const TypedKernels& kernels = kernels_for(ctx, logits.spec.dtype);
  parallel_range(ctx, rows, 1, [&](std::int64_t begin, std::int64_t end) {
    kernels.cross_entropy(element(logits, begin * width), targets.as<std::int32_t>() + begin,
                          static_cast<float>(scale), gradient, losses + begin, end - begin, width);
  });
}

void sum_of_losses(ComputeContext& /*ctx*/, const double* losses, std::int64_t rows, double* sum) {
  *sum = sum_in_order(losses, rows);
}

void mean_squared_error(ComputeContext& ctx, const Tensor& outputs, const Tensor& targets,
                        StepValue<double> scale, bool gradient, double* sum) {
  const std::int64_t count = outputs.elements();
  const std::int64_t blocks = (count + kSumBlock - 1) / kSumBlock;
  double one = 0;
  double* sums = &one;
  if (const std::size_t bytes = block_sum_bytes(count); bytes > 0) {
    sums = reinterpret_cast<double*>(ctx.workspace(bytes));
  }
  const auto factor = static_cast<float>(2 * scale);
  parallel_range(ctx, blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t first = block * kSumBlock;
      sums[block] =
          kernels_of(ctx).squared_error(outputs.as<float>() + first, targets.as<float>() + first,
                                        factor, gradient, std::min(kSumBlock, count - first));
    }
  });
  *sum = sum_in_order(sums, blocks);
}

}  // namespace sluice::cpu
