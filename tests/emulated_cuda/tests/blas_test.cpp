// Every epilogue of the emulated cublasLtMatmul against loops in double precision.
#include <cublasLt.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/emulated_cuda/on_device.hpp"

namespace sluice::emulated {
namespace {

float rounded(cudaDataType type, float value) {
  if (type == CUDA_R_32F) return value;
  auto bits = std::bit_cast<std::uint32_t>(value);
  bits += 0x7FFFU + (bits >> 16 & 1U);
  return std::bit_cast<float>(bits & 0xFFFF0000U);
}

// Elements of either type on the device.
class Elements {
 public:
  Elements(cudaDataType type, const std::vector<float>& values)
      : type_(type), count_(values.size()), data_(bytes_of(type, values)) {}

  [[nodiscard]] void* get() const { return data_.get(); }
  [[nodiscard]] std::vector<float> values() const {
    const std::vector<std::uint8_t> bytes = data_.values();
    std::vector<float> values(count_);
    for (std::size_t i = 0; i < count_; ++i) {
      std::uint32_t bits = 0;
      const std::size_t size = bytes.size() / count_;
      for (std::size_t b = 0; b < size; ++b) bits |= std::uint32_t{bytes[i * size + b]} << 8 * b;
      values[i] = std::bit_cast<float>(type_ == CUDA_R_32F ? bits : bits << 16);
    }
    return values;
  }

 private:
  static std::vector<std::uint8_t> bytes_of(cudaDataType type, const std::vector<float>& values) {
    std::vector<std::uint8_t> bytes;
    for (const float value : values) {
      const auto bits = std::bit_cast<std::uint32_t>(value);
      for (int b = type == CUDA_R_32F ? 0 : 2; b < 4; ++b) {
        bytes.push_back(static_cast<std::uint8_t>(bits >> 8 * b));
      }
    }
    return bytes;
  }

  cudaDataType type_;
  std::size_t count_;
  OnDevice<std::uint8_t> data_;
};

struct Case {
  cublasLtEpilogue_t epilogue;
  bool transpose_a, transpose_b;
  cudaDataType operands, result;
  float beta;
};

// Column-major; values at row + column * leading.
struct Host {
  std::int64_t rows, columns, leading;
  std::vector<float> values;
  [[nodiscard]] double at(std::int64_t row, std::int64_t column) const {
    return static_cast<double>(values[static_cast<std::size_t>(row + column * leading)]);
  }
};

constexpr std::int64_t kM = 37, kN = 6, kK = 19, kAuxLeading = 40;

class EmulatedMatmulTest : public testing::TestWithParam<Case> {
 protected:
  Host random(std::int64_t rows, std::int64_t columns, std::int64_t leading, cudaDataType type) {
    Host made{rows, columns, leading,
              std::vector<float>(static_cast<std::size_t>(leading * columns))};
    for (float& value : made.values) value = rounded(type, distribution_(generator_));
    return made;
  }

  std::mt19937 generator_{11};
  std::uniform_real_distribution<float> distribution_{-1.5F, 1.5F};
};

double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

double gelu_slope(double x) {
  constexpr double kStep = 1e-5;
  return (gelu(x + kStep) - gelu(x - kStep)) / (2 * kStep);
}

void expect_near(const std::vector<float>& actual, const std::vector<double>& expected,
                 cudaDataType type, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  const double bound = type == CUDA_R_32F ? 2e-5 : 2e-2;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(actual[i]), expected[i], bound * (1 + std::abs(expected[i])))
        << what << " " << i;
  }
}

class Layouts {
 public:
  Layouts(const Case& c, const Host& a, const Host& b, const Host& d) {
    make(&a_, c.operands, a);
    make(&b_, c.operands, b);
    make(&d_, c.result, d);
    EXPECT_EQ(cublasLtMatmulDescCreate(&description, CUBLAS_COMPUTE_32F, CUDA_R_32F),
              CUBLAS_STATUS_SUCCESS);
  }
  Layouts(const Layouts&) = delete;
  Layouts& operator=(const Layouts&) = delete;
  ~Layouts() {
    for (cublasLtMatrixLayout_t layout : {a_, b_, d_}) cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulDescDestroy(description);
  }
  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) {
    EXPECT_EQ(cublasLtMatmulDescSetAttribute(description, attribute, &value, sizeof value),
              CUBLAS_STATUS_SUCCESS);
  }
  cublasLtMatmulDesc_t description = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, d_ = nullptr;

 private:
  static void make(cublasLtMatrixLayout_t* layout, cudaDataType type, const Host& host) {
    EXPECT_EQ(cublasLtMatrixLayoutCreate(layout, type, static_cast<std::uint64_t>(host.rows),
                                         static_cast<std::uint64_t>(host.columns), host.leading),
              CUBLAS_STATUS_SUCCESS);
  }
};

