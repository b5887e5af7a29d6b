// Sums over the rows of a matrix, several per column, in one launch: blocks add up slices of rows,
// and the last block to end in a tile of columns adds up the slices' sums, in a fixed order
// whichever block that is. The slices are a function of the number of rows alone.
#pragma once

#include "stages/cuda_context/context.hpp"
#include "stages/cuda_kernels/elements.cuh"

namespace sluice::cuda {

constexpr int kTileLanes = 16;  // threads side by side in a row
constexpr int kTileRows = 16;   // rows that a block reads side by side: each takes every 16th

// kTerms sums for each column of a block's tile: those of `count` > 0 rows from `first` on,
// put(term, column, sum) each by one thread. To be reached by all threads; the next __syncthreads()
// frees `shared`.
//
// Matrix: `kTerms`; load<N>(row, column) reads what columns [column, column + N) of a row take;
// add(that, sums) adds their share; kRowsAtOnce rows of a thread are read before any is added.
template <int N, typename Matrix, typename Put>
__device__ void sum_tile(const Matrix& matrix, int64_t first, int count, int64_t tile,
                         int64_t width, float (&shared)[kTileRows][Matrix::kTerms][kTileLanes * N],
                         const Put& put) {
  constexpr int kTerms = Matrix::kTerms, kTile = kTileLanes * N, kAtOnce = Matrix::kRowsAtOnce;
  static_assert(kTerms * kTile <= kTileLanes * kTileRows);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kTileLanes, start = thread / kTileLanes;
  const int64_t column = tile + lane * N;
  Floats<N> sums[kTerms] = {};
  if (column < width) {
#pragma unroll 1
    for (int row = start; row < count; row += kAtOnce * kTileRows) {
      decltype(matrix.template load<N>(first, column)) rows[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {  // no branch: all at once, the last again
        rows[k] = matrix.template load<N>(first + min(row + k * kTileRows, count - 1), column);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (row + k * kTileRows < count) matrix.add(rows[k], sums);
      }
    }
  }
#pragma unroll
  for (int term = 0; term < kTerms; ++term) {
    store_shared(&shared[start][term][lane * N], sums[term]);
  }
  __syncthreads();
  const int term = thread / kTile, place = thread % kTile;
  if (term < kTerms && tile + place < width) {
    float sum = 0;
#pragma unroll
    for (int from = 0; from < kTileRows; ++from) sum += shared[from][term][place];
    put(term, tile + place, sum);
  }
}

// The slices' sums: a matrix [slices, width] for each term.
template <int kCount>
struct SliceSums {
  static constexpr int kTerms = kCount, kRowsAtOnce = 4 / kCount;
  const float* sums;
  int64_t slices, width;
  template <int N>
  struct Row {
    Floats<N> at[kTerms];
  };
  template <int N>
  __device__ Row<N> load(int64_t slice, int64_t column) const {
    Row<N> row;
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      row.at[term] = cuda::load<N>(sums + (term * slices + slice) * width + column);
    }
    return row;
  }
  template <int N>
  __device__ void add(const Row<N>& row, Floats<N> (&to)[kTerms]) const {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) add_to(to[term], row.at[term]);
  }
};

// Where the sums go. It is indexed where it lies, in the parameters: a copy would be local memory.
template <int kTerms>
struct ColumnSums {
  float* out[kTerms];  // [width]
  bool adds;           // to them
  float* slices;       // [kTerms, slices, width], scratch
  unsigned* tickets;   // one for each tile

  __device__ void write(int term, int64_t column, float sum) const {
    float* const to = out[term] + column;
    *to = adds ? *to + sum : sum;
  }
};

