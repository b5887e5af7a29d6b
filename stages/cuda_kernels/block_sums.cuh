// Sums in double by one block of threads in a fixed order: over kSumBlock elements, and over the
// sums of those. Results depend only on the number of elements.
#pragma once

#include "stages/cuda_kernels/elements.cuh"

namespace sluice::cuda {

constexpr int kSumThreads = 512;
constexpr int kSumPack = 4;  // consecutive elements that a thread takes

// In every thread, for a block of kSumThreads: the sum over elements [first, end), of which
// terms.add<N>(i, sum) adds [i, i + N) in order. `wide`: kSumPack of them can be read at once from
// `first` on; the order is the same where they cannot.
template <typename Terms>
__device__ double sum_of_range(const Terms& terms, int64_t first, int64_t end, bool wide) {
  const int64_t packs = (end - first) / kSumPack;
  double sum = 0;
  if (wide) {
#pragma unroll 4
    for (int64_t pack = threadIdx.x; pack < packs; pack += kSumThreads) {
      terms.template add<kSumPack>(first + pack * kSumPack, sum);
    }
  } else {
    for (int64_t pack = threadIdx.x; pack < packs; pack += kSumThreads) {
#pragma unroll
      for (int k = 0; k < kSumPack; ++k) terms.template add<1>(first + pack * kSumPack + k, sum);
    }
  }
  const int64_t rest = first + packs * kSumPack + threadIdx.x;
  if (rest < end) terms.template add<1>(rest, sum);
  return block_sum<kSumThreads>(sum);
}

// Terms that are kept themselves.
struct Doubles {
  const double* values;
  template <int N>
  __device__ void add(int64_t i, double& sum) const {
    const auto pack = *reinterpret_cast<const Pack<double, N>*>(values + i);
#pragma unroll
    for (int k = 0; k < N; ++k) sum += pack.at[k];
  }
};

}  // namespace sluice::cuda
