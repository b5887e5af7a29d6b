// Sums over the rows of a matrix, several per column, in two passes: slices of rows to partial
// sums, then partial sums, in order, to what they are added to. The slices are a function of the
// number of rows alone.
#pragma once

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
// [column, column + N). Grid: column tiles of 32 N, slices of slice_rows rows. The target is
// indexed where it lies, in the parameters: a copy would be local memory.
template <int N, typename Terms>
__global__ void __launch_bounds__(kSumWarps* kWarpThreads)
    column_sums_kernel(const Terms terms, const int64_t rows, const int64_t width,
                       const int64_t slice_rows,
                       const __grid_constant__ ColumnSumsTarget<Terms::kTerms> target) {
  constexpr int kTerms = Terms::kTerms, kTile = kWarpThreads * N;
  __shared__ float shared[kSumWarps][kTerms][kTile];
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
#pragma unroll
    for (int i = 0; i < N; ++i) shared[warp][term][lane * N + i] = sums[term].at[i];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kTerms * kTile; i += kSumWarps * kWarpThreads) {
    const int term = i / kTile, place = i % kTile;
    if (tile + place >= width) continue;
    float sum = 0;
    for (int from = 0; from < kSumWarps; ++from) sum += shared[from][term][place];
    float* to = target.out[term] + slice * width + tile + place;
    *to = target.add ? *to + sum : sum;
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
      const Floats<N> values = load<N>(partial + term * size + row * width + column);
#pragma unroll
      for (int i = 0; i < N; ++i) sums[term].at[i] += values.at[i];
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

// out[term] [width] += the sums of `terms` over all rows. `wide`: N columns at a time; operands and
// rows are aligned for it.
template <int N, typename Terms>
void add_sums(ComputeContext& ctx, const char* name, const Terms& terms, int64_t rows,
              int64_t width, bool wide, float* const (&out)[Terms::kTerms]) {
  constexpr int kTerms = Terms::kTerms;
  if (rows == 0 || width == 0) return;
  const auto [slice_rows, slices] = row_slices(rows);
  const auto run = [&](auto matrix, int64_t count, int64_t slice, bool packs,
                       const ColumnSumsTarget<kTerms>& target) {
    using Matrix = decltype(matrix);
    const int64_t tile = kWarpThreads * (packs ? N : 1);
    const dim3 grid(static_cast<unsigned>(divide_up(width, tile)),
                    static_cast<unsigned>(divide_up(count, slice)));
    launch(name, packs ? column_sums_kernel<N, Matrix> : column_sums_kernel<1, Matrix>,
           {grid, kSumWarps * kWarpThreads}, native(ctx.stream()), matrix, count, width, slice,
           target);
  };
  ColumnSumsTarget<kTerms> last{{}, true};
  for (int term = 0; term < kTerms; ++term) last.out[term] = out[term];
  if (slices == 1) {
    run(terms, rows, slice_rows, wide, last);
    return;
  }
  const int64_t size = slices * width;
  auto* partial = reinterpret_cast<float*>(ctx.workspace(partial_sums_bytes(rows, width, kTerms)));
  ColumnSumsTarget<kTerms> first{{}, false};
  for (int term = 0; term < kTerms; ++term) first.out[term] = partial + term * size;
  run(terms, rows, slice_rows, wide, first);
  run(PartialSums<kTerms>{partial, size, width}, slices, slices, false, last);
}

}  // namespace sluice::cuda
