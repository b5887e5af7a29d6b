// What the kernels of LayerNorm and RMSNorm share: rows of the residual stream, and packs of a row
// that the lanes of a warp keep.
#pragma once

#include <sluice/operators.hpp>

#include "stages/cuda_kernels/elements.cuh"

namespace sluice::cuda {

enum class Norm { kLayer, kRms };

constexpr int kRowsPerBlock = 4;

struct NormShape {
  int64_t rows, width;
};

inline NormShape shape_of(const Tensor& x, const Tensor& gamma) {
  const int64_t width = gamma.elements();
  return {width == 0 ? 0 : x.elements() / width, width};
}

// body(row, lane) for the row of the thread's warp, if there is one. No loop over a grid's shares:
// it would keep addresses in registers from row to row.
template <typename Body>
__device__ void for_warp_row(int64_t rows, const Body& body) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarpThreads;
  if (row < rows) body(row, lane);
}

inline LaunchShape warp_rows(int64_t rows) {
  return {static_cast<unsigned>(divide_up(rows, kRowsPerBlock)), kRowsPerBlock * kWarpThreads};
}

// A lane's packs of N in a row: body(pack, i) for each that starts at i. kPacks is the most there
// are of them; 0: any number, all called pack 0.
template <int N, int kPacks, typename Body>
__device__ void for_packs(int64_t width, int lane, const Body& body) {
  if constexpr (kPacks > 0) {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      const int64_t i = lane * N + int64_t{pack} * kWarpThreads * N;
      if (i < width) body(pack, i);
    }
  } else {
    for (int64_t i = lane * N; i < width; i += kWarpThreads * N) body(0, i);
  }
}

}  // namespace sluice::cuda
