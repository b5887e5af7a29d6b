// Tools of the tests that run operators on a GPU and on the CPU and compare.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>

#include "tests/gpus/required_gpus.hpp"
#include "tests/stages/operators/operator_tools.hpp"

namespace sluice {

inline constexpr Device kGpu = {DeviceKind::kCuda, 0};

// A copy of an operand in the GPU's memory, `offset` bytes from the start of a buffer, with the
// guard bytes after it.
class OnGpu {
 public:
  explicit OnGpu(const Operand& host, std::size_t offset = 0)
      : buffer_(kGpu, host.buffer.size() + offset),
        tensor_{buffer_.data() + offset, host.tensor.spec} {
    copy_now(kGpu, tensor_.data, host.buffer.data(), host.buffer.size());
  }
  [[nodiscard]] const Tensor& tensor() const { return tensor_; }
  [[nodiscard]] void* data() const { return tensor_.data; }
  // What it holds once everything on the stream is done; checks the guard bytes.
  [[nodiscard]] Operand fetch(ComputeContext& ctx) const {
    ctx.stream().synchronize();
    Operand host(tensor_.spec);
    copy_now(kGpu, host.buffer.data(), tensor_.data, host.buffer.size());
    EXPECT_TRUE(host.end_untouched()) << to_string(tensor_.spec);
    return host;
  }
  [[nodiscard]] Values values(ComputeContext& ctx) const { return fetch(ctx).values(); }

 private:
  Buffer buffer_;
  Tensor tensor_;
};

// |actual - expected| / |expected|, Euclidean; infinite where a value is not a number.
inline double relative_error(const Values& actual, const Values& expected) {
  double difference = 0, size = 1e-30;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  const double error = std::sqrt(difference / size);
  return std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
}

// What a GPU's operator may differ from the CPU's by, relative to the norm of the result.
inline double gpu_tolerance(DType dtype) { return dtype == DType::kBf16 ? 1e-2 : 1e-5; }

// A context of the first GPU and one of the CPU; skips where there is no GPU.
class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    SLUICE_NEED_A_GPU();
    gpu_ = std::make_unique<ComputeContext>(kGpu, 1);
    cpu_ = std::make_unique<ComputeContext>(Device{}, 1);
  }
  [[nodiscard]] ComputeContext& gpu() { return *gpu_; }
  [[nodiscard]] ComputeContext& cpu() { return *cpu_; }

 private:
  std::unique_ptr<ComputeContext> gpu_, cpu_;
};

}  // namespace sluice
