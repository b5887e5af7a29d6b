// LayerNorm and RMSNorm, backward. One pass over the rows writes the input's gradient, its bf16
// copy and the sums of the weights' gradients: blocks take slices of rows, a thread the same
// columns of all of a block's rows, so that it adds up their shares in registers. A second kernel
// adds up the slices' sums. The slices are a function of the number of rows alone, and a pass that
// leaves one of the results out adds in the same order.
//
// Rows that are too wide for a block of threads, or not aligned, take a warp per row for the
// input's gradient, and a pass of their own for the weights'.
#include "stages/cuda_kernels/column_sums.cuh"
#include "stages/cuda_kernels/kernels.hpp"
#include "stages/cuda_kernels/norm.cuh"

namespace sluice::cuda {

namespace {

// Residual, dx and rounded may be null.
template <typename T, typename X>
struct Backward {
  const T* dy;
  const X* x;
  const float* gamma;
  const float* stats;
  const X* residual;
  X* dx;
  Bf16* rounded;
  NormShape shape;

  template <int N>
  __device__ void put(int64_t i, const Floats<N>& values) const {
    store(dx + i, values);
    if (rounded != nullptr) store(rounded + i, values);
  }
};

template <Norm kNorm>
__device__ NormGradient gradient_of(float mean, float rstd, float sum, float dot, int64_t width) {
  const float inverse = 1.0F / static_cast<float>(width);
  if constexpr (kNorm == Norm::kLayer) {
    return layer_norm_gradient(mean, rstd, sum, dot, inverse);
  } else {
    return rms_norm_gradient(rstd, dot, inverse);
  }
}
template <Norm kNorm>
__device__ float change_of(const NormGradient& gradient, float g, float x) {
  return kNorm == Norm::kLayer ? layer_norm_change(gradient, g, x)
                               : rms_norm_change(gradient, g, x);
}

// --- slices of rows ---
constexpr int kMostColumnThreads = 512;  // of a block

template <Norm kNorm>
inline constexpr int kWeightTerms = kNorm == Norm::kLayer ? 2 : 1;

// Rows of a slice: enough blocks for a GPU, few sums.
constexpr int64_t kLeastRows = 16, kMostSlices = 512;
inline RowSlices norm_slices(int64_t rows) {
  const int64_t each = divide_up(divide_up(rows, kMostSlices), kLeastRows) * kLeastRows;
  return {each, divide_up(rows, each)};
}

// At least what the slices' sums of so many rows, or fewer, take.
std::size_t slices_bytes(int64_t rows, int64_t width, int terms) {
  const int64_t slices = divide_up(rows, kLeastRows);
  return static_cast<std::size_t>(terms * (slices < kMostSlices ? slices : kMostSlices) * width) *
         sizeof(float);
}

// N elements as they are kept until they are used: bf16 as it lies in memory.
template <int N, typename T>
using Held = std::conditional_t<std::is_same_v<T, float>, Floats<N>, Pack<T, N>>;
template <int N, typename T>
__device__ Held<N, T> hold(const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    return load<N>(from);
  } else {
    return *reinterpret_cast<const Pack<T, N>*>(from);
  }
}

// Sums of two numbers over a block, in every thread, in the order of lanes, then of warps. `shared`
// is free again when the block has passed the next barrier but one.
__device__ inline void block_sums(float& first, float& second,
                                  float2 (&shared)[kMostColumnThreads / kWarpThreads]) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int warps = static_cast<int>(blockDim.x) / kWarpThreads;
  first = warp_sum(first);
  second = warp_sum(second);
  if (threadIdx.x % kWarpThreads == 0) shared[warp] = make_float2(first, second);
  __syncthreads();
  first = second = 0;
  for (int other = 0; other < warps; ++other) {
    first += shared[other].x;
    second += shared[other].y;
  }
}

// What a thread reads of a row.
template <Norm kNorm, int N, bool kInput, typename T, typename X>
struct RowPart {
  Held<N, T> dy;
  Held<N, X> x, residual;
  float mean, rstd;

