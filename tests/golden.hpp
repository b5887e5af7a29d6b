// Reads the files golden.json, which scripts beside them make with PyTorch and transformers.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/tensor.hpp>

namespace sluice::testing {

[[nodiscard]] inline nlohmann::json read_golden(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

[[nodiscard]] inline Shape golden_shape(const nlohmann::json& from) {
  const auto dims = from.get<std::vector<std::int64_t>>();
  return Shape(std::span(dims));
}

// The file's tensor as one of `type`.
[[nodiscard]] inline HostTensor golden_tensor(const nlohmann::json& from,
                                              DType type = DType::kF32) {
  HostTensor made{{type, golden_shape(from.at("shape"))}, {}};
  made.bytes.resize(made.spec.bytes());
  const auto fill = [&](auto number) {
    const auto values = from.at("values").get<std::vector<decltype(number)>>();
    ASSERT_EQ(values.size() * sizeof(number), made.bytes.size());
    std::memcpy(made.bytes.data(), values.data(), made.bytes.size());
  };
  if (type == DType::kF32) fill(float{});
  if (type == DType::kI32) fill(std::int32_t{});
  if (type == DType::kI64) fill(std::int64_t{});
  return made;
}

// max |a - b| <= tolerance max |b|
void expect_near(const auto& a, const auto& b, double tolerance, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  double off = 0, most = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const auto wanted = static_cast<double>(b[i]);
    const double difference = std::abs(static_cast<double>(a[i]) - wanted);
    off = difference <= off ? off : difference;  // NaN stays
    most = std::max(most, std::abs(wanted));
  }
  EXPECT_LE(off, tolerance * most) << what << ": off by " << off << " of " << most;
}

// An f32 tensor against the file's.
inline void expect_golden(const Tensor& a, const nlohmann::json& golden, double tolerance,
                          const std::string& what) {
  ASSERT_EQ(a.spec, (TensorSpec{DType::kF32, golden_shape(golden.at("shape"))})) << what;
  expect_near(a.floats(), golden.at("values").get<std::vector<float>>(), tolerance, what);
}

// Every case of the file has a counterpart here, and the other way round.
template <typename Cases>
void expect_same_names(const nlohmann::json& golden, const Cases& cases) {
  std::set<std::string> in_file, here;
  for (const auto& [name, value] : golden.items()) in_file.insert(name);
  for (const auto& [name, value] : cases) here.insert(name);
  EXPECT_EQ(here, in_file);
}

// Values of a parameter by its name: values() of transformer/golden.py. A gain is near 1, other
// values lie in [-0.5, 0.5).
inline void fill_by_name(std::string_view name, std::span<float> values) {
  const bool gain = name.find("norm") != std::string_view::npos && name.ends_with(".weight");
  std::uint32_t seed = 2166136261U;
  for (const char letter : name) seed = (seed ^ static_cast<unsigned char>(letter)) * 16777619U;
  std::uint32_t i = 0;
  for (float& value : values) {
    std::uint32_t x = i++ * 2654435761U + seed;
    x ^= x >> 15;
    x *= 739982445U;
    x ^= x >> 12;
    const float unit = static_cast<float>(x >> 12) / 0x1p19F - 1;
    value = gain ? 1 + unit / 4 : unit / 2;
  }
}

inline constexpr double kOutputs = 1e-5, kGradients = 1e-4, kLosses = 1e-4;

}  // namespace sluice::testing
