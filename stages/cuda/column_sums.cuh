// Sums over the rows of a matrix, several per column, in two passes: slices of rows to partial
// sums, then partial sums, in order, to what they are added to. The slices are a function of the
// number of rows alone.
#pragma once

#include <type_traits>

#include "stages/cuda/elements.cuh"

namespace sluice::cuda {

constexpr int kSumWarps = 8;  // of a block: each takes every eighth row

// Where the sums of one slice go: out[term][slice * width + column], added or overwritten.
template <int kTerms>
struct ColumnSumsTarget {
  float* out[kTerms];
  bool add;
};

// Terms::kTerms sums per column; terms.add<N>(row, column, sums) adds row's share for columns
// [column, column + N); N divides the width and, with the target's alignment, allows
// 16-byte accesses, or is 1. Grid: column tiles of 32 N, slices of slice_rows rows. The target is
// indexed where it lies, in the parameters: a copy would be local memory.
template <int N, typename Terms>
__global__ void __launch_bounds__(kSumWarps* kWarpThreads)
    column_sums_kernel(const Terms terms, const int64_t rows, const int64_t width,
                       const int64_t slice_rows,
                       const __grid_constant__ ColumnSumsTarget<Terms::kTerms> target) {
  constexpr int kTerms = Terms::kTerms, kTile = kWarpThreads * N;
  constexpr int kPack = N % 4 == 0 ? 4 : 1;  // columns that a thread puts together
  alignas(16) __shared__ float shared[kSumWarps][kTerms][kTile];
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * kTile;
  const int64_t slice = blockIdx.y;
  const int64_t column = tile + lane * N;
  const int64_t end = (slice + 1) * slice_rows < rows ? (slice + 1) * slice_rows : rows;
  Floats<N> sums[kTerms] = {};
  if (column < width) {
#pragma unroll 4
    for (int64_t row = slice * slice_rows + warp; row < end; row += kSumWarps) {
      terms.template add<N>(row, column, sums);
    }
  }
#pragma unroll
  for (int term = 0; term < kTerms; ++term) {
    store_shared(&shared[warp][term][lane * N], sums[term]);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x) * kPack; i < kTerms * kTile;
       i += kSumWarps * kWarpThreads * kPack) {
    const int term = i / kTile, place = i % kTile;
    if (tile + place >= width) continue;
    Floats<kPack> sum = {};
    for (int from = 0; from < kSumWarps; ++from) {
      add_to(sum, load<kPack>(&shared[from][term][place]));
    }
    float* to = target.out[term] + slice * width + tile + place;
    if (target.add) {
      Floats<kPack> old = load<kPack>(to);
      add_to(old, sum);
      sum = old;
    }
    store(to, sum);
  }
}

// The partial sums as a matrix of their own: [slices, width] for each term.
template <int kCount>
struct PartialSums {
  static constexpr int kTerms = kCount;
  const float* partial;
  int64_t size;  // of one term's matrix
  int64_t width;
  template <int N>
  __device__ void add(int64_t row, int64_t column, Floats<N> (&sums)[kTerms]) const {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      add_to(sums[term], load<N>(partial + term * size + row * width + column));
    }
  }
};

// How the rows are cut, and what the partial sums of `terms` sums per column take.
struct RowSlices {
  int64_t rows;  // of a slice
  int64_t count;
};

inline RowSlices row_slices(int64_t rows) {
  constexpr int64_t kLeastRows = 64, kMostSlices = 96;
  const int64_t least = divide_up(rows, kMostSlices);
  const int64_t each = divide_up(least < kLeastRows ? kLeastRows : least, kSumWarps) * kSumWarps;
  return {each, divide_up(rows, each)};
}

inline std::size_t partial_sums_bytes(int64_t rows, int64_t width, int terms) {
  const int64_t slices = row_slices(rows).count;
  return slices <= 1 ? 0 : static_cast<std::size_t>(terms * slices * width) * sizeof(float);
}

// out[term] [width] += the sums of `terms` over all rows. `wide`: N columns at a time; operands,
// rows and `out` are aligned for it. The sums are the same either way.
template <int N, typename Terms>
void add_sums(ComputeContext& ctx, const char* name, const Terms& terms, int64_t rows,
              int64_t width, bool wide, float* const (&out)[Terms::kTerms]) {
  constexpr int kTerms = Terms::kTerms;
  if (rows == 0 || width == 0) return;
  const auto [slice_rows, slices] = row_slices(rows);
  const auto run = [&](auto at_once, auto matrix, int64_t count, int64_t slice,
                       const ColumnSumsTarget<kTerms>& target) {
    using Matrix = decltype(matrix);
    constexpr int kAtOnce = decltype(at_once)::value;
    const int64_t tile = kWarpThreads * (wide ? kAtOnce : 1);
    const dim3 grid(static_cast<unsigned>(divide_up(width, tile)),
                    static_cast<unsigned>(divide_up(count, slice)));
    launch(name, wide ? column_sums_kernel<kAtOnce, Matrix> : column_sums_kernel<1, Matrix>,
           {grid, kSumWarps * kWarpThreads}, native(ctx.stream()), matrix, count, width, slice,
           target);
  };
  using AtOnce = std::integral_constant<int, N>;
  using FloatsAtOnce = std::integral_constant<int, kWide<float>>;
  ColumnSumsTarget<kTerms> last{{}, true};
  for (int term = 0; term < kTerms; ++term) last.out[term] = out[term];
  if (slices == 1) {
    run(AtOnce{}, terms, rows, slice_rows, last);
    return;
  }
  const int64_t size = slices * width;
  auto* partial = reinterpret_cast<float*>(ctx.workspace(partial_sums_bytes(rows, width, kTerms)));
  ColumnSumsTarget<kTerms> first{{}, false};
  for (int term = 0; term < kTerms; ++term) first.out[term] = partial + term * size;
  run(AtOnce{}, terms, rows, slice_rows, first);
  run(FloatsAtOnce{}, PartialSums<kTerms>{partial, size, width}, slices, slices, last);
}

}  // namespace sluice::cuda
