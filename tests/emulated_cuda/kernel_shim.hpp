// Makes a CUDA kernel source compile as plain C++ for the emulation: included before everything
// else
// (-include) where SLUICE_EMULATED_CUDA is 1. Gives the words of the CUDA language (__global__,
// __shared__, threadIdx, ...) and those device functions that kernels of ours use; what is missing
// here fails to compile and is added here.
//
// Differences a kernel source has to know: __CUDA_ARCH__ and __CUDACC__ are not defined; static
// __shared__ variables keep their values from block to block; dynamic shared memory comes from
// shared_memory() of stages/cuda_kernels/device_tools.hpp alone.
#pragma once

#define SLUICE_EMULATED_CUDA 1

#include <cuda_runtime.h>
#include <vector_functions.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <type_traits>

#include "tests/emulated_cuda/block.hpp"
#include "tests/emulated_cuda/tensor_core.hpp"

// The toolkit's headers define some of these to nothing where no CUDA compiler is at work.
#undef __shared__
#undef __launch_bounds__
#undef __noinline__
#undef __grid_constant__
#define __shared__ static thread_local  // the blocks of a kernel run on one thread
#define __launch_bounds__(...)
#define __grid_constant__ &  // after the type
#define __CUDA_ARCH_LIST__ 800, 900

#define threadIdx (::sluice::emulated::place().thread)
#define blockIdx (::sluice::emulated::place().block)
#define blockDim (::sluice::emulated::place().block_shape)
#define gridDim (::sluice::emulated::place().grid_shape)
constexpr int warpSize = 32;

// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming): the names are CUDA's.

inline void __syncthreads(std::source_location where = std::source_location::current()) {
  ::sluice::emulated::block_barrier(where);
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFU,
                       std::source_location where = std::source_location::current()) {
  ::sluice::emulated::warp_exchange(mask, ::sluice::emulated::WarpOperation::kBarrier, 0, 0, where);
}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_block() {}

namespace sluice::emulated {

template <typename T>
T shuffle(unsigned mask, T value, int source, std::source_location where) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) <= 8);
  std::uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  word = warp_exchange(mask, WarpOperation::kShuffle, word, source, where);
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// Lane of the caller's segment of `width` lanes, moved by `distance`; the caller where that leaves
// the segment.
inline int moved_lane(int distance, int width) {
  const int first = lane() / width * width;
  const int moved = lane() + distance;
  return moved < first || moved >= first + width ? lane() : moved;
}

// See stages/cuda_kernels/device_tools.hpp. The warp meets once, not once for each of five
// shuffles: changing between threads is most of what a kernel costs here.
template <typename Reduction, typename T>
T warp_reduce(T value, std::source_location where = std::source_location::current()) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T> && std::is_empty_v<Reduction>);
  const auto reduce = [](std::uint64_t* words) {
    T values[32], halved[32];
    for (int l = 0; l < 32; ++l) std::memcpy(values + l, words + l, sizeof(T));
    for (int distance = 16; distance > 0; distance /= 2) {
      for (int l = 0; l < 32; ++l) halved[l] = Reduction{}(values[l], values[l ^ distance]);
      std::copy(halved, halved + 32, values);
    }
    for (int l = 0; l < 32; ++l) std::memcpy(words + l, values + l, sizeof(T));
  };
  std::uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  word = warp_reduction(word, reduce, where);
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// See stages/cuda_kernels/device_tools.hpp.
template <int kThreads, typename T, typename Reduction>
T block_reduce(T value, Reduction reduction,
               std::source_location where = std::source_location::current()) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  struct Work {
    std::uint64_t* slots;
    std::uint64_t* result;
    Reduction reduction;
    T load(int index) const {
      T loaded;
      std::memcpy(&loaded, slots + index, sizeof loaded);
      return loaded;
    }
    void store(std::uint64_t* word, T stored) const { std::memcpy(word, &stored, sizeof stored); }
    static void finish(void* argument) { static_cast<Work*>(argument)->reduce(); }
    void reduce() const {
      for (int first = 0; first < kThreads; first += 32) {
        for (int distance = 1; distance < 32; distance *= 2) {
          for (int l = first; l < first + 32; l += 2 * distance) {
            store(slots + l, reduction(load(l), load(l + distance)));
          }
        }
      }
      T total = load(0);
      for (int first = 32; first < kThreads; first += 32) total = reduction(total, load(first));
      store(result, total);
    }
  };
  Work work{block_slots(), block_result(), reduction};
  const Place& here = place();
  const dim3& shape = here.block_shape;
  work.store(work.slots + (here.thread.z * shape.y + here.thread.y) * shape.x + here.thread.x,
             value);
  block_barrier(where, &Work::finish, &work);
  T total;
  std::memcpy(&total, work.result, sizeof total);
  return total;
}

