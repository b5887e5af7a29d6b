// What happens to queries and keys between their matmul and attention: a norm of each head, rotary
// positions. In place in the packed rows.
#include <algorithm>

#include "stages/cuda_kernels/column_sums.cuh"
#include "stages/cuda_kernels/elements.cuh"
#include "stages/cuda_kernels/kernels.hpp"

namespace sluice::cuda {

namespace {

// Columns are pairs: head_dim / 2 of each head of queries and keys.
template <typename T>
struct Rotation {
  T* qkv;
  const float* table;  // [sequence, 3, half]: cosines, sines, negated sines
  int64_t sequence, packed, head_dim;
  bool backward;
  template <int N>
  __device__ void run(int64_t row, int64_t column) const {
    const int64_t half = head_dim / 2;
    // Less than 2^31 columns: their division is a fraction of a 64-bit one.
    const int64_t head = static_cast<uint32_t>(column) / static_cast<uint32_t>(half);
    const int64_t pair = column - head * half;
    T* low_data = qkv + row * packed + head * head_dim + pair;
    const float* angles = table + row % sequence * 3 * half + pair;
    Floats<N> low = load<N>(low_data), high = load<N>(low_data + half);
    const Floats<N> cosine = load<N>(angles), sine = load<N>(angles + (backward ? 2 : 1) * half);
#pragma unroll
    for (int k = 0; k < N; ++k) turn(low.at[k], high.at[k], cosine.at[k], sine.at[k]);
    store(low_data, low);
    store(low_data + half, high);
  }
};

// Heads of queries and keys: head `head` of row `row` is line row * heads() + head.
template <typename T>
struct Heads {
  T* packed;  // queries, keys and values, or their gradients
  T* raw;     // [rows, heads, head_dim]: before the norm
  const float *query_gain, *key_gain;
  float* stats;  // [rows, heads]: rstd
  int64_t rows, query_heads, key_heads, head_dim, packed_width;

  [[nodiscard]] __device__ int64_t heads() const { return query_heads + key_heads; }
  [[nodiscard]] __device__ T* place(int64_t row, int64_t head) const {
    return packed + row * packed_width + head * head_dim;
  }
  [[nodiscard]] __device__ const float* gain(int64_t head) const {
    return head < query_heads ? query_gain : key_gain;
  }
};

// body(row, head, line, lane), one warp for each line.
template <typename T, typename Body>
__device__ void for_warp_heads(const Heads<T>& a, const Body& body) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t lines = a.rows * a.heads(), step = grid_threads() / kWarpThreads;
  for (int64_t line = grid_thread() / kWarpThreads; line < lines; line += step) {
    const int64_t row = line / a.heads();
    body(row, line - row * a.heads(), line, lane);
  }
}

template <typename T>
__global__ void head_norm_kernel(const Heads<T> a, const float epsilon) {
  for_warp_heads(a, [&](int64_t row, int64_t head, int64_t line, int lane) {
    T* const x = a.place(row, head);
    T* const raw = a.raw + line * a.head_dim;
    const float* const gain = a.gain(head);
    float sum = 0;
    for (int64_t i = lane; i < a.head_dim; i += kWarpThreads) {
      const float value = widen(x[i]);
      raw[i] = x[i];
      sum = fma(value, value, sum);
    }
    const float inverse = 1.0F / static_cast<float>(a.head_dim);
    const float rstd = 1.0F / ::sqrtf(inverse * warp_sum(sum) + epsilon);
    for (int64_t i = lane; i < a.head_dim; i += kWarpThreads) {
      narrow(rms_norm_value(widen(x[i]), rstd, gain[i]), x[i]);
    }
    if (lane == 0) a.stats[line] = rstd;
  });
}

template <typename T>
__global__ void head_norm_backward_kernel(const Heads<T> a) {
  for_warp_heads(a, [&](int64_t row, int64_t head, int64_t line, int lane) {
    T* const dx = a.place(row, head);
    const T* const raw = a.raw + line * a.head_dim;
    const float* const gain = a.gain(head);
    const float rstd = a.stats[line];
    float dot = 0;
    for (int64_t i = lane; i < a.head_dim; i += kWarpThreads) {
      dot = fma(widen(dx[i]) * gain[i], widen(raw[i]), dot);
    }
    const NormGradient gradient =
        rms_norm_gradient(rstd, warp_sum(dot), 1.0F / static_cast<float>(a.head_dim));
    for (int64_t i = lane; i < a.head_dim; i += kWarpThreads) {
      narrow(rms_norm_change(gradient, widen(dx[i]) * gain[i], widen(raw[i])), dx[i]);
    }
  });
}

// Shares of a gain's gradient: rows are the heads [first, first + count) of all rows.
template <typename T>
struct GainTerms {
  static constexpr int kTerms = 1, kRowsAtOnce = 2;
  Heads<T> all;
  int64_t first, count;
  template <int N>
  struct Row {
    Floats<N> dy, x;
    float rstd;
  };
  template <int N>
  __device__ Row<N> load(int64_t index, int64_t column) const {
    const int64_t row = index / count, head = first + index % count;
    const int64_t line = row * all.heads() + head;
    return {cuda::load<N>(all.place(row, head) + column),
            cuda::load<N>(all.raw + line * all.head_dim + column), all.stats[line]};
  }
  template <int N>
  __device__ void add(const Row<N>& row, Floats<N> (&sums)[kTerms]) const {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      sums[0].at[k] = fma(row.dy.at[k], row.x.at[k] * row.rstd, sums[0].at[k]);
    }
  }
};

