// The memory of the emulated devices, and the page-locked memory of the host.
//
// Each device owns a range of addresses; an allocation gets pages of its own, ends just before a
// page that nobody may touch, and its addresses are never given out again, so that an access beyond
// its end or after cudaFree dies at once. Fresh memory holds bytes 0xFF.
//
// Where the processor has memory protection keys, device memory is closed to every thread but the
// workers of the device's streams. A wrong access then dies by SIGSEGV, after one line on stderr.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

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
// What virtual_memory.cpp makes mapped memory of. Addresses of a device that nothing
// else gets, 0 where there are none left; bytes of its memory, false where it has not as many free.
[[nodiscard]] std::uintptr_t reserve_addresses(int device, std::size_t bytes,
                                               std::size_t alignment);
[[nodiscard]] bool take_bytes(int device, std::size_t bytes);
void give_back_bytes(int device, std::size_t bytes);
// From open to close, what is mapped there is memory of the device.
[[nodiscard]] bool open_addresses(int device, std::uintptr_t begin, std::size_t bytes);
void close_addresses(int device, std::uintptr_t begin, std::size_t bytes);

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

// The driver's virtual memory management. Memory lies in a file of the process, and a mapping is
// one of the host's: two mappings of one allocation share their bytes. Beyond what CUDA requires,
// an allocation is mapped whole, where its device was the current one when the addresses were
// reserved, and is open to that device alone.
CUresult device_of_ordinal(CUdevice* device, int ordinal);
CUresult device_attribute(int* value, CUdevice_attribute attribute, CUdevice device);
CUresult memory_granularity(std::size_t* bytes, const CUmemAllocationProp* properties,
                            CUmemAllocationGranularity_flags option);
CUresult reserve_range(CUdeviceptr* begin, std::size_t bytes, std::size_t alignment,
                       CUdeviceptr hint, unsigned long long flags);
CUresult free_range(CUdeviceptr begin, std::size_t bytes);
CUresult create_memory(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                       const CUmemAllocationProp* properties, unsigned long long flags);
CUresult release_memory(CUmemGenericAllocationHandle handle);
CUresult map_memory(CUdeviceptr begin, std::size_t bytes, std::size_t offset,
                    CUmemGenericAllocationHandle handle, unsigned long long flags);
CUresult unmap_memory(CUdeviceptr begin, std::size_t bytes);
CUresult set_memory_access(CUdeviceptr begin, std::size_t bytes, const CUmemAccessDesc* access,
                           std::size_t count);

}  // namespace sluice::emulated
