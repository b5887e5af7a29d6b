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

}  // namespace sluice::cpu
