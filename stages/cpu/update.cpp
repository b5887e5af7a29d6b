// Optimizer kernels over flat vectors, and the conversion of many tensors.
#include "stages/compute/call_arguments.hpp"
#include "stages/cpu/cpu_backend.hpp"
#include "stages/cpu/parallel.hpp"

namespace sluice::cpu {

void adamw(ComputeContext& ctx, const AdamWStep& step, std::span<const UpdateRun> runs) {
  for (const UpdateRun& run : runs) {
    const AdamWArguments arguments = adamw_arguments(step, run.decay);
    parallel_range(ctx, run.count, kElementGrain, [&](std::int64_t begin, std::int64_t end) {
      const AdamWRange range = adamw_range(step, run, begin);
      kernels_for(ctx, step.moments).adamw(&arguments, &range, end - begin);
    });
  }
}

void sgd(ComputeContext& ctx, const SgdStep& step, std::span<const UpdateRun> runs) {
  for (const UpdateRun& run : runs) {
    const SgdArguments arguments = sgd_arguments(step, run.decay);
    parallel_range(ctx, run.count, kElementGrain, [&](std::int64_t begin, std::int64_t end) {
      float* speed = run.first == nullptr ? nullptr : static_cast<float*>(run.first) + begin;
      kernels_of(ctx).sgd(&arguments, run.value + begin, run.grad + begin, speed, end - begin);
    });
  }
}

void convert_all(ComputeContext& ctx, std::span<const Conversion> conversions) {
  for (const auto& [from, to] : conversions) cpu::convert(ctx, from, to);
}

void sums_of_squares(ComputeContext& ctx, std::span<const std::span<const float>> vectors,
                     double* sums) {
  for (std::size_t i = 0; i < vectors.size(); ++i) {
    const std::span<const float> values = vectors[i];
    const auto count = static_cast<std::int64_t>(values.size());
    auto* partial = reinterpret_cast<double*>(ctx.workspace(block_sum_bytes(count)));
    const std::int64_t blocks = (count + kSumBlock - 1) / kSumBlock;
    parallel_range(ctx, blocks, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t block = begin; block < end; ++block) {
        const std::int64_t first = block * kSumBlock;
        partial[block] = kernels_of(ctx).sum_of_squares(values.data() + first,
                                                        std::min(kSumBlock, count - first));
      }
    });
    sums[i] = 0;
    for (std::int64_t block = 0; block < blocks; ++block) sums[i] += partial[block];
  }
}

}  // namespace sluice::cpu