template <typename T>
Heads<T> heads_of(const AttentionShape& shape, const Tensor& packed, const Tensor& raw,
                  const Tensor& query_gain, const Tensor& key_gain, const Tensor& stats) {
  return {packed.as<T>(),       raw.as<T>(),       query_gain.as<float>(),
          key_gain.as<float>(), stats.as<float>(), shape.rows(),
          shape.heads,          shape.kv_heads,    shape.head_dim,
          shape.packed_width()};
}

LaunchShape warp_heads(const AttentionShape& shape) {
  const int64_t lines = shape.rows() * (shape.heads + shape.kv_heads);
  return {blocks_for(lines, kBlockThreads / kWarpThreads), kBlockThreads};
}

}  // namespace

void rotary(ComputeContext& ctx, const AttentionShape& shape, const RotaryPositions& positions,
            const Tensor& qkv, bool backward) {
  const int64_t half = shape.head_dim / 2;
  const float* table = ctx.rotary_table(shape.sequence, shape.head_dim, positions);
  with_type(qkv.spec.dtype, [&](auto type) {
    using T = decltype(type);
    const bool wide = half % kWide<T> == 0 && shape.head_dim % 2 == 0 && aligned(qkv.data, table);
    for_rows<kWide<T>>(ctx, "rotary positions", shape.rows(),
                       int64_t{shape.heads + shape.kv_heads} * half, wide,
                       Rotation<T>{qkv.as<T>(), table, shape.sequence, shape.packed_width(),
                                   shape.head_dim, backward});
  });
}

void query_key_norm_forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                            const Tensor& query_gain, const Tensor& key_gain, float epsilon,
                            const Tensor& raw, const Tensor& stats) {
  if (shape.rows() == 0) return;
  with_type(qkv.spec.dtype, [&](auto type) {
    using T = decltype(type);
    launch("query and key norm", head_norm_kernel<T>, warp_heads(shape), native(ctx.stream()),
           heads_of<T>(shape, qkv, raw, query_gain, key_gain, stats), epsilon);
  });
}

std::size_t query_key_norm_backward_workspace(ComputeContext& /*ctx*/,
                                              const AttentionShape& shape) {
  return std::max(column_sums_bytes(shape.rows() * shape.heads, shape.head_dim, 1),
                  column_sums_bytes(shape.rows() * shape.kv_heads, shape.head_dim, 1));
}

// The gains' gradients first: they read what the last kernel overwrites.
void query_key_norm_backward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& raw,
                             const Tensor& query_gain, const Tensor& key_gain, const Tensor& stats,
                             const Tensor& dqkv, const Tensor& dgains) {
  if (shape.rows() == 0) {
    return fill_zero_async(dgains.data, dgains.spec.bytes(), ctx.stream());
  }
  with_type(dqkv.spec.dtype, [&](auto type) {
    using T = decltype(type);
    const Heads<T> heads = heads_of<T>(shape, dqkv, raw, query_gain, key_gain, stats);
    const bool wide = shape.head_dim % kWide<T> == 0 && aligned(dqkv.data, raw.data);
    auto* const sums = dgains.as<float>();
    write_sums<kWide<T>>(ctx, "query gains", GainTerms<T>{heads, 0, shape.heads},
                         shape.rows() * shape.heads, shape.head_dim, wide, Write::kOverwrite,
                         {sums});
    write_sums<kWide<T>>(ctx, "key gains", GainTerms<T>{heads, shape.heads, shape.kv_heads},
                         shape.rows() * shape.kv_heads, shape.head_dim, wide, Write::kOverwrite,
                         {sums + shape.head_dim});
    launch("query and key norm backward", head_norm_backward_kernel<T>, warp_heads(shape),
           native(ctx.stream()), heads);
  });
}

}  // namespace sluice::cuda
