#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include <sluice/cuda.hpp>
#include <sluice/error.hpp>

#include "tests/benchmarks/gpu/waiting.hpp"

namespace sluice::benchmarks {

namespace {

constexpr unsigned kThreads = 512;
constexpr std::size_t kSharedBytes = 80 * 1024;  // about that of NCCL's kernels for 9.0
constexpr int kMostReads = 20'000'000;           // over PCIe: some ten seconds
constexpr std::chrono::seconds kPatience{5};

__global__ void wait_kernel(volatile int* flags) {
  if (threadIdx.x == 0) {
    flags[1 + blockIdx.x] = 1;
    for (int i = 0; i < kMostReads && flags[0] == 0; ++i) {
    }
  }
  __syncthreads();
}

}  // namespace

WaitingKernel::WaitingKernel(Device device, int blocks)
    : stream_(device, StreamPriority::kHigh),
      flags_(device, (1 + static_cast<std::size_t>(blocks)) * sizeof(int)) {
  if (blocks == 0) return;
  std::memset(flags_.data(), 0, flags_.size());
  auto* const flags = reinterpret_cast<volatile int*>(flags_.data());
  cuda::launch("a kernel that waits", &wait_kernel,
               {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), kSharedBytes},
               static_cast<cudaStream_t>(stream_.view().native()), flags);
  const auto limit = std::chrono::steady_clock::now() + kPatience;
  for (int block = 1; block <= blocks; ++block) {
    while (flags[block] == 0) {
      if (std::chrono::steady_clock::now() > limit) {
        end();
        throw Error(ErrorCode::kDevice, std::to_string(blocks) + " blocks that wait do not start");
      }
      std::this_thread::yield();
    }
  }
}

WaitingKernel::~WaitingKernel() { end(); }

void WaitingKernel::end() {
  *reinterpret_cast<volatile int*>(flags_.data()) = 1;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  try {
    stream_.view().synchronize();
  } catch (const Error&) {  // whoever uses the device next hears of it
  }
}

}  // namespace sluice::benchmarks
