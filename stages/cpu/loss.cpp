// Losses and sums of squares. Partial sums are kept per row or block and added in order, so that
// the result does not depend on the number of threads.
#include <numeric>

#include "stages/compute/call_arguments.hpp"
#include "stages/cpu/cpu_backend.hpp"
#include "stages/cpu/parallel.hpp"

namespace sluice::cpu {

namespace {

double sum_in_order(const double* values, std::int64_t count) {
  return std::accumulate(values, values + count, 0.0);
}

// Of body(first, count) over blocks of kSumBlock elements.
template <typename Body>
double sum_of_blocks(ComputeContext& ctx, std::int64_t elements, const Body& body) {
  if (elements == 0) return 0;
  const std::int64_t blocks = (elements + kSumBlock - 1) / kSumBlock;
  auto* const sums = reinterpret_cast<double*>(ctx.workspace(block_sum_bytes(elements)));
  parallel_range(ctx, blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t first = block * kSumBlock;
      sums[block] = body(first, std::min(kSumBlock, elements - first));
    }
  });
  return sum_in_order(sums, blocks);
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
  const auto factor = static_cast<float>(2 * scale);
  *sum = sum_of_blocks(ctx, outputs.elements(), [&](std::int64_t first, std::int64_t count) {
    return kernels_of(ctx).squared_error(outputs.as<float>() + first, targets.as<float>() + first,
                                         factor, gradient, count);
  });
}

void sums_of_squares(ComputeContext& ctx, std::span<const std::span<const float>> vectors,
                     double* sums) {
  for (const std::span<const float> values : vectors) {
    *sums++ = sum_of_blocks(ctx, std::ssize(values), [&](std::int64_t first, std::int64_t count) {
      return kernels_of(ctx).sum_of_squares(values.data() + first, count);
    });
  }
}

}  // namespace sluice::cpu
