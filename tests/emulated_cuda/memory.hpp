// The memory of the emulated devices, and the page-locked memory of the host.
//
// Each device owns a range of addresses; an allocation gets pages of its own, ends just before a
// page that nobody may touch, and its addresses are never given out again, so that an access beyond
// its end or after cudaFree dies at once. Fresh memory holds bytes 0xFF.
//
// Where the processor has memory protection keys, device memory is closed to every thread but the
// workers of the device's streams. A wrong access then dies by SIGSEGV, after one line on stderr.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace sluice::emulated {

inline constexpr int kMostDevices = 64;
// From SLUICE_EMULATED_DEVICES (default 8, at most kMostDevices) and SLUICE_EMULATED_DEVICE_MEMORY
// (bytes per device, default 2 GiB), read once.
[[nodiscard]] int device_count();
[[nodiscard]] std::size_t device_memory();
[[nodiscard]] std::size_t free_memory(int device);

// Whether host threads are kept out of device memory here.
[[nodiscard]] bool is_device_memory_guarded();

// Of the calling thread: opens the memory of this device and closes all others; -1 closes all.
void open_device(int device);

// Opens the memory of all devices to this thread for the life of the object: copy engines and NCCL.
class AllDevicesOpen {
 public:
  AllDevicesOpen();
  AllDevicesOpen(const AllDevicesOpen&) = delete;
  AllDevicesOpen& operator=(const AllDevicesOpen&) = delete;
  ~AllDevicesOpen();

 private:
  int before_;
};

cudaError_t allocate_device(int device, std::size_t bytes, void** address);
cudaError_t free_device(void* address);
cudaError_t allocate_host(std::size_t bytes, void** address);
cudaError_t free_host(void* address);
cudaError_t register_host(void* address, std::size_t bytes);
cudaError_t unregister_host(void* address);

enum class MemoryKind { kPageable, kPageLocked, kDevice };

struct Memory {
  MemoryKind kind = MemoryKind::kPageable;
  int device = -1;        // of device memory
  bool is_inside = true;  // all asked bytes lie in one living allocation (or are pageable)
  void* allocation = nullptr;
};

[[nodiscard]] Memory memory_of(const void* address, std::size_t bytes);

}  // namespace sluice::emulated