TEST_P(EmulatedMatmulTest, IsWhatLoopsGive) {
  const Case c = GetParam();
  const Host a =
      c.transpose_a ? random(kK, kM, kK + 3, c.operands) : random(kM, kK, kM + 1, c.operands);
  const Host b =
      c.transpose_b ? random(kN, kK, kN, c.operands) : random(kK, kN, kK + 2, c.operands);
  const Host before = random(kM, kN, kM + 5, c.result), aux = random(kM, kN, kAuxLeading, c.result);
  const bool is_bgradb = c.epilogue == CUBLASLT_EPILOGUE_BGRADB;
  const Host bias = random(is_bgradb ? kN : kM, 1, is_bgradb ? kN : kM, c.result);
  const float alpha = 0.5F;

  const Elements device_a(c.operands, a.values), device_b(c.operands, b.values);
  const Elements device_d(c.result, before.values), device_aux(c.result, aux.values);
  const Elements device_bias(c.result, bias.values);
  Layouts layouts(c, a, b, before);
  layouts.set(CUBLASLT_MATMUL_DESC_TRANSA, c.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  layouts.set(CUBLASLT_MATMUL_DESC_TRANSB, c.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  layouts.set(CUBLASLT_MATMUL_DESC_EPILOGUE, c.epilogue);
  layouts.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, device_bias.get());
  layouts.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, device_aux.get());
  layouts.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, kAuxLeading);
  cublasLtHandle_t handle = nullptr;
  ASSERT_EQ(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
  ASSERT_EQ(cublasLtMatmul(handle, layouts.description, &alpha, device_a.get(), layouts.a_,
                           device_b.get(), layouts.b_, &c.beta, device_d.get(), layouts.d_,
                           device_d.get(), layouts.d_, nullptr, nullptr, 0, nullptr),
            CUBLAS_STATUS_SUCCESS);
  cublasLtDestroy(handle);

  const auto op_a = [&](std::int64_t i, std::int64_t p) {
    return c.transpose_a ? a.at(p, i) : a.at(i, p);
  };
  const auto op_b = [&](std::int64_t p, std::int64_t j) {
    return c.transpose_b ? b.at(j, p) : b.at(p, j);
  };
  std::vector<double> d(before.values.begin(), before.values.end());
  std::vector<double> kept(aux.values.begin(), aux.values.end());
  std::vector<double> vector(bias.values.begin(), bias.values.end());
  const int parts = static_cast<int>(c.epilogue);
  const bool gradient_of_bias = c.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD ||
                                c.epilogue == CUBLASLT_EPILOGUE_BGRADA || is_bgradb;
  if (gradient_of_bias) std::fill(vector.begin(), vector.end(), 0.0);
  for (std::int64_t j = 0; j < kN; ++j) {
    for (std::int64_t i = 0; i < kM; ++i) {
      double sum = 0;
      for (std::int64_t p = 0; p < kK; ++p) sum += op_a(i, p) * op_b(p, j);
      double x = 0.5 * sum + static_cast<double>(c.beta) * before.at(i, j);
      const auto row = static_cast<std::size_t>(i);
      const auto in_aux = static_cast<std::size_t>(i + j * kAuxLeading);
      if ((parts & CUBLASLT_EPILOGUE_BIAS) != 0) x += bias.at(i, 0);
      if ((parts & CUBLASLT_EPILOGUE_GELU) != 0) {
        if ((parts & 128) != 0) kept[in_aux] = x;
        x = gelu(x);
      }
      if ((parts & 64) != 0) x *= gelu_slope(aux.at(i, j));
      if (c.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD) vector[row] += x;
      d[static_cast<std::size_t>(i + j * before.leading)] = x;
    }
  }
  for (std::int64_t p = 0; p < kK; ++p) {
    for (std::int64_t i = 0; c.epilogue == CUBLASLT_EPILOGUE_BGRADA && i < kM; ++i) {
      vector[static_cast<std::size_t>(i)] += op_a(i, p);
    }
    for (std::int64_t j = 0; is_bgradb && j < kN; ++j) {
      vector[static_cast<std::size_t>(j)] += op_b(p, j);
    }
  }
  expect_near(device_d.values(), d, c.result, "D");
  expect_near(device_aux.values(), kept, c.result, "aux");
  expect_near(device_bias.values(), vector, c.result, "bias");
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto epilogue :
       {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU,
        CUBLASLT_EPILOGUE_GELU_BIAS, CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        CUBLASLT_EPILOGUE_DGELU, CUBLASLT_EPILOGUE_DGELU_BGRAD, CUBLASLT_EPILOGUE_BGRADA,
        CUBLASLT_EPILOGUE_BGRADB}) {
    all.push_back({epilogue, true, false, CUDA_R_32F, CUDA_R_32F, 0});
    all.push_back({epilogue, false, true, CUDA_R_16BF, CUDA_R_16BF, 1});
  }
  all.push_back({CUBLASLT_EPILOGUE_DEFAULT, false, false, CUDA_R_16BF, CUDA_R_32F, 1});
  all.push_back({CUBLASLT_EPILOGUE_DEFAULT, true, true, CUDA_R_32F, CUDA_R_32F, 0});
  return all;
}

