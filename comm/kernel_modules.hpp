// Loading all kernels of ours at once. CUDA loads a kernel when it is first launched, which may
// wait for everything that runs on the device (CUDA C++ Programming Guide, "Lazy Loading",
// "Concurrent Execution"): for ever, where that is an NCCL kernel whose peer waits for this rank.
// Whoever is about to start kernels that wait for other ranks calls load_kernels() first.
//
// Every source that includes comm/device_launch.hpp, the one way our kernels are launched, is known
// here before main() begins; nothing has to be listed. Kernels of libraries are not ours: what a
// stage needs of them is run once in Stage::prepare().
#pragma once

#include <utility>

namespace sluice::cuda {

// The kernels of one source, which nvcc makes one module of CUDA's. For device_launch.hpp alone.
class KernelModule {
 public:
  // `kernel`: any of the module. Lives as long as the program.
  explicit KernelModule(const void* kernel) noexcept
      : kernel_(kernel), next_(std::exchange(first, this)) {}
  KernelModule(const KernelModule&) = delete;
  KernelModule& operator=(const KernelModule&) = delete;
  ~KernelModule() = default;

 private:
  friend void load_kernels();

  const void* kernel_;
  const KernelModule* next_;
  // Set before any constructor runs, whatever the order of the sources; only grows.
  static inline constinit const KernelModule* first = nullptr;
};

// Loads every kernel of every KernelModule on the calling thread's current device; may wait for
// what runs there. Nothing where CUDA loads eagerly (CUDA_MODULE_LOADING=EAGER); quick when called
// again. Throws Error(kDevice) naming what would help where the driver, older than 12.4, cannot.
void load_kernels();

}  // namespace sluice::cuda
