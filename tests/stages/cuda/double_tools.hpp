// What the comparisons of a GPU's operators with double precision share.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <utility>
#include <vector>

#include "tests/stages/cuda/gpu_tools.hpp"

namespace sluice {

inline constexpr DType kTypes[] = {DType::kF32, DType::kBf16};
// Of operands, of the residual stream.
inline constexpr std::pair<DType, DType> kStreams[] = {
    {DType::kF32, DType::kF32}, {DType::kBf16, DType::kF32}, {DType::kBf16, DType::kBf16}};

// Whether shapes of GPT-2 124M are wanted: they take the host a while, and the emulation longer.
inline bool real_shapes() { return std::getenv("SLUICE_REAL_SHAPES") != nullptr; }

// What a result may differ from double precision by: sums in fp32, results of the type.
inline double allowed(DType dtype) { return dtype == DType::kBf16 ? 6e-3 : 2e-6; }
// The same for what is computed from a few numbers in fp32 and rounded once.
inline double allowed_once(DType dtype) { return dtype == DType::kBf16 ? 0x1.01p-8 : 1e-6; }

// The largest difference relative to the largest number; infinite where a value is not a number.
inline double largest_error(const Values& actual, const Values& expected) {
  if (actual.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double difference = 0, size = 1e-30;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double each = std::abs(actual[i] - expected[i]);
    difference =
        std::isnan(each) ? std::numeric_limits<double>::infinity() : std::max(difference, each);
    if (std::isinf(difference)) break;
    size = std::max(size, std::abs(expected[i]));
  }
  return difference / size;
}

class CudaDoubleTest : public GpuTest {
 protected:
  void expect_close(const OnGpu& actual, const Values& expected, double most, const char* what) {
    EXPECT_LE(relative_error(actual.values(gpu()), expected), most) << what;
  }
  // No number is farther from its own than `most` of the largest.
  void expect_within(const OnGpu& actual, const Values& expected, double most, const char* what) {
    EXPECT_LE(largest_error(actual.values(gpu()), expected), most) << what;
  }
  void expect_equal(const OnGpu& actual, const Values& expected, const char* what) {
    EXPECT_EQ(largest_error(actual.values(gpu()), expected), 0) << what;
  }
};

inline Values zeros(std::int64_t count) { return Values(index_of(count)); }

}  // namespace sluice