INSTANTIATE_TEST_SUITE_P(, EmulatedMatmulTest, testing::ValuesIn(cases()),
                         [](const auto& parameter) {
                           const Case& c = parameter.param;
                           return "Epilogue" + std::to_string(c.epilogue) +
                                  (c.transpose_a ? "T" : "N") + (c.transpose_b ? "T" : "N") +
                                  (c.operands == CUDA_R_32F ? "F32" : "Bf16") +
                                  (c.result == CUDA_R_32F ? "F32" : "Bf16");
                         });

class EmulatedMatmulRefusalTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(cublasLtCreate(&handle_), CUBLAS_STATUS_SUCCESS); }
  void TearDown() override { cublasLtDestroy(handle_); }

  // Of m x k times k x n, all stored densely.
  cublasStatus_t multiply(const void* a, const void* b, void* d, const cublasLtMatmulAlgo_t* algo,
                          void* workspace, std::size_t workspace_bytes) {
    const float one = 1, zero = 0;
    return cublasLtMatmul(handle_, layouts_.description, &one, a, layouts_.a_, b, layouts_.b_,
                          &zero, d, layouts_.d_, d, layouts_.d_, algo, workspace, workspace_bytes,
                          nullptr);
  }

  cublasLtHandle_t handle_ = nullptr;
  Host a_{8, 8, 8, {}}, b_{8, 8, 8, {}}, d_{8, 8, 8, {}};
  Layouts layouts_{
      {CUBLASLT_EPILOGUE_DEFAULT, false, false, CUDA_R_32F, CUDA_R_32F, 0}, a_, b_, d_};
};

TEST_F(EmulatedMatmulRefusalTest, OperandsHaveToBeInsideMemoryOfTheDevice) {
  const OnDevice<float> whole(std::vector<float>(64)), short_one(63), result(64);
  const std::vector<float> host(64);
  EXPECT_EQ(multiply(whole.get(), whole.get(), result.get(), nullptr, nullptr, 0),
            CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(multiply(short_one.get(), whole.get(), result.get(), nullptr, nullptr, 0),
            CUBLAS_STATUS_EXECUTION_FAILED);
  EXPECT_EQ(multiply(whole.get(), host.data(), result.get(), nullptr, nullptr, 0),
            CUBLAS_STATUS_EXECUTION_FAILED);
}

TEST_F(EmulatedMatmulRefusalTest, AnAlgorithmNeedsItsWorkspaceAndItsAlignment) {
  cublasLtMatmulPreference_t preference = nullptr;
  ASSERT_EQ(cublasLtMatmulPreferenceCreate(&preference), CUBLAS_STATUS_SUCCESS);
  const std::uint64_t bytes = 1 << 20;
  EXPECT_EQ(cublasLtMatmulPreferenceSetAttribute(
                preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes),
            CUBLAS_STATUS_SUCCESS);
  cublasLtMatmulHeuristicResult_t result;
  int found = 0;
  ASSERT_EQ(
      cublasLtMatmulAlgoGetHeuristic(handle_, layouts_.description, layouts_.a_, layouts_.b_,
                                     layouts_.d_, layouts_.d_, preference, 1, &result, &found),
      CUBLAS_STATUS_SUCCESS);
  cublasLtMatmulPreferenceDestroy(preference);
  ASSERT_EQ(found, 1);
  ASSERT_GT(result.workspaceSize, 0U);
  const OnDevice<float> a(std::vector<float>(65)), d(64);
  const OnDevice<char> workspace(bytes);
  EXPECT_EQ(multiply(a.get(), a.get(), d.get(), &result.algo, workspace.get(), bytes),
            CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(multiply(a.get(), a.get(), d.get(), &result.algo, nullptr, 0),
            CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(multiply(a.get() + 1, a.get(), d.get(), &result.algo, workspace.get(), bytes),
            CUBLAS_STATUS_EXECUTION_FAILED);
}

}  // namespace
}  // namespace sluice::emulated
