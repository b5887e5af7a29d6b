// A kernel that waits as NCCL's receives do: each of its blocks takes a multiprocessor to itself,
// as far as kernels with much shared memory are concerned, and reads memory in a loop.
#pragma once

#include <sluice/device.hpp>

namespace sluice::benchmarks {

class WaitingKernel {
 public:
  // Starts it on a stream of its own of high priority, and waits until all blocks run. 0 blocks:
  // none is started. Throws Error(kDevice) where they do not run within a few seconds.
  WaitingKernel(Device device, int blocks);
  ~WaitingKernel();  // ends it
  WaitingKernel(const WaitingKernel&) = delete;
  WaitingKernel& operator=(const WaitingKernel&) = delete;

 private:
  void end();

  Stream stream_;
  HostBuffer flags_;  // [0]: whether it ends; [1 + block]: whether that block runs
};

}  // namespace sluice::benchmarks
