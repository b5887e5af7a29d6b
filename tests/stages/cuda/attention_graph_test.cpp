// Whether cuDNN takes attention's graphs, asked without a GPU: the library plans for devices that
// are only described. Its kernels are compiled by way of the driver's library; the toolkit's stub
// of it is enough for the question.
#include <dlfcn.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "stages/cuda/attention_cudnn.hpp"

namespace sluice::cuda {
namespace {

struct DescribedDevice {
  const char* name;
  int capability;  // 100 * major + 10 * minor
  int multiprocessors;
  int shared_memory;  // most bytes per block
};
constexpr DescribedDevice kDevices[] = {{"NVIDIA A100", 800, 108, 166912},
                                        {"NVIDIA H200", 900, 132, 232448},
                                        {"NVIDIA B200", 1000, 148, 232448}};

std::string json_of(const DescribedDevice& device) {
  return fmt::format(
      R"({{"deviceName": "{}", "deviceVer": {}, "driverVer": 13000, "cudaDeviceId": 0,
"multiProcessorCount": {}, "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": {},
"reservedSharedMemoryPerBlock": 1024, "maxGridSize": [2147483647, 65535, 65535],
"maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536, "maxRegistersPerSM": 65536,
"maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "warpSize": 32,
"pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1, "smClockRateKHz": 1980000,
"memClockRateKHz": 3201000, "l2CacheSize": 62914560, "totalGlobalMem": 150754820096}})",
      device.name, device.capability, device.multiprocessors, device.shared_memory);
}

class CudnnAttentionGraphTest : public testing::Test {
 protected:
  void SetUp() override {
    if (cudnnGetVersion() < 90800) GTEST_SKIP() << "cuDNN before 9.8 describes no devices";
    if (dlopen("libcuda.so.1", RTLD_NOW) == nullptr) GTEST_SKIP() << "no driver, nor its stub";
  }
  static std::size_t engines(const AttentionShape& shape, const DescribedDevice& device,
                             bool backward) {
    const CudnnDescriptor described = describe_device(json_of(device));
    CudnnGraph graph;
    if (backward) {
      describe_attention_backward(shape, graph);
    } else {
      describe_attention_forward(shape, graph);
    }
    return graph.candidates({.described = &described}).size();
  }
};

TEST_F(CudnnAttentionGraphTest, TakesCausalGroupedQueryShapesOnEveryDevice) {
  const AttentionShape shapes[] = {
      {.samples = 64, .sequence = 1024, .heads = 12, .kv_heads = 12, .head_dim = 64},
      {.samples = 16, .sequence = 1024, .heads = 25, .kv_heads = 25, .head_dim = 64},
      {.samples = 2, .sequence = 4096, .heads = 32, .kv_heads = 8, .head_dim = 128},
      {.samples = 3, .sequence = 77, .heads = 4, .kv_heads = 1, .head_dim = 32}};
  for (const DescribedDevice& device : kDevices) {
    for (const AttentionShape& shape : shapes) {
      const std::string what =
          fmt::format("{}: {} x {}, {} heads of {} over {}", device.name, shape.samples,
                      shape.sequence, shape.heads, shape.head_dim, shape.kv_heads);
      EXPECT_GT(engines(shape, device, false), 0U) << what << ", forward";
      EXPECT_GT(engines(shape, device, true), 0U) << what << ", backward";
    }
  }
}

TEST_F(CudnnAttentionGraphTest, RefusesHeadsThatAreTooWide) {
  const AttentionShape shape = {
      .samples = 1, .sequence = 128, .heads = 1, .kv_heads = 1, .head_dim = 512};
  EXPECT_EQ(engines(shape, kDevices[1], true), 0U);
}

}  // namespace
}  // namespace sluice::cuda
