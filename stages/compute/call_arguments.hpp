// The operators' parameters as their element-wise kernels take them, the partial sums of losses and
// of sums of squares, and sizes that do not wrap, for every backend. Internal to stages/.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include <sluice/compute.hpp>
#include <sluice/tensor.hpp>

#include "comm/base/byte_sums.hpp"
#include "stages/compute/internal_operators.hpp"
#include "stages/tensor/kernel_arguments.hpp"

namespace sluice {

// For elements from dropout.first_element + offset on. An element is kept where
// to_unit(word) >= probability.
[[nodiscard]] inline DropoutArguments dropout_arguments(const Dropout& dropout,
                                                        std::int64_t offset) {
  const std::array<std::uint32_t, 2> key = philox_key(dropout.key);
  const double threshold = std::ceil(static_cast<double>(dropout.probability) * 0x1.0p24);
  return {{key[0], key[1]},
          static_cast<std::uint32_t>(threshold),
          1.0F / (1.0F - dropout.probability),
          dropout.first_element + static_cast<std::uint64_t>(offset),
          dropout.step_on_device,
          dropout.key.seed,
          dropout.key.site};
}

// decay: whether the step's weight decay applies.
[[nodiscard]] inline AdamWArguments adamw_arguments(const AdamWStep& step, bool decay) {
  return {step.learning_rate,
          step.beta1,
          step.beta2,
          step.epsilon,
          decay && !step.coupled ? step.weight_decay : 0.0F,
          1.0F / step.correction1,
          1.0F / step.correction2,
          step.grad_scale,
          decay && step.coupled ? step.weight_decay : 0.0F};
}
// From element `begin` of the run on.
[[nodiscard]] inline AdamWRange adamw_range(const AdamWStep& step, const UpdateRun& run,
                                            std::int64_t begin) {
  const std::array<std::uint32_t, 2> key = step.moments == DType::kF32
                                               ? std::array<std::uint32_t, 2>()
                                               : philox_key({step.seed, run.site, step.step});
  const auto moment = [&](void* of) {
    return static_cast<std::byte*>(of) + static_cast<std::size_t>(begin) * size_of(step.moments);
  };
  return {run.value + begin,
          run.grad + begin,
          moment(run.first),
          moment(run.second),
          run.bf16_copy == nullptr ? nullptr : run.bf16_copy + begin,
          {key[0], key[1]},
          run.element + static_cast<std::uint64_t>(begin)};
}
[[nodiscard]] inline SgdArguments sgd_arguments(const SgdStep& step, bool decay) {
  return {step.learning_rate, step.momentum, decay ? step.weight_decay : 0.0F, step.grad_scale,
          step.nesterov};
}

// Elements of one partial sum over a block. The results' bits depend on it.
inline constexpr std::int64_t kSumBlock = 16384;

// Blocks of `elements`.
[[nodiscard]] constexpr std::int64_t sum_blocks(std::int64_t elements) {
  return (elements + kSumBlock - 1) / kSumBlock;
}
// Bytes of one double per block of `elements`, or per row.
[[nodiscard]] constexpr std::size_t block_sum_bytes(std::int64_t elements) {
  return static_cast<std::size_t>(sum_blocks(elements)) * sizeof(double);
}
[[nodiscard]] constexpr std::size_t row_sum_bytes(std::int64_t rows) {
  return static_cast<std::size_t>(rows) * sizeof(double);
}

// Of an array with these dimensions; kTooManyBytes where no memory has as many.
[[nodiscard]] inline std::size_t bytes_of_all(std::size_t each,
                                              std::initializer_list<std::int64_t> dims) {
  for (const std::int64_t dim : dims) each = multiply_bytes(each, static_cast<std::size_t>(dim));
  return each;
}

}  // namespace sluice