  __device__ void read(const Backward<T, X>& a, int64_t row, int64_t column) {
    const int64_t i = row * a.shape.width + column;
    dy = hold<N>(a.dy + i);
    x = hold<N>(a.x + i);
    if (kInput && a.residual != nullptr) residual = hold<N>(a.residual + i);
    mean = kNorm == Norm::kLayer ? a.stats[2 * row] : 0.0F;
    rstd = kNorm == Norm::kLayer ? a.stats[2 * row + 1] : a.stats[row];
  }
};

// dx of a thread's columns of a row. To be reached by all threads; `mine`: whether they are its
// own.
template <Norm kNorm, int N, typename T, typename X>
__device__ void put_input(const Backward<T, X>& a, const RowPart<kNorm, N, true, T, X>& part,
                          const Floats<N>& gamma, int64_t row, int64_t column, bool mine,
                          float2 (&shared)[kMostColumnThreads / kWarpThreads]) {
  float sum = 0, dot = 0;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float g = widen(part.dy.at[k]) * gamma.at[k];
    sum += g;
    dot = fma(g, widen(part.x.at[k]) - part.mean, dot);
  }
  if (!mine) sum = dot = 0;
  block_sums(sum, dot, shared);
  const NormGradient gradient = gradient_of<kNorm>(part.mean, part.rstd, sum, dot, a.shape.width);
  Floats<N> dx;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float g = widen(part.dy.at[k]) * gamma.at[k], x = widen(part.x.at[k]);
    dx.at[k] = (a.residual == nullptr ? 0.0F : widen(part.residual.at[k])) +
               change_of<kNorm>(gradient, g, x);
  }
  if (mine) a.put(row * a.shape.width + column, dx);
}

// Grid: slices. Threads: a multiple of a warp, of N columns each.
template <Norm kNorm, int N, bool kInput, bool kWeights, typename T, typename X>
__global__ void __launch_bounds__(kMostColumnThreads)
    slices_kernel(const Backward<T, X> a, const int64_t slice_rows, float* const slices) {
  __shared__ float2 shared[2][kMostColumnThreads / kWarpThreads];
  const int64_t width = a.shape.width, thread_column = static_cast<int64_t>(threadIdx.x) * N;
  const bool mine = thread_column < width;
  const int64_t column = mine ? thread_column : 0;  // read by others, of no use
  const int64_t first = static_cast<int64_t>(blockIdx.x) * slice_rows;
  const int64_t end = first + slice_rows < a.shape.rows ? first + slice_rows : a.shape.rows;
  const Floats<N> gamma = load<N>(a.gamma + column);
  Floats<N> dgamma = {}, dbeta = {};
  RowPart<kNorm, N, kInput, T, X> next;
  next.read(a, first, column);
#pragma unroll 1
  for (int64_t row = first; row < end; ++row) {
    const RowPart<kNorm, N, kInput, T, X> part = next;
    next.read(a, row + 1 < end ? row + 1 : row, column);
    if constexpr (kWeights) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float d = widen(part.dy.at[k]), v = widen(part.x.at[k]);
        const float normal = kNorm == Norm::kLayer ? (v - part.mean) * part.rstd : v * part.rstd;
        dgamma.at[k] = fma(d, normal, dgamma.at[k]);
        if constexpr (kNorm == Norm::kLayer) dbeta.at[k] += d;
      }
    }
    if constexpr (kInput) {
      put_input<kNorm, N>(a, part, gamma, row, column, mine, shared[(row - first) % 2]);
    }
  }
  if (!kWeights || !mine) return;
  float* const sums = slices + static_cast<int64_t>(blockIdx.x) * width + column;
  store(sums, dgamma);
  if constexpr (kNorm == Norm::kLayer) store(sums + gridDim.x * width, dbeta);
}

// out[term] [width] += or = the slices' sums. Grid: tiles of kTileLanes columns.
template <int kTerms>
struct SliceColumns : SliceSums<kTerms> {
  static constexpr int kRowsAtOnce = 8;
};
template <int kTerms>
__global__ void __launch_bounds__(kTileLanes* kTileRows)
    add_slices_kernel(const SliceColumns<kTerms> sums,
                      const ColumnSums<kTerms> __grid_constant__ target) {
  __shared__ float shared[kTileRows][kTerms][kTileLanes];
  sum_tile<1>(sums, 0, static_cast<int>(sums.slices), static_cast<int64_t>(blockIdx.x) * kTileLanes,
              sums.width, shared,
              [&](int term, int64_t column, float sum) { target.write(term, column, sum); });
}

