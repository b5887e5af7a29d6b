// Reads golden.json, which golden.py makes with PyTorch.
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
#include <vector>

#include <sluice/tensor.hpp>

namespace sluice::testing {

[[nodiscard]] inline nlohmann::json read_golden() {
  std::ifstream file(SLUICE_GOLDEN_FILE);
  return nlohmann::json::parse(file);
}

// The file's tensor as one of `type`.
[[nodiscard]] inline HostTensor golden_tensor(const nlohmann::json& from,
                                              DType type = DType::kF32) {
  const auto dims = from.at("shape").get<std::vector<std::int64_t>>();
  HostTensor made{{type, Shape(std::span(dims))}, {}};
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

// max |a - b| <= tolerance max |b| for the file's numbers b.
inline void expect_golden(const Tensor& a, const nlohmann::json& golden, double tolerance,
                          const std::string& what) {
  HostTensor expected = golden_tensor(golden);
  ASSERT_EQ(a.spec, expected.spec) << what;
  double off = 0, most = 0;
  for (std::int64_t i = 0; i < a.elements(); ++i) {
    const auto b = static_cast<double>(expected.tensor().at(i));
    const double difference = std::abs(static_cast<double>(a.at(i)) - b);
    off = difference <= off ? off : difference;  // NaN stays
    most = std::max(most, std::abs(b));
  }
  EXPECT_LE(off, tolerance * most) << what;
}

// Every case of the file has a counterpart here, and the other way round.
template <typename Cases>
void expect_same_names(const nlohmann::json& golden, const Cases& cases) {
  std::set<std::string> in_file, here;
  for (const auto& [name, value] : golden.items()) in_file.insert(name);
  for (const auto& [name, value] : cases) here.insert(name);
  EXPECT_EQ(here, in_file);
}

inline constexpr double kOutputs = 1e-5, kGradients = 1e-4, kLosses = 1e-4;

}  // namespace sluice::testing
