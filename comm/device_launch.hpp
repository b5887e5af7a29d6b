// The one way our kernels are launched, so that the same source runs on a GPU and, in the tests, on
// the CPU (tests/emulated_cuda). For kernel sources (.cu) alone: nvcc compiles them, or, with
// SLUICE_EMULATED_CUDA=1, the C++ compiler under tests/emulated_cuda/kernel_shim.hpp. Including it
// makes the source's kernels known to load_kernels() (comm/kernel_modules.hpp).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>
#include <type_traits>

#include "comm/device.hpp"
#include "comm/kernel_modules.hpp"

#ifndef SLUICE_EMULATED_CUDA
#define SLUICE_EMULATED_CUDA 0
#endif

namespace sluice::cuda {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;  // dynamic shared memory, see shared_memory() in device_tools.hpp
};

namespace {

// One of each source's own, for the source's others to be found by.
__global__ void module_mark() {}
constexpr int kArchitecturesOfThisSource[] = {__CUDA_ARCH_LIST__};
const KernelModule module_of_this_source(reinterpret_cast<const void*>(&module_mark),
                                         kArchitecturesOfThisSource);

}  // namespace

namespace detail {

inline void check_launch(cudaError_t status, const char* name, const LaunchShape& shape) {
  if (status == cudaSuccess) return;
  const auto text = [](const dim3& size) {
    std::string shown = "(";
    shown += std::to_string(size.x) + ", " + std::to_string(size.y) + ", ";
    return shown += std::to_string(size.z) + ")";
  };
  const std::string message = std::string("launching ") + name + " on a grid of " +
                              text(shape.grid) + " blocks of " + text(shape.block) +
                              " threads with " + std::to_string(shape.shared_bytes) +
                              " bytes of shared memory: " + cudaGetErrorString(status);
  if (status == cudaErrorMemoryAllocation) throw OutOfMemory(message);  // to load the kernel
  throw Error(ErrorCode::kDevice, message);
}

}  // namespace detail

// Puts one run of `kernel` on `stream` and returns; `arguments` are converted to the kernel's
// parameter types and copied. `name` says what the kernel is for ("layer norm forward"). The
// stream's device must be current. A grid without blocks is an error, as in CUDA.
// Throws Error(kDevice), naming the kernel and its shape, where the launch is refused; OutOfMemory
// where the device has none left for it.
template <typename... Parameters, typename... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape,
            cudaStream_t stream, Arguments&&... arguments) {
  static_assert((!std::is_reference_v<Parameters> && ...), "a kernel takes its arguments by value");
  constexpr std::size_t kSharedBytesOfRight = 48 * 1024;  // more has to be asked for
  if (shape.shared_bytes > kSharedBytesOfRight) {
    detail::check_launch(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              static_cast<int>(shape.shared_bytes)),
                         name, shape);
  }
#if SLUICE_EMULATED_CUDA
  const auto run_thread = [kernel, ... copies = static_cast<Parameters>(arguments)] {
    kernel(copies...);
  };
  const emulated::Launch request{name, shape.grid, shape.block, shape.shared_bytes};
  detail::check_launch(emulated::enqueue_kernel(request, stream, run_thread), name, shape);
#else
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  detail::check_launch(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...),
                       name, shape);
#endif
}

}  // namespace sluice::cuda
