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

// sums[block] = body(first, count) of each block of kSumBlock elements.
template <typename Body>
void write_block_sums(double* sums, ComputeContext& ctx, std::int64_t elements, const Body& body) {
  parallel_range(ctx, sum_blocks(elements), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t first = block * kSumBlock;
      sums[block] = body(first, std::min(kSumBlock, elements - first));
    }
  });
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
  const std::int64_t elements = outputs.elements();
  auto* const sums = reinterpret_cast<double*>(ctx.workspace(block_sum_bytes(elements)));
  write_block_sums(sums, ctx, elements, [&](std::int64_t first, std::int64_t count) {
    return kernels_of(ctx).squared_error(outputs.as<float>() + first, targets.as<float>() + first,
                                         factor, gradient, count);
  });
  *sum = sum_in_order(sums, sum_blocks(elements));
}

void sums_of_squares(ComputeContext& ctx, std::span<const std::span<const float>> vectors,
                     double* sums) {
  for (const std::span<const float> values : vectors) {
    write_block_sums(sums, ctx, std::ssize(values), [&](std::int64_t first, std::int64_t count) {
      return kernels_of(ctx).sum_of_squares(values.data() + first, count);
    });
    sums += sum_blocks(std::ssize(values));
  }
}

}  // namespace sluice::cpu
