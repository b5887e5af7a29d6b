// A program's own kernels on a GPU. launch() launches them, so that the same source runs on a GPU
// and, in the tests, on the CPU (tests/emulated_cuda).
//
// Kernel sources (.cu) include this header: nvcc compiles them, or, with SLUICE_EMULATED_CUDA=1,
// the C++ compiler under tests/emulated_cuda/kernel_shim.hpp. Including it registers the source's
// kernels before main() begins. open_device() (device.hpp) checks that a GPU has code for all
// registered kernels. load_kernels() loads them.
//
// CUDA loads a kernel at its first launch. Loading may wait for all work on the device (CUDA C++
// Programming Guide, "Lazy Loading", "Concurrent Execution"), and never ends if that is an NCCL
// kernel whose peer waits for this rank. Call load_kernels() before starting kernels that wait for
// other ranks. It does not load the kernels of libraries: Stage::prepare() runs those once.
//
// Other sources (.cpp) see load_kernels() alone.
#pragma once

#include <span>
#include <utility>

#include <sluice/device.hpp>

#pragma GCC visibility push(default)
namespace sluice::cuda {

// The kernels of one source, which form one CUDA module. For this header alone.
class KernelModule {
 public:
  // `kernel`: any of the module. `architectures`: what it was compiled for, 900 for 9.0. Both live
  // as long as the program.
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
  // Initialised before any constructor runs; the list only grows.
  static inline constinit const KernelModule* first = nullptr;
};

// Loads every kernel of every KernelModule on the calling thread's current device; may wait for
// work there. Does nothing where CUDA loads eagerly (CUDA_MODULE_LOADING=EAGER), and little when
// called again. Throws Error(kDevice) with a remedy where the driver is older than 12.4.
void load_kernels();

}  // namespace sluice::cuda
#pragma GCC visibility pop

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

// Of shared memory that a kernel with dynamic shared memory may declare itself.
inline constexpr std::size_t kMostStaticSharedBytes = 20 * 1024;

struct LaunchShape {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;  // dynamic shared memory, see shared_memory() in device_tools.hpp
};

namespace {

// Each source has one, through which the driver finds the source's other kernels.
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

// Launches `kernel` on `stream` and returns; `arguments` are converted to the kernel's parameter
// types and copied. `name` says what the kernel is for ("layer norm forward"). The stream's device
// must be current. A grid without blocks is an error, as in CUDA. Throws Error(kDevice), naming the
// kernel and its shape, if the launch fails; OutOfMemory if the device has no memory for it.
template <typename... Parameters, typename... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape,
            cudaStream_t stream, Arguments&&... arguments) {
  // The emulation does not copy a __grid_constant__ for each of its threads.
  static_assert(((!std::is_reference_v<Parameters> ||
                  (SLUICE_EMULATED_CUDA && std::is_const_v<std::remove_reference_t<Parameters>>)) &&
                 ...),
                "a kernel takes its arguments by value");
  // More has to be asked for; what the kernel declares itself counts.
  constexpr std::size_t kDefaultSharedBytes = 48 * 1024;
  if (shape.shared_bytes > kDefaultSharedBytes - kMostStaticSharedBytes) {
    detail::check_launch(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              static_cast<int>(shape.shared_bytes)),
                         name, shape);
  }
#if SLUICE_EMULATED_CUDA
  const auto run_thread = [kernel, ... copies = static_cast<Parameters>(arguments)] {
    kernel(copies...);
  };
  const emulated::Launch request{name, reinterpret_cast<const void*>(kernel), shape.grid,
                                 shape.block, shape.shared_bytes};
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
