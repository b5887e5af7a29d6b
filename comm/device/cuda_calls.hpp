// The CUDA calls behind <sluice/device.hpp>, without CUDA's types: handles are void*. Internal to
// comm/device. A build with CUDA defines them in device_cuda.cpp, kernel_modules.cpp and
// virtual_memory.cpp, a build without it in cuda_stub.cpp. They throw Error(kDevice), except that
// require_usable() and require_code() throw Error(kUsage).
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include <sluice/device.hpp>

namespace sluice::cuda {

[[nodiscard]] int count_devices(std::string* why_none);
[[nodiscard]] DeviceProperties read_properties(int index);
void require_usable(int index);
void require_code(int index);  // the device is the current one
void select(int index);
[[nodiscard]] void* make_stream(int index, StreamPriority priority);
void destroy_stream(void* stream) noexcept;
void synchronize(void* stream);
void wait(void* stream, void* event);
[[nodiscard]] void* make_event(int index, bool timed);
[[nodiscard]] double seconds_between(void* earlier, void* later);
void destroy_event(void* event) noexcept;
void record(void* event, void* stream);
[[nodiscard]] bool done(void* event);
[[nodiscard]] std::byte* allocate(int index, std::size_t bytes);
void release(std::byte* data) noexcept;
[[nodiscard]] std::byte* allocate_host(int index, std::size_t bytes);
void release_host(std::byte* data) noexcept;
void copy(void* to, const void* from, std::size_t bytes, void* stream);
void fill_zero(void* to, std::size_t bytes, void* stream);
void copy_blocking(int index, void* to, const void* from, std::size_t bytes);

// The unit of mapped memory: a multiple of the driver's own on every GPU, else an error.
inline constexpr std::size_t kMappingUnit = std::size_t{2} << 20;
struct Mapping {
  std::size_t bytes;  // a multiple of kMappingUnit
  // Mappings of one number share memory; they have equal bytes. New numbers count from 0 on.
  std::size_t backing;
};
// Memory mapped at consecutive addresses, one mapping after the other. Throws OutOfMemory.
[[nodiscard]] std::byte* map_memory(int index, std::span<const Mapping> mappings);
// All of it, with the sum of its bytes. Waits for the device.
void unmap_memory(int index, std::byte* data, std::size_t bytes) noexcept;

}  // namespace sluice::cuda
