// Kernels of a program's own on a GPU: launch() is the one way to launch them, so that the same
// source runs on a GPU and, in the tests, on the CPU (tests/emulated_cuda).
//
// Kernel sources (.cu) include this header: nvcc compiles them, or, with SLUICE_EMULATED_CUDA=1,
// the C++ compiler under tests/emulated_cuda/kernel_shim.hpp. A source that includes it is known
// before main() begins; nothing has to be listed. open_device() (device.hpp) asks whether a GPU has
// code for all known kernels. load_kernels() loads them.
//
// CUDA loads a kernel when it is first launched. That may wait for everything that runs on the
// device (CUDA C++ Programming Guide, "Lazy Loading", "Concurrent Execution"): for ever, where that
// is an NCCL kernel whose peer waits for this rank. Whoever is about to start kernels that wait for
// other ranks calls load_kernels() first. Kernels of libraries are not known here: what a stage
// needs of them is run once in Stage::prepare().
//
// Other sources (.cpp) see load_kernels() alone.
#pragma once

#include <span>
#include <utility>

#include <sluice/device.hpp>

namespace sluice::cuda {

// The kernels of one source, which nvcc makes one module of CUDA's. For this header alone.
class KernelModule {
 public:
  // `kernel`: any of the module. `architectures`: what it was compiled for, 900 for 9.0; lives, as
  // this does, as long as the program.
  KernelModule(const void* kernel, std::span<const int> architectures) noexcept
      : kernel_(kernel), architectures_(architectures), next_(std::exchange(first, this)) {}
  KernelModule(const KernelModule&) = delete;
  KernelModule& operator=(const KernelModule&) = delete;
  ~KernelModule() = default;

 private:
  friend void load_kernels();
  friend void require_code(int index);

  const void* kernel_;
  std::span<const int> architectures_;
  const KernelModule* next_;
  // Set before any constructor runs, whatever the order of the sources; only grows.
  static inline constinit const KernelModule* first = nullptr;
};

// Loads every kernel of every KernelModule on the calling thread's current device; may wait for
// what runs there. Nothing where CUDA loads eagerly (CUDA_MODULE_LOADING=EAGER); quick when called
// again. Throws Error(kDevice) naming what would help where the driver, older than 12.4, cannot.
void load_kernels();

}  // namespace sluice::cuda

#ifndef SLUICE_EMULATED_CUDA
#define SLUICE_EMULATED_CUDA 0
#endif

// For kernel sources alone.
#if defined(__CUDACC__) || SLUICE_EMULATED_CUDA

#include <cuda_runtime.h>

#include <cstddef>
#include <string>
#include <type_traits>

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

#endif
