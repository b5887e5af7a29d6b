// Gradients against finite differences, and the numbers to check them at. Internal to stages/.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include <sluice/layers.hpp>
#include <sluice/tensor.hpp>

namespace sluice::nn {

// A function of tensors that are changed in place, in double precision.
struct SummedOutputs {
  double value = 0;
  double noise = 0;  // how far rounding to f32 may move `value`
};

// Compares `gradient`, of the function `at` with respect to the numbers of `point`, with
// differences of `at` around them, where `options` says. Where a function has a kink, any slope
// between those of its sides counts. Leaves `point` as it was. Throws Error(kUsage); `what` is
// "backward_input: dx".
void compare_gradient(const std::string& what, const Tensor& point, std::span<const float> gradient,
                      const std::function<SummedOutputs()>& at, const GradientCheck& options);

// f32: numbers of [-low, low) that are far from each other and from 0, in a random order. Integers:
// 0 and 1 at random. Throws Error(kUsage) for other types.
void fill_point(const Tensor& tensor, float low, std::uint64_t seed);

}  // namespace sluice::nn
