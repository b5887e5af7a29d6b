// CUDA's side of the device primitives; what the GPU code of all boxes shares. Internal: only
// sources that are built with CUDA include it.
#pragma once

#include <cuda_runtime_api.h>

#include <source_location>
#include <string>
#include <string_view>

#include <sluice/device.hpp>

namespace sluice::cuda {

// Throws Error(kDevice), "`what`: CUDA's text", unless status is cudaSuccess; OutOfMemory where
// that is what it says.
void check(cudaError_t status, std::string_view what,
           std::source_location location = std::source_location::current());

// "512 of 4096 bytes are free", of the current device.
[[nodiscard]] std::string free_memory_text();
// "12.4" of 12040, as CUDA counts its versions.
[[nodiscard]] std::string version_text(int version);

[[nodiscard]] inline cudaStream_t native(StreamView stream) {
  return static_cast<cudaStream_t>(stream.native());
}
[[nodiscard]] inline cudaEvent_t native(const Event& event) {
  return static_cast<cudaEvent_t>(event.native());
}

// What device.cpp calls for devices of kind kCuda. Handles are CUDA's, as void*.
[[nodiscard]] int count_devices(std::string* why_none);
[[nodiscard]] DeviceProperties read_properties(int index);
void require_usable(int index);
void require_code(int index);  // in comm/device/kernel_modules.cpp; the device is the current one
void select(int index);
[[nodiscard]] void* make_stream(int index);
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

}  // namespace sluice::cuda
