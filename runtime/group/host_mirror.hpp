// How a pipeline's host meets its device: waits for it, and reads and writes its memory. One
// thread.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include <sluice/compute.hpp>
#include <sluice/tensor.hpp>

#include "comm/group/communicator.hpp"
#include "comm/group/waiter.hpp"
#include "stages/compute/context_hooks.hpp"

namespace sluice {

// Looks for failures of other ranks meanwhile, since the device may wait for their messages.
class PolledDeviceWait final : public DeviceWait {
 public:
  // `interrupt` outlives this; its exception ends a wait.
  explicit PolledDeviceWait(Interrupt& interrupt);
  void until(const Event& event) override;

 private:
  Interrupt& interrupt_;
  Waiter waiter_;
};

// Device memory as the host has it: on a CPU the memory itself, on a GPU a page-locked copy. For
// what passes through MPI's collectives or files.
class HostMirror {
 public:
  // Waits for the device as compute.wait() does.
  explicit HostMirror(ComputeContext& compute) : compute_(compute) {}

  // Blocks until everything on the compute stream is done, and returns the values; valid until the
  // next call. The copy grows where it is too small.
  [[nodiscard]] std::span<std::byte> read_back(const Tensor& tensor) {
    return read_back(tensor.data, tensor.spec.bytes());
  }
  [[nodiscard]] std::span<std::byte> read_back(std::span<std::byte> bytes) {
    return read_back(bytes.data(), bytes.size());
  }
  [[nodiscard]] std::span<float> read_back(std::span<float> values);
  // The same without reading the device, for values that the host is about to write.
  [[nodiscard]] std::span<std::byte> writable_host_copy(const Tensor& tensor) {
    return writable_host_copy(tensor.data, tensor.spec.bytes());
  }
  // Makes the copy so large that later calls do not let it grow to this size. To grow frees memory,
  // which waits for all work of the device.
  void reserve(std::size_t bytes) { (void)writable_host_copy(nullptr, bytes); }
  // Puts the bytes that the last call returned back, in stream order.
  void write_back();
  // The owner of the bytes that the last call returned; `memory` owns the device memory.
  [[nodiscard]] KeepAlive owner(KeepAlive memory) const;

 private:
  [[nodiscard]] std::span<std::byte> read_back(void* data, std::size_t bytes);
  [[nodiscard]] std::span<std::byte> writable_host_copy(void* data, std::size_t bytes);
  ComputeContext& compute_;
  std::shared_ptr<HostBuffer> copy_ = std::make_shared<HostBuffer>();
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace sluice