template <Norm kNorm, int N, typename T, typename X>
void run_slices(ComputeContext& ctx, const Backward<T, X>& a, Write write,
                float* const (&out)[kWeightTerms<kNorm>]) {
  constexpr int kTerms = kWeightTerms<kNorm>;
  const auto [rows, count] = norm_slices(a.shape.rows);
  const auto threads =
      static_cast<unsigned>(divide_up(a.shape.width, N * kWarpThreads) * kWarpThreads);
  const bool weights = out[0] != nullptr;
  float* slices = nullptr;
  if (weights) {
    slices =
        reinterpret_cast<float*>(ctx.workspace(slices_bytes(a.shape.rows, a.shape.width, kTerms)));
  }
  const auto kernel = a.dx == nullptr ? slices_kernel<kNorm, N, false, true, T, X>
                      : weights       ? slices_kernel<kNorm, N, true, true, T, X>
                                      : slices_kernel<kNorm, N, true, false, T, X>;
  const char* const name = kNorm == Norm::kLayer ? "layer norm backward" : "rms norm backward";
  const cudaStream_t stream = native(ctx.stream());
  launch(name, kernel, {static_cast<unsigned>(count), threads}, stream, a, rows, slices);
  if (!weights) return;
  ColumnSums<kTerms> target{};
  target.adds = write == Write::kAdd;
  for (int term = 0; term < kTerms; ++term) target.out[term] = out[term];
  launch("sums of norm weights", add_slices_kernel<kTerms>,
         {static_cast<unsigned>(divide_up(a.shape.width, kTileLanes)), kTileLanes * kTileRows},
         stream, SliceColumns<kTerms>{{slices, count, a.shape.width}}, target);
}

// --- a warp per row ---
// A row is read twice, the second time from the cache.
template <Norm kNorm, int N, typename T, typename X>
__global__ void __launch_bounds__(kRowsPerBlock* kWarpThreads) row_kernel(const Backward<T, X> a) {
  const int64_t width = a.shape.width;
  for_warp_row(a.shape.rows, [&](int64_t row, int lane) {
    const float mean = kNorm == Norm::kLayer ? a.stats[2 * row] : 0.0F;
    const float rstd = kNorm == Norm::kLayer ? a.stats[2 * row + 1] : a.stats[row];
    float sum = 0, dot = 0;
    for_packs<N, 0>(width, lane, [&](int, int64_t i) {
      const Floats<N> dy = load<N>(a.dy + row * width + i), x = load<N>(a.x + row * width + i);
      const Floats<N> gamma = load<N>(a.gamma + i);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float g = dy.at[k] * gamma.at[k];
        sum += g;
        dot = fma(g, x.at[k] - mean, dot);
      }
    });
    const NormGradient gradient =
        gradient_of<kNorm>(mean, rstd, warp_sum(sum), warp_sum(dot), width);
    for_packs<N, 0>(width, lane, [&](int, int64_t i) {
      const int64_t at = row * width + i;
      const Floats<N> dy = load<N>(a.dy + at), x = load<N>(a.x + at);
      const Floats<N> gamma = load<N>(a.gamma + i);
      Floats<N> dx = {};
      if (a.residual != nullptr) dx = load<N>(a.residual + at);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        dx.at[k] += change_of<kNorm>(gradient, dy.at[k] * gamma.at[k], x.at[k]);
      }
      a.put(at, dx);
    });
  });
}

// Shares of dgamma and, for LayerNorm, dbeta.
template <Norm kNorm, typename T, typename X>
struct WeightTerms {
  static constexpr int kTerms = kNorm == Norm::kLayer ? 2 : 1, kRowsAtOnce = 2;
  const T* dy;
  const X* x;
  const float* stats;
  int64_t width;
  template <int N>
  struct Row {
    Floats<N> dy, x;
    float mean, rstd;
  };
  template <int N>
  __device__ Row<N> load(int64_t row, int64_t column) const {
    const float mean = kNorm == Norm::kLayer ? stats[2 * row] : 0.0F;
    const float rstd = kNorm == Norm::kLayer ? stats[2 * row + 1] : stats[row];
    return {cuda::load<N>(dy + row * width + column), cuda::load<N>(x + row * width + column), mean,
            rstd};
  }
  template <int N>
  __device__ void add(const Row<N>& row, Floats<N> (&sums)[kTerms]) const {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float d = row.dy.at[k], v = row.x.at[k];
      const float normal = kNorm == Norm::kLayer ? (v - row.mean) * row.rstd : v * row.rstd;
      sums[0].at[k] = fma(d, normal, sums[0].at[k]);
      if constexpr (kNorm == Norm::kLayer) sums[1].at[k] += d;
    }
  }
};

