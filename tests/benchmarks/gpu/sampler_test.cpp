#include "tests/benchmarks/gpu/sampler.hpp"

#include <gtest/gtest.h>

#include <thread>

namespace sluice::benchmarks {
namespace {

TEST(GpuSamplerTest, ReadsWhileSomethingIsMeasured) {
  GpuSampler sampler("0000:01:00.0", SLUICE_FAKE_NVML);
  EXPECT_EQ(sampler.figures().samples, 0);
  {
    const GpuSampler::Measuring measuring(sampler);
    while (sampler.figures().samples < 2) std::this_thread::yield();
  }
  const GpuSampler::Figures figures = sampler.figures();
  EXPECT_DOUBLE_EQ(figures.watts, 650.5);
  EXPECT_DOUBLE_EQ(figures.limit_watts, 700);
  EXPECT_DOUBLE_EQ(figures.sm_mhz, 1545);
  EXPECT_EQ(figures.held_back, "power limit, temperature");
}

TEST(GpuSamplerTest, SaysNothingWhereNothingAnswers) {
  GpuSampler sampler("", SLUICE_FAKE_NVML);
  const GpuSampler::Measuring measuring(sampler);
  const GpuSampler::Figures figures = sampler.figures();
  EXPECT_EQ(figures.samples, 0);
  EXPECT_EQ(figures.held_back, "");
}

}  // namespace
}  // namespace sluice::benchmarks