template <typename T, typename Change>
T change_atomically(T* address, Change change) {
  std::atomic_ref<T> word(*address);
  T old = word.load(std::memory_order_relaxed);
  while (!word.compare_exchange_weak(old, change(old), std::memory_order_relaxed)) {
  }
  return old;
}

}  // namespace sluice::emulated

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              std::source_location where = std::source_location::current()) {
  const int first = ::sluice::emulated::lane() / width * width;
  return ::sluice::emulated::shuffle(mask, value, first + (source & (width - 1)), where);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32,
                 std::source_location where = std::source_location::current()) {
  const int source = ::sluice::emulated::moved_lane(-static_cast<int>(distance), width);
  return ::sluice::emulated::shuffle(mask, value, source, where);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32,
                   std::source_location where = std::source_location::current()) {
  const int source = ::sluice::emulated::moved_lane(static_cast<int>(distance), width);
  return ::sluice::emulated::shuffle(mask, value, source, where);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32,
                  std::source_location where = std::source_location::current()) {
  const int lane = ::sluice::emulated::lane();
  const int source = (lane ^ bits) / width > lane / width ? lane : lane ^ bits;
  return ::sluice::emulated::shuffle(mask, value, source, where);
}
inline unsigned __ballot_sync(unsigned mask, int value,
                              std::source_location where = std::source_location::current()) {
  return static_cast<unsigned>(::sluice::emulated::warp_exchange(
      mask, ::sluice::emulated::WarpOperation::kBallot, value != 0 ? 1 : 0, 0, where));
}
inline int __any_sync(unsigned mask, int value,
                      std::source_location where = std::source_location::current()) {
  return __ballot_sync(mask, value, where) != 0 ? 1 : 0;
}
inline int __all_sync(unsigned mask, int value,
                      std::source_location where = std::source_location::current()) {
  return __ballot_sync(mask, value == 0 ? 1 : 0, where) == 0 ? 1 : 0;
}

template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcs(const T* address) {
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
void __stcs(T* address, std::type_identity_t<T> value) {
  *address = value;
}
template <typename T>
void __stcg(T* address, std::type_identity_t<T> value) {
  *address = value;
}
template <typename T>
void __stwb(T* address, std::type_identity_t<T> value) {
  *address = value;
}

template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return ::sluice::emulated::change_atomically(address,
                                               [&](T old) { return static_cast<T>(old + value); });
}
inline unsigned atomicInc(unsigned* address, unsigned most) {
  return ::sluice::emulated::change_atomically(
      address, [&](unsigned old) { return old >= most ? 0U : old + 1; });
}
template <typename T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return ::sluice::emulated::change_atomically(address,
                                               [&](T old) { return std::max(old, value); });
}
template <typename T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return ::sluice::emulated::change_atomically(address,
                                               [&](T old) { return std::min(old, value); });
}
template <typename T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return ::sluice::emulated::change_atomically(address, [&](T old) { return old | value; });
}
template <typename T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return ::sluice::emulated::change_atomically(address, [&](T) { return value; });
}
template <typename T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return ::sluice::emulated::change_atomically(
      address, [&](T old) { return old == expected ? value : old; });
}

using std::max;
using std::min;

inline float rsqrtf(float x) { return 1.0F / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0F / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0F / std::sqrt(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __saturatef(float x) { return x > 0.0F ? std::min(x, 1.0F) : 0.0F; }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }
inline long long __double_as_longlong(double value) { return std::bit_cast<long long>(value); }
inline float __uint2float_rn(unsigned value) { return static_cast<float>(value); }
inline float __int2float_rn(int value) { return static_cast<float>(value); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<std::uint64_t>(a) * b >> 32);
}
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __clz(int bits) { return std::countl_zero(static_cast<unsigned>(bits)); }
inline int __ffs(int bits) {
  return bits == 0 ? 0 : std::countr_zero(static_cast<unsigned>(bits)) + 1;
}

// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
