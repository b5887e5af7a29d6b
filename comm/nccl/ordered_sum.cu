#include <algorithm>
#include <cstdint>

#include <sluice/cuda.hpp>

#include "comm/nccl/ordered_sum.hpp"

namespace sluice {

namespace {

constexpr unsigned kThreads = 256;
constexpr std::size_t kMostBlocks = 2048;  // more elements than threads: each takes several

__device__ inline float add(float a, float b) { return a + b; }
__device__ inline float4 add(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// `stride` and `count` in values of type T. Values of one place are read by the thread that writes
// there, so `own` may be read and written.
template <typename T>
__global__ void sum_shards(T* own, const T* others, std::size_t stride, std::size_t count,
                           int ranks, int rank) {
  const std::size_t threads = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += threads) {
    const T mine = own[i];
    const T* next = others + i;
    T sum = mine;
    for (int term = 0; term < ranks; ++term) {
      T value = mine;
      if (term != rank) {
        value = *next;
        next += stride;
      }
      sum = term == 0 ? value : add(sum, value);
    }
    own[i] = sum;
  }
}

template <typename T>
void launch_as(const ShardSum& sum, StreamView stream) {
  constexpr std::size_t kWidth = sizeof(T) / sizeof(float);
  const std::size_t count = sum.count / kWidth;
  const std::size_t blocks = std::min(kMostBlocks, (count + kThreads - 1) / kThreads);
  const cuda::LaunchShape shape{dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0};
  cuda::launch("sum over replicas", &sum_shards<T>, shape,
               static_cast<cudaStream_t>(stream.native()), reinterpret_cast<T*>(sum.own),
               reinterpret_cast<const T*>(sum.others), sum.stride / kWidth, count, sum.ranks,
               sum.rank);
}

}  // namespace

void launch_shard_sum(const ShardSum& sum, StreamView stream) {
  if (sum.count == 0) return;
  const auto address =
      reinterpret_cast<std::uintptr_t>(sum.own) | reinterpret_cast<std::uintptr_t>(sum.others);
  const bool by_four = address % sizeof(float4) == 0 && sum.stride % 4 == 0 && sum.count % 4 == 0;
  if (by_four) {
    launch_as<float4>(sum, stream);
  } else {
    launch_as<float>(sum, stream);
  }
}

}  // namespace sluice
