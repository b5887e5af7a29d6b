// Tools of the CUDA kernels: operands of f32 and bf16 read and written as floats, 16 bytes at a
// time where they are aligned, and loops over elements and rows of any number.
//
// Internal to stages/cuda. Arithmetic is f32, in the functions of stages/tensor/kernel_math.hpp.
// Results never depend on how many blocks a loop runs in: each element belongs to one thread.
#pragma once

#include <cstdint>
#include <type_traits>

#define SLUICE_KERNEL_NAMESPACE cuda
#include <sluice/compute.hpp>
#include <sluice/cuda.hpp>
#include <sluice/tensor.hpp>

#include "comm/device/device_cuda.hpp"
#include "stages/cuda_kernels/device_tools.hpp"
#include "stages/tensor/kernel_lane.hpp"
#include "stages/tensor/kernel_math.hpp"

namespace sluice::cuda {

// --- elements ---
SLUICE_MATH float widen(float value) { return value; }
SLUICE_MATH float widen(Bf16 value) {
  return bits_as<float>(static_cast<uint32_t>(value.bits) << 16);
}
SLUICE_MATH void narrow(float value, float& to) { to = value; }
SLUICE_MATH void narrow(float value, Bf16& to) {
  to.bits = static_cast<uint16_t>(round_to_bf16(value));
}

// N consecutive elements in memory, moved at most 16 bytes at a time.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T at[N];
};

template <int N>
struct Floats {
  float at[N];
};

// Two numbers in a word, the first in its low half. A GPU rounds both at once; its NaN is 0x7FFF.
SLUICE_MATH uint32_t narrow_pair(float first, float second) {
#if defined(__CUDA_ARCH__)
  uint32_t pair = 0;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return round_to_bf16(first) | round_to_bf16(second) << 16;
#endif
}
SLUICE_MATH uint4 narrow_eight(const float* v) {
  return make_uint4(narrow_pair(v[0], v[1]), narrow_pair(v[2], v[3]), narrow_pair(v[4], v[5]),
                    narrow_pair(v[6], v[7]));
}
SLUICE_MATH void widen_eight(uint4 words, float* v) {
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = bits_as<float>(pairs[i] << 16);
    v[2 * i + 1] = bits_as<float>(pairs[i] & 0xFFFF0000U);
  }
}

// `from` lies at a multiple of min(16, N * sizeof(T)) bytes; so does `to`, in global memory.
// Sixteen bytes are named as such: nvcc parts a plain copy of elements that are used one by one.
template <int N, typename T>
SLUICE_MATH Floats<N> load(const T* from) {
  Floats<N> values;
  if constexpr (sizeof(T) == 2 && N % 8 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 8) {
      widen_eight(*reinterpret_cast<const uint4*>(from + i), values.at + i);
    }
  } else {
    const auto pack = *reinterpret_cast<const Pack<T, N>*>(from);
#pragma unroll
    for (int i = 0; i < N; ++i) values.at[i] = widen(pack.at[i]);
  }
  return values;
}
template <int N, typename T>
SLUICE_MATH void store(T* to, const Floats<N>& values) {
  const float* v = values.at;
  if constexpr (sizeof(T) == sizeof(float) && N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      __stwb(reinterpret_cast<float4*>(to + i), make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]));
    }
  } else if constexpr (sizeof(T) == 2 && N % 8 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 8) {
      __stwb(reinterpret_cast<uint4*>(to + i), narrow_eight(v + i));
    }
  } else {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N; ++i) narrow(v[i], pack.at[i]);
    *reinterpret_cast<Pack<T, N>*>(to) = pack;
  }
}

// The same, in shared memory.
template <int N>
SLUICE_MATH void store_shared(float* to, const Floats<N>& values) {
  const float* v = values.at;
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      *reinterpret_cast<float4*>(to + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = v[i];
  }
}
template <int N>
SLUICE_MATH void add_to(Floats<N>& sum, const Floats<N>& values) {
#pragma unroll
  for (int i = 0; i < N; ++i) sum.at[i] += values.at[i];
}

// Whether all of the addresses are multiples of 16 bytes; null is. Tensors of stages start at
// multiples of kBufferAlignment: there it is the shape alone that decides which way a kernel takes,
// and with it the order of its sums.
template <typename... T>
[[nodiscard]] __host__ __device__ bool aligned(const T*... data) {
  return ((reinterpret_cast<std::uintptr_t>(data) % 16 == 0) && ...);
}

