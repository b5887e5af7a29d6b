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
// OutOfMemory that names the device, the bytes and what free_memory_text() said.
[[noreturn]] void throw_out_of_memory(int index, std::size_t bytes, const std::string& free_memory);
// "12.4" of 12040, as CUDA counts its versions.
[[nodiscard]] std::string version_text(int version);

// Makes a device current for the calling thread and restores the previous one at its end.
class Selected {
 public:
  explicit Selected(int index) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != index) select(index);
    index_ = index;
  }
  ~Selected() {
    if (before_ != index_) static_cast<void>(cudaSetDevice(before_));
  }
  Selected(const Selected&) = delete;
  Selected& operator=(const Selected&) = delete;

 private:
  int before_ = 0, index_ = 0;
};

// Sets `function` to the driver's as of CUDA `version` (12040 is 12.4), to null where it has none.
// The driver is asked, not linked: a program starts where there is none.
template <typename Function>
void find_in_driver(Function*& function, const char* name, [[maybe_unused]] unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result),
        "cudaGetDriverEntryPointByVersion");
#else
  check(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result),
        "cudaGetDriverEntryPoint");
#endif
  function = result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(found) : nullptr;
}

[[nodiscard]] inline cudaStream_t native(StreamView stream) {
  return static_cast<cudaStream_t>(stream.native());
}
[[nodiscard]] inline cudaEvent_t native(const Event& event) {
  return static_cast<cudaEvent_t>(event.native());
}

}  // namespace sluice::cuda