template <Norm kNorm, int N, typename T, typename X>
void run_rows(ComputeContext& ctx, const Backward<T, X>& a, bool wide, Write write,
              float* const (&out)[kWeightTerms<kNorm>]) {
  if (a.dx != nullptr) {
    launch(kNorm == Norm::kLayer ? "layer norm backward" : "rms norm backward",
           wide ? row_kernel<kNorm, N, T, X> : row_kernel<kNorm, 1, T, X>, warp_rows(a.shape.rows),
           native(ctx.stream()), a);
  }
  if (out[0] != nullptr) {
    write_sums<N>(ctx, kNorm == Norm::kLayer ? "layer norm weights" : "rms norm weights",
                  WeightTerms<kNorm, T, X>{a.dy, a.x, a.stats, a.shape.width}, a.shape.rows,
                  a.shape.width, wide, write, out);
  }
}

template <Norm kNorm, typename T, typename X>
void run_backward(ComputeContext& ctx, const Backward<T, X>& a, Write write,
                  float* const (&out)[kWeightTerms<kNorm>]) {
  constexpr int kAtOnce = kWide<T, X>;
  if (a.shape.rows == 0) return zero_sums(ctx, a.shape.width, write, out);
  if (a.dx == nullptr && out[0] == nullptr) return;
  const bool wide =
      a.shape.width % kAtOnce == 0 && aligned(a.dy, a.x, a.gamma, a.residual, a.dx, a.rounded);
  if (wide && a.shape.width <= kMostColumnThreads * kAtOnce) {
    run_slices<kNorm, kAtOnce>(ctx, a, write, out);
  } else {
    run_rows<kNorm, kAtOnce>(ctx, a, wide, write, out);
  }
}

template <Norm kNorm>
void norm_backward(ComputeContext& ctx, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                   const Tensor& stats, const NormGradients& gradients) {
  const auto run = [&](auto dy_type, auto x_type) {
    using T = decltype(dy_type);
    using X = decltype(x_type);
    const Backward<T, X> arguments = {dy.as<T>(),
                                      x.as<X>(),
                                      gamma.as<float>(),
                                      stats.as<float>(),
                                      gradients.residual.as<X>(),
                                      gradients.dx.as<X>(),
                                      gradients.rounded.as<Bf16>(),
                                      shape_of(x, gamma)};
    if constexpr (kNorm == Norm::kLayer) {
      run_backward<kNorm>(ctx, arguments, gradients.write,
                          {gradients.dgamma.as<float>(), gradients.dbeta.as<float>()});
    } else {
      run_backward<kNorm>(ctx, arguments, gradients.write, {gradients.dgamma.as<float>()});
    }
  };
  if (x.spec.dtype == DType::kBf16) return run(Bf16{}, Bf16{});
  with_type(dy.spec.dtype, [&](auto type) { run(type, float{}); });
}

}  // namespace

void layer_norm_backward(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                         const Tensor& gamma, const Tensor& stats, const NormGradients& gradients) {
  norm_backward<Norm::kLayer>(ctx, dy, x, gamma, stats, gradients);
}

void rms_norm_backward(ComputeContext& ctx, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                       const Tensor& stats, const NormGradients& gradients) {
  norm_backward<Norm::kRms>(ctx, dy, x, gamma, stats, gradients);
}

std::size_t norm_backward_workspace(ComputeContext& /*ctx*/, std::int64_t rows, std::int64_t width,
                                    int terms) {
  const std::size_t slices = slices_bytes(rows, width, terms);
  const std::size_t columns = column_sums_bytes(rows, width, terms);
  return slices > columns ? slices : columns;
}

}  // namespace sluice::cuda