// Elements that the widest operand type of a kernel moves at once: 8 where one is bf16.
template <typename... T>
inline constexpr int kWide = ((sizeof(T) == 2) || ...) ? 8 : 4;

// Calls body(T{}) with the element type of `dtype`, f32 or bf16.
template <typename Body>
void with_type(DType dtype, const Body& body) {
  if (dtype == DType::kBf16) {
    body(Bf16{});
  } else {
    body(float{});
  }
}

// Calls body(std::integral_constant) with the first of the ascending limits that `value` does not
// exceed, else with the last.
template <int kLimit, int... kHigher, typename Body>
void with_limit(int value, const Body& body) {
  if constexpr (sizeof...(kHigher) > 0) {
    if (value > kLimit) return with_limit<kHigher...>(value, body);
  }
  body(std::integral_constant<int, kLimit>{});
}

// --- loops ---
constexpr unsigned kBlockThreads = 256;
constexpr int64_t kMostBlocks = 65535;  // of a loop that strides over the grid

[[nodiscard]] constexpr int64_t divide_up(int64_t count, int64_t by) {
  return (count + by - 1) / by;
}
// Blocks for `work` pieces, the kernel striding over what is left.
[[nodiscard]] inline unsigned blocks_for(int64_t work, int64_t per_block) {
  const int64_t blocks = divide_up(work, per_block);
  return static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

SLUICE_MATH int64_t grid_thread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
SLUICE_MATH int64_t grid_threads() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// Blocks of a multiprocessor, of which each GPU has as many as its threads allow: 2048 (compute
// capability 8.0, 9.0, 10.0), else 1536 (CUDA C++ Programming Guide, "Compute Capabilities").
[[nodiscard]] constexpr int blocks_at_once(int wanted) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 800 && __CUDA_ARCH__ != 900 && \
    (__CUDA_ARCH__ < 1000 || __CUDA_ARCH__ >= 1200)
  constexpr int kMost = 1536 / kBlockThreads;
#else
  constexpr int kMost = 2048 / kBlockThreads;
#endif
  return wanted < kMost ? wanted : kMost;
}

// body.run<N>(i) for elements [i, i + N), all of [0, count); the rest one by one. A multiprocessor
// has kBlocks blocks at least, as far as its threads and registers go.
template <int N, int kBlocks, typename Body>
__global__ void __launch_bounds__(kBlockThreads, blocks_at_once(kBlocks))
    element_kernel(const Body body, const int64_t count) {
  const int64_t packs = count / N;
  for (int64_t pack = grid_thread(); pack < packs; pack += grid_threads()) {
    body.template run<N>(pack * N);
  }
  const int64_t rest = packs * N + grid_thread();
  if (rest < count) body.template run<1>(rest);
}

// `wide`: the operands are aligned, N elements of each at a time.
template <int N, int kBlocks = 1, typename Body>
void for_elements(ComputeContext& ctx, const char* name, int64_t count, bool wide,
                  const Body& body) {
  if (count == 0) return;
  const int64_t packs = wide ? divide_up(count, N) : count;
  launch(name, wide ? element_kernel<N, kBlocks, Body> : element_kernel<1, kBlocks, Body>,
         {blocks_for(packs, kBlockThreads), kBlockThreads}, native(ctx.stream()), body, count);
}

// body.run<N>(row, column) for columns [column, column + N) of all rows; N divides the width.
template <int N, typename Body>
__global__ void row_kernel(const Body body, const int64_t rows, const int64_t width) {
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    for (int64_t column = grid_thread() * N; column < width; column += grid_threads() * N) {
      body.template run<N>(row, column);
    }
  }
}

// `wide`: the operands and their rows are aligned, N elements of each at a time.
template <int N, typename Body>
void for_rows(ComputeContext& ctx, const char* name, int64_t rows, int64_t width, bool wide,
              const Body& body) {
  if (rows == 0 || width == 0) return;
  const int64_t packs = wide ? width / N : width;
  const auto threads = static_cast<unsigned>(
      packs < kBlockThreads ? divide_up(packs, kWarpThreads) * kWarpThreads : kBlockThreads);
  launch(name, wide ? row_kernel<N, Body> : row_kernel<1, Body>,
         {dim3(blocks_for(packs, threads), blocks_for(rows, 1)), threads}, native(ctx.stream()),
         body, rows, width);
}

}  // namespace sluice::cuda
