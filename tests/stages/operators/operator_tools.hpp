// Tools of the operator tests: operands of either type, references in double, and contexts for
// every kernel set that this machine runs.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/device.hpp>
#include <sluice/error.hpp>
#include <sluice/operators.hpp>
#include <sluice/tensor.hpp>

namespace sluice {

using Values = std::vector<double>;

inline std::size_t index_of(std::int64_t i) { return static_cast<std::size_t>(i); }

// A tensor that owns its memory.
struct Operand {
  Tensor tensor;
  Buffer buffer;

  explicit Operand(const TensorSpec& spec)
      : tensor{nullptr, spec}, buffer(Device{}, spec.bytes() + 64) {
    tensor.data = buffer.data();
    std::memset(buffer.data(), 0xFF, buffer.size());  // NaN in every floating type
  }
  Operand(DType dtype, const Shape& shape) : Operand(TensorSpec{dtype, shape}) {}
  Operand(DType dtype, const Shape& shape, const Values& values) : Operand(dtype, shape) {
    for (std::size_t i = 0; i < values.size(); ++i) set(i, values[i]);
  }
  void set(std::size_t i, double value) {
    if (tensor.spec.dtype == DType::kBf16) {
      tensor.as<Bf16>()[i] = to_bf16(static_cast<float>(value));
    } else if (tensor.spec.dtype == DType::kI32) {
      tensor.as<std::int32_t>()[i] = static_cast<std::int32_t>(value);
    } else {
      tensor.as<float>()[i] = static_cast<float>(value);
    }
  }
  [[nodiscard]] Values values() const {
    Values out(index_of(tensor.elements()));
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (tensor.spec.dtype == DType::kBf16) {
        out[i] = static_cast<double>(to_float(tensor.as<Bf16>()[i]));
      } else {
        out[i] = static_cast<double>(tensor.as<float>()[i]);
      }
    }
    return out;
  }
  // The memory right after the tensor is unchanged.
  [[nodiscard]] bool end_untouched() const {
    const std::byte* end = buffer.data() + tensor.spec.bytes();
    for (const std::byte* at = end; at < buffer.data() + buffer.size(); ++at) {
      if (*at != std::byte{0xFF}) return false;
    }
    return true;
  }
};

// Normal numbers that the type can hold exactly.
inline Values random_values(std::int64_t count, unsigned seed, DType dtype, double deviation = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal(0, deviation);
  Values values(index_of(count));
  for (double& value : values) {
    const auto rounded = static_cast<float>(normal(generator));
    value = static_cast<double>(dtype == DType::kBf16 ? to_float(to_bf16(rounded)) : rounded);
  }
  return values;
}

inline Operand random_operand(DType dtype, const Shape& shape, unsigned seed,
                              double deviation = 1) {
  return {dtype, shape, random_values(shape.elements(), seed, dtype, deviation)};
}

// Largest allowed difference relative to the largest magnitude.
inline double tolerance(DType dtype) { return dtype == DType::kBf16 ? 1e-2 : 4e-6; }

inline void expect_close(const Values& actual, const Values& expected, double tolerance,
                         const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  double largest = 1e-3;
  for (const double value : expected) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_LE(std::abs(actual[i] - expected[i]), tolerance * largest)
        << what << " at " << i << ": " << actual[i] << ", expected " << expected[i];
  }
}

inline double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// Central differences in double.
inline Values numeric_gradient(const std::function<double(const Values&)>& f, Values x) {
  Values gradient(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double middle = x[i], step = 1e-5;
    x[i] = middle + step;
    const double high = f(x);
    x[i] = middle - step;
    gradient[i] = (high - f(x)) / (2 * step);
    x[i] = middle;
  }
  return gradient;
}

inline Values sum_of(const Values& a, const Values& b) {
  Values sum = a;
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += b[i];
  return sum;
}

// Kernel set, threads, type of activations.
using OperatorCase = std::tuple<const char*, int, DType>;

inline std::string case_name(const testing::TestParamInfo<OperatorCase>& info) {
  return std::string(std::get<0>(info.param)) + "_threads" +
         std::to_string(std::get<1>(info.param)) + "_" + name_of(std::get<2>(info.param));
}

// Makes a context that runs the wanted kernel set, or skips where the machine cannot.
class OperatorTest : public testing::TestWithParam<OperatorCase> {
 protected:
  void SetUp() override {
    const char* before = std::getenv("SLUICE_KERNELS");
    const std::string kept = before == nullptr ? "" : before;
    ::setenv("SLUICE_KERNELS", std::get<0>(GetParam()), 1);
    try {
      context_ = std::make_unique<ComputeContext>(Device{}, std::get<1>(GetParam()));
    } catch (const Error& error) {
      ::setenv("SLUICE_KERNELS", kept.c_str(), 1);
      GTEST_SKIP() << error.what();
    }
    ::setenv("SLUICE_KERNELS", kept.c_str(), 1);
  }
  [[nodiscard]] ComputeContext& ctx() { return *context_; }
  [[nodiscard]] static DType dtype() { return std::get<2>(GetParam()); }

 private:
  std::unique_ptr<ComputeContext> context_;
};

#define SLUICE_OPERATOR_CASES(suite)                                                               \
  INSTANTIATE_TEST_SUITE_P(                                                                        \
      Kernels, suite,                                                                              \
      ::testing::Combine(::testing::Values("baseline", "avx2", "avx512"), ::testing::Values(1, 2), \
                         ::testing::Values(DType::kF32, DType::kBf16)),                            \
      case_name)

}  // namespace sluice
