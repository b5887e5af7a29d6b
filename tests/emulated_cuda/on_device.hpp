// Device memory as vectors, for the tests of the emulation.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace sluice::emulated {

// `count` elements on the current device, filled by the emulation or from host values.
template <typename T>
class OnDevice {
 public:
  explicit OnDevice(std::size_t count) : count_(count) {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, count * sizeof(T)), cudaSuccess);
    memory_ = static_cast<T*>(memory);
  }
  explicit OnDevice(const std::vector<T>& values) : OnDevice(values.size()) {
    EXPECT_EQ(cudaMemcpy(memory_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { cudaFree(memory_); }

  [[nodiscard]] T* get() const { return memory_; }
  // Waits for the default stream, so not for streams that do not.
  [[nodiscard]] std::vector<T> values() const {
    std::vector<T> copy(count_);
    EXPECT_EQ(cudaMemcpy(copy.data(), memory_, count_ * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return copy;
  }

 private:
  T* memory_ = nullptr;
  std::size_t count_;
};

}  // namespace sluice::emulated
