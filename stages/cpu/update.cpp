// Optimizer kernels over flat vectors.
#include "stages/cpu/parallel.hpp"
#include "stages/operators.hpp"

namespace sluice {

namespace {

constexpr std::int64_t kNormBlock = 16384;  // part of the result's definition, see DESIGN

}  // namespace

void adamw(ComputeContext& ctx, const AdamWStep& step, std::span<float> value,
           std::span<const float> grad, std::span<float> first, std::span<float> second) {
  const AdamWArguments arguments = {step.learning_rate,
                                    step.beta1,
                                    step.beta2,
                                    step.epsilon,
                                    step.weight_decay,
                                    1.0F / step.correction1,
                                    1.0F / step.correction2,
                                    step.grad_scale};
  const auto count = static_cast<std::int64_t>(value.size());
  parallel_range(ctx, count, kElementGrain, [&](std::int64_t begin, std::int64_t end) {
    ctx.kernels().adamw(&arguments, value.data() + begin, grad.data() + begin, first.data() + begin,
                        second.data() + begin, end - begin);
  });
}

void sgd(ComputeContext& ctx, const SgdStep& step, std::span<float> value,
         std::span<const float> grad, std::span<float> velocity) {
  const SgdArguments arguments = {step.learning_rate, step.momentum, step.weight_decay,
                                  step.grad_scale};
  const auto count = static_cast<std::int64_t>(value.size());
  parallel_range(ctx, count, kElementGrain, [&](std::int64_t begin, std::int64_t end) {
    float* speed = velocity.empty() ? nullptr : velocity.data() + begin;
    ctx.kernels().sgd(&arguments, value.data() + begin, grad.data() + begin, speed, end - begin);
  });
}

double sum_of_squares(ComputeContext& ctx, std::span<const float> values) {
  const auto count = static_cast<std::int64_t>(values.size());
  const std::int64_t blocks = (count + kNormBlock - 1) / kNormBlock;
  auto* sums =
      reinterpret_cast<double*>(ctx.workspace(static_cast<std::size_t>(blocks) * sizeof(double)));
  parallel_range(ctx, blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t first = block * kNormBlock;
      sums[block] =
          ctx.kernels().sum_of_squares(values.data() + first, std::min(kNormBlock, count - first));
    }
  });
  double sum = 0;
  for (std::int64_t block = 0; block < blocks; ++block) sum += sums[block];
  return sum;
}

}  // namespace sluice
