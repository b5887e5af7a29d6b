#include "stages/gradient_check/finite_differences.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "comm/base/throw_error.hpp"
#include "stages/tensor/unwritten.hpp"

namespace sluice::nn {
namespace {

// The slopes on both sides of a number, and how far rounding may move them.
struct Slopes {
  double left = 0, right = 0, noise = 0;

  [[nodiscard]] double mean() const { return (left + right) / 2; }
  [[nodiscard]] bool allow(double gradient, double tolerance) const {
    const double slack = tolerance + noise;
    return gradient >= std::min(left, right) - slack && gradient <= std::max(left, right) + slack;
  }
};

Slopes slopes_at(float& number, double step, const std::function<SummedOutputs()>& at) {
  const float middle = number;
  const auto moved = [&](double by) {
    number = static_cast<float>(static_cast<double>(middle) + by);
    const double moved_by = static_cast<double>(number) - static_cast<double>(middle);
    return std::pair(moved_by, at());
  };
  const auto [up, above] = moved(step);
  const auto [down, below] = moved(-step);
  number = middle;
  const SummedOutputs here = at();
  return {.left = (below.value - here.value) / down,
          .right = (above.value - here.value) / up,
          .noise = (above.noise + below.noise + here.noise) / (2 * step)};
}

}  // namespace

void compare_gradient(const std::string& what, const Tensor& point, std::span<const float> gradient,
                      const std::function<SummedOutputs()>& at, const GradientCheck& options) {
  constexpr double kStep = 1e-2;
  const std::int64_t all = point.elements();
  const std::int64_t wanted =
      options.numbers > 0 ? std::min<std::int64_t>(options.numbers, all) : all;
  struct Found {
    std::int64_t index;
    Slopes slopes;
  };
  std::vector<Found> found;
  double largest = 0;
  for (std::int64_t k = 0; k < wanted; ++k) {
    const std::int64_t index = k * all / wanted;
    float& number = point.at(index);
    const double size = std::max(1.0, std::abs(static_cast<double>(number)));
    found.push_back({index, slopes_at(number, kStep * size, at)});
    largest = std::max(largest, std::abs(found.back().slopes.mean()));
  }
  const bool nothing = std::ranges::all_of(gradient, [](float g) { return g == 0; });
  for (const Found& each : found) {
    const auto mine = static_cast<double>(gradient[static_cast<std::size_t>(each.index)]);
    const double tolerance = options.tolerance * largest;
    if (each.slopes.allow(mine, tolerance)) continue;
    // Nearer: kinks on both sides, or a strong curvature.
    float& number = point.at(each.index);
    const Slopes near = slopes_at(number, kStep / 8, at);
    if (near.allow(mine, tolerance)) continue;
    if (nothing) {
      throw_usage("{} is 0 everywhere; finite differences give {:.6g} at {}", what,
                  each.slopes.mean(), place_of(point.shape(), each.index));
    }
    throw_usage("{} is {:.6g} at {}; finite differences give {:.6g}", what, mine,
                place_of(point.shape(), each.index), each.slopes.mean());
  }
}

void fill_point(const Tensor& tensor, float low, std::uint64_t seed) {
  const std::int64_t count = tensor.elements();
  const RandomKey key{.seed = seed};
  const auto word = [&](std::int64_t i) {
    return philox(key, 0, static_cast<std::uint64_t>(i))[0];
  };
  switch (tensor.spec.dtype) {
    case DType::kF32: {
      std::vector<std::pair<std::uint32_t, std::int64_t>> order;
      for (std::int64_t i = 0; i < count; ++i) order.emplace_back(word(i), i);
      std::sort(order.begin(), order.end());
      for (std::int64_t i = 0; i < count; ++i) {
        const auto place = static_cast<float>(order[static_cast<std::size_t>(i)].second);
        tensor.at(i) = low * (2 * (place + 0.25F) / static_cast<float>(count) - 1);
      }
      return;
    }
    case DType::kI32:
      for (std::int64_t i = 0; i < count; ++i) {
        tensor.as<std::int32_t>()[i] = static_cast<std::int32_t>(word(i) & 1U);
      }
      return;
    case DType::kI64:
      for (std::int64_t i = 0; i < count; ++i) tensor.as<std::int64_t>()[i] = word(i) & 1U;
      return;
    default:
      throw_usage(
          "no numbers of type {} are known for it; give GradientCheck a function that "
          "fills them",
          name_of(tensor.spec.dtype));
  }
}

}  // namespace sluice::nn
