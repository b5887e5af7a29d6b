// What the GPU code of all libraries shares: error checks, texts and typed handles. Internal: only
// sources that are built with CUDA include it.
#pragma once

#include <cuda_runtime_api.h>

#include <source_location>
#include <string>
#include <string_view>

#include <sluice/device.hpp>

#include "comm/device/cuda_calls.hpp"

namespace sluice::cuda {

// Throws Error(kDevice) "`what`: CUDA's text" unless `status` is cudaSuccess; OutOfMemory where
// CUDA reports it.
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

}  // namespace sluice::cuda
