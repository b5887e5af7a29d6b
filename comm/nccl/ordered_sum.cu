#include <algorithm>
#include <cstdint>

#include <sluice/cuda.hpp>

#include "comm/nccl/ordered_sum.hpp"

namespace sluice {

namespace {

constexpr unsigned kThreads = 256;
constexpr std::size_t kMostBlocks = 2048;  // more elements than threads: each takes several
// Of the tree of comm/base/sum_tree.hpp. More levels take more registers.
constexpr int kFewLevels = 4;
constexpr int kMostLevels = 16;

__device__ inline float add(float a, float b) { return a + b; }
__device__ inline float4 add(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// `stride` and `count` in values of type T, less than 2^kLevels ranks. Values of one place are read
// by the thread that writes there, so `own` may be read and written. Level l is the sum of 2^l
// ranks where bit l of `came` is set.
template <typename T, int kLevels>
__global__ void sum_shards(T* own, const T* others, std::size_t stride, std::size_t count,
                           int ranks, int rank) {
  const std::size_t threads = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += threads) {
    const T mine = own[i];
    std::size_t next = i;  // in `others`, which is null for one rank
    T levels[kLevels] = {};
    for (int came = 0; came < ranks; ++came) {
      T sum = mine;
      if (came != rank) {
        sum = others[next];
        next += stride;
      }
      bool carries = true;
#pragma unroll
      for (int level = 0; level < kLevels; ++level) {  // constant indices: registers
        if (!carries) continue;
        carries = ((came >> level) & 1) != 0;
        if (carries) sum = add(levels[level], sum);
        if (!carries) levels[level] = sum;
      }
    }
    T sum = {};
    bool any = false;
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      if (((ranks >> level) & 1) == 0) continue;
      sum = any ? add(levels[level], sum) : levels[level];
      any = true;
    }
    own[i] = sum;
  }
}

template <typename T, int kLevels>
void launch_as(const ShardSum& sum, StreamView stream) {
  constexpr std::size_t kWidth = sizeof(T) / sizeof(float);
  const std::size_t count = sum.count / kWidth;
  const std::size_t blocks = std::min(kMostBlocks, (count + kThreads - 1) / kThreads);
  const cuda::LaunchShape shape{dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0};
  cuda::launch("sum over ranks", &sum_shards<T, kLevels>, shape,
               static_cast<cudaStream_t>(stream.native()), reinterpret_cast<T*>(sum.own),
               reinterpret_cast<const T*>(sum.others), sum.stride / kWidth, count, sum.ranks,
               sum.rank);
}

template <int kLevels>
void launch_with(const ShardSum& sum, StreamView stream) {
  const auto address =
      reinterpret_cast<std::uintptr_t>(sum.own) | reinterpret_cast<std::uintptr_t>(sum.others);
  const bool by_four = address % sizeof(float4) == 0 && sum.stride % 4 == 0 && sum.count % 4 == 0;
  if (by_four) {
    launch_as<float4, kLevels>(sum, stream);
  } else {
    launch_as<float, kLevels>(sum, stream);
  }
}

}  // namespace

void launch_shard_sum(const ShardSum& sum, StreamView stream) {
  if (sum.count == 0) return;
  if (sum.ranks < 1 << kFewLevels) {
    launch_with<kFewLevels>(sum, stream);
  } else {
    launch_with<kMostLevels>(sum, stream);
  }
}

}  // namespace sluice
