// What kernels share: dynamic shared memory, reductions over a warp and over a block, and how the
// last of several blocks knows that it is. Every order of summation is fixed, so that the same
// values give the same bits in every run; the emulation of the tests (see <sluice/cuda.hpp>)
// sums in the same order.
//
// Reductions must be reached by all threads of the warp or block, with the same template arguments.
#pragma once

#include <cuda_runtime.h>

#include <sluice/cuda.hpp>

#if !SLUICE_EMULATED_CUDA
#include <cub/block/block_reduce.cuh>
#endif

namespace sluice::cuda {

constexpr int kWarpThreads = 32;

// The dynamic shared memory of the running block, LaunchShape::shared_bytes long, 16-byte aligned.
template <typename T>
__device__ __forceinline__ T* shared_memory() {
#if SLUICE_EMULATED_CUDA
  return static_cast<T*>(emulated::dynamic_shared_memory());
#else
  extern __shared__ __align__(16) unsigned char sluice_shared_memory[];
  return reinterpret_cast<T*>(sluice_shared_memory);
#endif
}

struct Sum {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

// A NaN loses against a number.
struct Max {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a < b ? b : a;
  }
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ __forceinline__ double operator()(double a, double b) const { return fmax(a, b); }
};

// Of all 32 lanes, in every lane; T of 4 or 8 bytes. Order: lane l with l ^ 16, then ^ 8, 4, 2, 1.
template <typename Reduction, typename T>
__device__ __forceinline__ T warp_reduce(T value) {
#if SLUICE_EMULATED_CUDA
  return emulated::warp_reduce<Reduction>(value);
#else
#pragma unroll
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    value = Reduction{}(value, __shfl_xor_sync(0xFFFFFFFFU, value, distance));
  }
  return value;
#endif
}

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
  return warp_reduce<Sum>(value);
}

template <typename T>
__device__ __forceinline__ T warp_max(T value) {
  return warp_reduce<Max>(value);
}

// Of all threads of a one-dimensional block of kThreads threads, a multiple of 32, in every thread.
// Holds two __syncthreads(); what the threads wrote to shared memory before is visible after.
// Order: within a warp neighbours first ((0+1)+(2+3))+..., then the warps in ascending order (CUB's
// BLOCK_REDUCE_WARP_REDUCTIONS).
template <int kThreads, typename Reduction, typename T>
__device__ __forceinline__ T block_reduce(T value) {
  static_assert(kThreads > 0 && kThreads <= 1024 && kThreads % kWarpThreads == 0);
#if SLUICE_EMULATED_CUDA
  return emulated::block_reduce<kThreads>(value, Reduction{});
#else
  using Reduce = ::cub::BlockReduce<T, kThreads, ::cub::BLOCK_REDUCE_WARP_REDUCTIONS>;
  __shared__ typename Reduce::TempStorage storage;
  __shared__ T total;
  const T reduced = Reduce(storage).Reduce(value, Reduction{});
  if (threadIdx.x == 0) total = reduced;
  __syncthreads();
  const T result = total;
  __syncthreads();  // all threads have read this total before the next is written
  return result;
#endif
}

template <int kThreads, typename T>
__device__ __forceinline__ T block_sum(T value) {
  return block_reduce<kThreads, Sum>(value);
}

template <int kThreads, typename T>
__device__ __forceinline__ T block_max(T value) {
  return block_reduce<kThreads, Max>(value);
}

// Whether the block is the last of `blocks` that come here with `ticket`, which is 0 before the
// first and again after the last. What the others wrote before can then be read. To be reached by
// all threads of each block; what they wrote to shared memory before is visible after.
__device__ __forceinline__ bool last_block(unsigned* ticket, unsigned blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // also of what the other threads wrote: they did before the barrier
    last = atomicInc(ticket, blocks - 1) == blocks - 1;
    if (last) __threadfence();
  }
  __syncthreads();
  return last;
}

}  // namespace sluice::cuda