// Grid: column tiles of kTileLanes N from `first_column` on, slices of slice_rows rows. N divides
// the width and, with the matrix's alignment, allows 16-byte accesses, or is 1.
template <int N, typename Matrix>
__global__ void __launch_bounds__(kTileLanes* kTileRows, 4)
    column_sums_kernel(const Matrix matrix, const int64_t rows, const int64_t width,
                       const int64_t slice_rows, const int64_t first_column,
                       const ColumnSums<Matrix::kTerms> __grid_constant__ target) {
  constexpr int kTerms = Matrix::kTerms;
  alignas(16) __shared__ float shared[kTileRows][kTerms][kTileLanes * N];
  const int64_t tile = first_column + static_cast<int64_t>(blockIdx.x) * kTileLanes * N;
  const int64_t slice = blockIdx.y, slices = gridDim.y;
  const int64_t first = slice * slice_rows;
  const auto count = static_cast<int>(min(slice_rows, rows - first));
  sum_tile<N>(matrix, first, count, tile, width, shared, [&](int term, int64_t column, float sum) {
    if (slices == 1) {
      target.write(term, column, sum);
    } else {
      target.slices[(term * slices + slice) * width + column] = sum;
    }
  });
  if (slices == 1 || !last_block(target.tickets + blockIdx.x, gridDim.y)) return;
  sum_tile<N>(SliceSums<kTerms>{target.slices, slices, width}, 0, static_cast<int>(slices), tile,
              width, shared,
              [&](int term, int64_t column, float sum) { target.write(term, column, sum); });
}

// How the rows are cut, and what the slices' sums of `terms` sums per column take.
struct RowSlices {
  int64_t rows;  // of a slice
  int64_t count;
};

inline RowSlices row_slices(int64_t rows) {
  constexpr int64_t kLeastRows = 64, kMostSlices = 64;
  const int64_t each = divide_up(divide_up(rows, kMostSlices), kLeastRows) * kLeastRows;
  return {each, divide_up(rows, each)};
}

inline std::size_t column_sums_bytes(int64_t rows, int64_t width, int terms) {
  const int64_t slices = row_slices(rows).count;
  return slices <= 1 ? 0 : static_cast<std::size_t>(terms * slices * width) * sizeof(float);
}

// What no rows leave of out[term] [width], of those that are not null.
template <int kTerms>
void zero_sums(ComputeContext& ctx, int64_t width, Write write, float* const (&out)[kTerms]) {
  if (write == Write::kAdd) return;
  for (float* each : out) {
    if (each == nullptr) continue;
    fill_zero_async(each, static_cast<std::size_t>(width) * sizeof(float), ctx.stream());
  }
}

// out[term] [width] += or = the sums over all rows. `wide`: N columns at a time; the matrix and its
// rows are aligned for it. The sums are the same either way.
template <int N, typename Matrix>
void write_sums(ComputeContext& ctx, const char* name, const Matrix& matrix, int64_t rows,
                int64_t width, bool wide, Write write, float* const (&out)[Matrix::kTerms]) {
  constexpr int kTerms = Matrix::kTerms;
  if (rows == 0) return zero_sums(ctx, width, write, out);
  if (width == 0) return;
  const auto [slice_rows, slices] = row_slices(rows);
  ColumnSums<kTerms> target{};
  target.adds = write == Write::kAdd;
  for (int term = 0; term < kTerms; ++term) target.out[term] = out[term];
  if (slices > 1) {
    target.slices = reinterpret_cast<float*>(ctx.workspace(column_sums_bytes(rows, width, kTerms)));
    target.tickets = context_of(ctx).tickets();
  }
  const int64_t tile = kTileLanes * (wide ? N : 1);
  for (int64_t first = 0; first < width; first += tile * Context::kTickets) {
    const int64_t tiles = divide_up(width - first, tile);
    const dim3 grid(static_cast<unsigned>(tiles < Context::kTickets ? tiles : Context::kTickets),
                    static_cast<unsigned>(slices));
    launch(name, wide ? column_sums_kernel<N, Matrix> : column_sums_kernel<1, Matrix>,
           {grid, kTileLanes * kTileRows}, native(ctx.stream()), matrix, rows, width, slice_rows,
           first, target);
  }
}

}  // namespace sluice::cuda
