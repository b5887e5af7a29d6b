// Virtual memory management of the emulated driver.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tests/emulated_cuda/control.hpp"
#include "tests/emulated_cuda/memory.hpp"

namespace sluice::emulated {
namespace {

constexpr std::size_t kUnit = std::size_t{2} << 20;
constexpr CUmemAccessDesc kOnDevice0 = {{CU_MEM_LOCATION_TYPE_DEVICE, 0},
                                        CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

CUmemAllocationProp on_device_0() {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = kOnDevice0.location;
  return properties;
}

// One allocation at two addresses, the second right after the first.
class EmulatedVirtualMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const CUmemAllocationProp properties = on_device_0();
    ASSERT_EQ(reserve_range(&begin_, 2 * kUnit, kUnit, 0, 0), CUDA_SUCCESS);
    ASSERT_EQ(create_memory(&handle_, kUnit, &properties, 0), CUDA_SUCCESS);
    ASSERT_EQ(map_memory(begin_, kUnit, 0, handle_, 0), CUDA_SUCCESS);
    ASSERT_EQ(map_memory(begin_ + kUnit, kUnit, 0, handle_, 0), CUDA_SUCCESS);
    ASSERT_EQ(release_memory(handle_), CUDA_SUCCESS);
  }
  void TearDown() override {
    EXPECT_EQ(unmap_memory(begin_, 2 * kUnit), CUDA_SUCCESS);
    EXPECT_EQ(free_range(begin_, 2 * kUnit), CUDA_SUCCESS);
    EXPECT_EQ(virtual_memory(), VirtualMemory());
    EXPECT_EQ(free_memory(0), device_memory());
  }
  [[nodiscard]] char* at(std::size_t offset) const {
    return reinterpret_cast<char*>(begin_ + offset);  // NOLINT(performance-no-int-to-ptr)
  }

  CUdeviceptr begin_ = 0;
  CUmemGenericAllocationHandle handle_ = 0;
};

TEST_F(EmulatedVirtualMemoryTest, TwoMappingsShareBytesAndOneCopyCrossesThem) {
  ASSERT_EQ(set_memory_access(begin_, 2 * kUnit, &kOnDevice0, 1), CUDA_SUCCESS);
  EXPECT_EQ(free_memory(0), device_memory() - kUnit);
  std::vector<std::uint8_t> bytes(2 * kUnit);
  EXPECT_EQ(cudaMemcpy(bytes.data(), at(0), bytes.size(), cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(bytes, std::vector<std::uint8_t>(2 * kUnit, 0xFF)) << "fresh";
  EXPECT_EQ(cudaMemset(at(kUnit - 1), 7, 2), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(bytes.data(), at(0), bytes.size(), cudaMemcpyDeviceToHost), cudaSuccess);
  for (const std::size_t first : {std::size_t{0}, kUnit}) {
    EXPECT_EQ(bytes[first], 7);
    EXPECT_EQ(bytes[first + 1], 0xFF);
    EXPECT_EQ(bytes[first + kUnit - 1], 7);
  }
  EXPECT_EQ(cudaMemset(at(kUnit), 7, kUnit + 1), cudaErrorInvalidValue) << "beyond the end";
  EXPECT_EQ(cudaFree(at(0)), cudaErrorInvalidValue) << "not cudaMalloc's";
  static_cast<void>(cudaGetLastError());
}

TEST_F(EmulatedVirtualMemoryTest, WhatIsNotOpenIsNoMemoryYet) {
  EXPECT_EQ(cudaMemset(at(0), 0, 1), cudaErrorInvalidValue);
  static_cast<void>(cudaGetLastError());
}

TEST_F(EmulatedVirtualMemoryTest, RefusesWhatADriverRefuses) {
  const CUmemAllocationProp properties = on_device_0();
  CUmemGenericAllocationHandle other = 0;
  EXPECT_EQ(create_memory(&other, kUnit + 4096, &properties, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(create_memory(&other, device_memory(), &properties, 0), CUDA_ERROR_OUT_OF_MEMORY);
  ASSERT_EQ(create_memory(&other, kUnit, &properties, 0), CUDA_SUCCESS);
  EXPECT_EQ(map_memory(begin_, kUnit, 0, other, 0), CUDA_ERROR_INVALID_VALUE) << "mapped already";
  EXPECT_EQ(map_memory(begin_ + 2 * kUnit, kUnit, 0, other, 0), CUDA_ERROR_INVALID_VALUE)
      << "not reserved";
  EXPECT_EQ(release_memory(other), CUDA_SUCCESS);
  EXPECT_EQ(release_memory(other), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(unmap_memory(begin_, kUnit / 2), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(free_range(begin_, 2 * kUnit), CUDA_ERROR_INVALID_VALUE) << "still mapped";
}

}  // namespace
}  // namespace sluice::emulated
