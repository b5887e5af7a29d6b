// What is asked of, or done to, all kernels of ours at once: whether a GPU has code for them
// (open_device(), comm/device.hpp), and loading them. CUDA loads a kernel when it is first
// launched, which may wait for everything that runs on the device (CUDA C++ Programming Guide,
// "Lazy Loading", "Concurrent Execution"): for ever, where that is an NCCL kernel whose peer waits
// for this rank. Whoever is about to start kernels that wait for other ranks calls load_kernels()
// first.
//
// Every source that includes comm/device_launch.hpp, the one way our kernels are launched, is known
// here before main() begins; nothing has to be listed. Kernels of libraries are not ours: what a
// stage needs of them is run once in Stage::prepare().
#pragma once

#include <span>
#include <utility>

namespace sluice::cuda {

// The kernels of one source, which nvcc makes one module of CUDA's. For device_launch.hpp alone.
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
