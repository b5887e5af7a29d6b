// Attention with fp32's own arithmetic, for what does not go to tensor cores (attention_tiles.cuh),
// and the choice between the two.
//
// A block of four warps owns a tile of rows (queries; for the gradients of keys and values: keys),
// kept in shared memory as f32, and streams the rows of the other side past them, 32 at a time and
// 64 dimensions at a time: first each lane computes the dot products of its streamed row with the
// warp's own rows, then each lane sums some dimensions of the streamed rows, weighted.
#include <cmath>
#include <string>
#include <type_traits>

#include <sluice/error.hpp>

#include "stages/cuda_context/context.hpp"
#include "stages/cuda_kernels/attention_call.cuh"
#include "stages/cuda_kernels/attention_tiles.cuh"
#include "stages/cuda_kernels/flash_attention.hpp"

namespace sluice::cuda {

namespace {

constexpr int kWarps = kAttentionWarps;
constexpr int kStreamed = kWarpThreads;  // rows at a time
constexpr int kSlice = 64;               // dimensions at a time
constexpr int kStreamedLd = kSlice + 1;  // lanes read a column without bank conflicts
constexpr int kMostDimensions = 256;
// Of backward on a multiprocessor. Seven of its kernels keep 8 to 32 bytes a thread in local memory
// then (tests/kernel_code_test.py).
template <int kSlices>
[[maybe_unused]] constexpr int kBlocksAtOnce = kSlices == 1   ? 5
                                               : kSlices == 2 ? 4
                                                              : 3;
constexpr float kLowest = -3.4e38F;

// Dropout of probabilities and of their gradients.
struct Mask {
  DropoutArguments dropout;
  bool drops;
  int64_t sequence;
  // `line`: mask_line() of the query.
  [[nodiscard]] __device__ float of(float value, int64_t line, int64_t key) const {
    if (!drops) return value;
    const auto place = static_cast<uint64_t>(line * sequence + key);
    return drop_one(dropout, dropout.first + place, value);
  }
};

template <typename T, int N>
__device__ Mask mask_of(const AttentionCall<T, N>& call) {
  return {call.drops ? at_step(call.dropout) : call.dropout, call.drops, call.shape.sequence};
}

// The first streamed row of keys that queries from `query` on see.
__device__ int64_t first_seen(const AttentionShape& shape, int64_t query) {
  const int64_t first = query + 1 - shape.seen();
  return first <= 0 ? 0 : first / kStreamed * kStreamed;
}

// to[row * ld + d] = from's row first + row, dimension dimension + d; 0 outside of it.
template <int kCount, int kDimensions, typename T, int N>
__device__ void fetch(float* to, int ld, const HeadRows<T, N>& from, int64_t first, int dimension) {
  for (int i = static_cast<int>(threadIdx.x) * N; i < kCount * kDimensions;
       i += kAttentionThreads * N) {
    const int row = i / kDimensions, d = i % kDimensions;
    Floats<N> values = {};
    if (first + row < from.count && dimension + d < from.dimensions) {
      values = load<N>(from.data + (first + row) * from.stride + dimension + d);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) to[row * ld + d + k] = values.at[k];
  }
}

// A block's rows and its way of working. kRows: own rows of a warp. kSlices: of 64 dimensions.
template <int kRows, int kSlices>
struct Tile {
  static constexpr int kOwn = kWarps * kRows;
  static constexpr int kLd = kSlices * kSlice;
  static constexpr int kOwnFloats = kOwn * kLd;
  static constexpr int kWeightFloats = kOwn * kStreamed;
  // Sums of a warp's rows: lane l has dimensions l, l + 32, ...
  using Sums = float[kRows][2 * kSlices];

  [[nodiscard]] static constexpr std::size_t bytes(int own_tiles, int weight_tiles) {
    return sizeof(float) *
           static_cast<std::size_t>(own_tiles * kOwnFloats + kStreamed * kStreamedLd +
                                    weight_tiles * kWeightFloats);
  }

  int warp, lane;
  float* streamed;  // [32, 64], row stride kStreamedLd

  __device__ explicit Tile(float* streamed_rows)
      : warp(static_cast<int>(threadIdx.x) / kWarpThreads),
        lane(static_cast<int>(threadIdx.x) % kWarpThreads),
        streamed(streamed_rows) {}

  // dots[r] += dot(own row r of this warp, streamed row first + lane)
  template <typename T, int N>
  __device__ void add_dots(const float* own, const HeadRows<T, N>& from, int64_t first,
                           float (&dots)[kRows]) const {
#pragma unroll 1
    for (int slice = 0; slice < kSlices && slice * kSlice < from.dimensions; ++slice) {
      __syncthreads();
      fetch<kStreamed, kSlice>(streamed, kStreamedLd, from, first, slice * kSlice);
      __syncthreads();
      const float* mine = streamed + lane * kStreamedLd;
#pragma unroll 4
      for (int d = 0; d < kSlice; d += 4) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const Floats<4> other = load<4>(own + (warp * kRows + r) * kLd + slice * kSlice + d);
#pragma unroll
          for (int i = 0; i < 4; ++i) dots[r] = fma(other.at[i], mine[d + i], dots[r]);
        }
      }
    }
  }

  // sums[r] += sum over streamed rows j of weights[r][j] * row first + j
  template <typename T, int N>
  __device__ void add_weighted(const float* weights, const HeadRows<T, N>& from, int64_t first,
                               Sums& sums) const {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (slice * kSlice >= from.dimensions) break;
      __syncthreads();
      fetch<kStreamed, kSlice>(streamed, kStreamedLd, from, first, slice * kSlice);
      __syncthreads();
#pragma unroll 4
      for (int j = 0; j < kStreamed; ++j) {
        const float low = streamed[j * kStreamedLd + lane];
        const float high = streamed[j * kStreamedLd + kWarpThreads + lane];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float weight = weights[(warp * kRows + r) * kStreamed + j];
          sums[r][2 * slice] = fma(weight, low, sums[r][2 * slice]);
          sums[r][2 * slice + 1] = fma(weight, high, sums[r][2 * slice + 1]);
        }
      }
    }
  }

  __device__ void set_weight(float* weights, int r, float value) const {
    weights[(warp * kRows + r) * kStreamed + lane] = value;
  }

  // Row `row` of `to` = factor * the sums of own row r, by way of that row of `own`, which none
  // needs any more.
  template <typename T, int N>
  __device__ void put(float* own, const HeadRows<T, N>& to, int64_t row, int r,
                      const float (&sums)[2 * kSlices], float factor) const {
    float* mine = own + (warp * kRows + r) * kLd;
#pragma unroll
    for (int i = 0; i < 2 * kSlices; ++i) mine[i * kWarpThreads + lane] = sums[i] * factor;
    __syncwarp();
#pragma unroll 1
    for (int d = lane * N; d < to.dimensions; d += kWarpThreads * N) {
      store(to.data + row * to.stride + d, load<N>(mine + d));
    }
  }
};

template <int kSlices>
using ForwardTile = Tile<8, kSlices>;
template <int kSlices>
using BackwardTile = Tile<4, kSlices>;

template <typename T, int N, int kSlices>
__global__ void __launch_bounds__(kAttentionThreads)
    forward_kernel(const AttentionCall<T, N> call) {
  using Work = ForwardTile<kSlices>;
  constexpr int kRows = Work::kOwn / kWarps;
  const AttentionShape& shape = call.shape;
  const Mask mask = mask_of(call);
  const AttentionTile at = attention_tile(shape.heads, shape.sequence, Work::kOwn, true);
  const int64_t kv = shape.heads + at.head / (shape.heads / shape.kv_heads);
  const auto queries = call.packed(call.qkv, at.sample, at.head);
  const auto keys = call.packed(call.qkv, at.sample, kv);
  const auto values = call.packed(call.qkv, at.sample, kv + shape.kv_heads);

  auto* own = shared_memory<float>();
  float* weights = own + Work::kOwnFloats;
  const Work work(weights + Work::kWeightFloats);
  fetch<Work::kOwn, Work::kLd>(own, Work::kLd, queries, at.first, 0);

  // Per row, in every lane: the largest score, the sum of e^(score - largest).
  float top[kRows], total[kRows];
  typename Work::Sums sums = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    top[r] = kLowest;
    total[r] = 0;
  }
  const int64_t first_query = at.first + work.warp * kRows;
  const int64_t end = min(at.first + Work::kOwn, shape.sequence);
  for (int64_t first = first_seen(shape, at.first); first < end; first += kStreamed) {
    float scores[kRows] = {};
    work.add_dots(own, keys, first, scores);
    const int64_t key = first + work.lane;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t query = first_query + r;
      const bool seen = key <= query && query - key < shape.seen();
      const float highest = warp_max(seen ? scores[r] * call.scale : kLowest);
      const float raised = maximum(highest, top[r]);
      const float shrink = exponential(top[r] - raised);
      const float p = seen ? exponential(fma(scores[r], call.scale, -raised)) : 0.0F;
      total[r] = fma(total[r], shrink, warp_sum(p));
      top[r] = raised;
#pragma unroll
      for (int i = 0; i < 2 * kSlices; ++i) sums[r][i] *= shrink;
      work.set_weight(weights, r,
                      seen ? mask.of(p, call.mask_line(at.sample, at.head, query), key) : 0.0F);
    }
    work.add_weighted(weights, values, first, sums);
  }
  const auto out = call.output(call.out, at.sample, at.head);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t query = first_query + r;
    if (query >= shape.sequence) break;
    work.put(own, out, query, r, sums[r], 1.0F / total[r]);
    if (work.lane == 0) {
      call.lse[call.line(at.sample, at.head, query)] = top[r] + ::logf(total[r]);
    }
  }
}

// delta = dot(dout, out); a warp per row and head.
template <typename T, int N>
__global__ void delta_kernel(const AttentionCall<T, N> call) {
  const AttentionShape& shape = call.shape;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t lines = shape.rows() * shape.heads, step = grid_threads() / kWarpThreads;
  for (int64_t line = grid_thread() / kWarpThreads; line < lines; line += step) {
    const int64_t row = line / shape.heads, head = line % shape.heads;
    const int64_t first = line * shape.head_dim;
    float sum = 0;
#pragma unroll 1
    for (int i = lane * N; i < shape.head_dim; i += kWarpThreads * N) {
      const Floats<N> out = load<N>(call.out + first + i), dout = load<N>(call.dout + first + i);
#pragma unroll
      for (int k = 0; k < N; ++k) sum = fma(out.at[k], dout.at[k], sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
      call.delta[call.line(row / shape.sequence, head, row % shape.sequence)] = sum;
    }
  }
}

// A score's probability, and the score's gradient from that of the dropped probability.
struct Gradient {
  float p, dscore;
  template <typename AnyCall>
  __device__ Gradient(const AnyCall& call, const Mask& mask, float score, float dp, int64_t line,
                      int64_t mask_line, int64_t key)
      : p(exponential(fma(score, call.scale, -call.lse[line]))),
        dscore(softmax_gradient(p, mask.of(dp, mask_line, key), call.delta[line], call.scale)) {}
};

template <typename T, int N, int kSlices>
__global__ void __launch_bounds__(kAttentionThreads, kBlocksAtOnce<kSlices>)
    query_kernel(const AttentionCall<T, N> call) {
  using Work = BackwardTile<kSlices>;
  constexpr int kRows = Work::kOwn / kWarps;
  const AttentionShape& shape = call.shape;
  const Mask mask = mask_of(call);
  const AttentionTile at = attention_tile(shape.heads, shape.sequence, Work::kOwn, true);
  const int64_t kv = shape.heads + at.head / (shape.heads / shape.kv_heads);
  const auto keys = call.packed(call.qkv, at.sample, kv);
  const auto values = call.packed(call.qkv, at.sample, kv + shape.kv_heads);

  auto* queries = shared_memory<float>();
  float* douts = queries + Work::kOwnFloats;
  float* weights = douts + Work::kOwnFloats;
  const Work work(weights + Work::kWeightFloats);
  fetch<Work::kOwn, Work::kLd>(queries, Work::kLd, call.packed(call.qkv, at.sample, at.head),
                               at.first, 0);
  fetch<Work::kOwn, Work::kLd>(douts, Work::kLd, call.output(call.dout, at.sample, at.head),
                               at.first, 0);

  typename Work::Sums sums = {};
  const int64_t first_query = at.first + work.warp * kRows;
  const int64_t end = min(at.first + Work::kOwn, shape.sequence);
  for (int64_t first = first_seen(shape, at.first); first < end; first += kStreamed) {
    float scores[kRows] = {}, dps[kRows] = {};
    work.add_dots(queries, keys, first, scores);
    work.add_dots(douts, values, first, dps);
    const int64_t key = first + work.lane;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t query = first_query + r;
      float dscore = 0;
      if (key <= query && query - key < shape.seen() && query < shape.sequence) {
        const int64_t line = call.line(at.sample, at.head, query);
        const int64_t mask_line = call.mask_line(at.sample, at.head, query);
        dscore = Gradient(call, mask, scores[r], dps[r], line, mask_line, key).dscore;
      }
      work.set_weight(weights, r, dscore);
    }
    work.add_weighted(weights, keys, first, sums);
  }
  const auto dqueries = call.packed(call.dqkv, at.sample, at.head);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first_query + r >= shape.sequence) break;
    work.put(queries, dqueries, first_query + r, r, sums[r], 1.0F);
  }
}

// Keys and values of one key head, over all queries of the heads that share it.
template <typename T, int N, int kSlices>
__global__ void __launch_bounds__(kAttentionThreads, kBlocksAtOnce<kSlices>)
    key_kernel(const AttentionCall<T, N> call) {
  using Work = BackwardTile<kSlices>;
  constexpr int kRows = Work::kOwn / kWarps;
  const AttentionShape& shape = call.shape;
  const Mask mask = mask_of(call);
  const AttentionTile at = attention_tile(shape.kv_heads, shape.sequence, Work::kOwn, false);
  const int64_t group = shape.heads / shape.kv_heads, kv = shape.heads + at.head;

  auto* keys = shared_memory<float>();
  float* values = keys + Work::kOwnFloats;
  float* weights = values + Work::kOwnFloats;
  float* dscores = weights + Work::kWeightFloats;
  const Work work(dscores + Work::kWeightFloats);
  fetch<Work::kOwn, Work::kLd>(keys, Work::kLd, call.packed(call.qkv, at.sample, kv), at.first, 0);
  fetch<Work::kOwn, Work::kLd>(values, Work::kLd,
                               call.packed(call.qkv, at.sample, kv + shape.kv_heads), at.first, 0);

  typename Work::Sums key_sums = {}, value_sums = {};
  const int64_t first_key = at.first + work.warp * kRows;
  // The last query that sees one of these keys comes before it.
  const int64_t end = min(at.first + Work::kOwn - 1 + shape.seen(), shape.sequence);
  for (int64_t head = at.head * group; head < (at.head + 1) * group; ++head) {
    const auto queries = call.packed(call.qkv, at.sample, head);
    const auto douts = call.output(call.dout, at.sample, head);
    for (int64_t first = at.first / kStreamed * kStreamed; first < end; first += kStreamed) {
      float scores[kRows] = {}, dps[kRows] = {};
      work.add_dots(keys, queries, first, scores);
      work.add_dots(values, douts, first, dps);
      const int64_t query = first + work.lane, line = call.line(at.sample, head, query);
      const int64_t mask_line = call.mask_line(at.sample, head, query);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t key = first_key + r;
        float weight = 0, dscore = 0;
        if (key <= query && query - key < shape.seen() && query < shape.sequence) {
          const Gradient gradient(call, mask, scores[r], dps[r], line, mask_line, key);
          weight = mask.of(gradient.p, mask_line, key);
          dscore = gradient.dscore;
        }
        work.set_weight(weights, r, weight);
        work.set_weight(dscores, r, dscore);
      }
      work.add_weighted(weights, douts, first, value_sums);
      work.add_weighted(dscores, queries, first, key_sums);
    }
  }
  const auto dkeys = call.packed(call.dqkv, at.sample, kv);
  const auto dvalues = call.packed(call.dqkv, at.sample, kv + shape.kv_heads);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first_key + r >= shape.sequence) break;
    work.put(keys, dkeys, first_key + r, r, key_sums[r], 1.0F);
    work.put(values, dvalues, first_key + r, r, value_sums[r], 1.0F);
  }
}

// Calls body(T{}, elements moved at once, slices) for the type and the dimensions of a head.
template <typename Body>
void with_slices(const AttentionShape& shape, DType dtype, bool aligned, const Body& body) {
  if (shape.head_dim > kMostDimensions) {
    throw Error(ErrorCode::kUsage, "attention on a GPU takes heads of at most " +
                                       std::to_string(kMostDimensions) + " dimensions, not " +
                                       std::to_string(shape.head_dim));
  }
  const auto run = [&](auto type, auto at_once) {
    with_limit<kSlice, 2 * kSlice, kMostDimensions>(shape.head_dim, [&](auto dimensions) {
      body(type, at_once, std::integral_constant<int, dimensions() / kSlice>{});
    });
  };
  with_type(dtype, [&](auto type) {
    if constexpr (std::is_same_v<decltype(type), float>) {
      if (aligned && shape.head_dim % 4 == 0) {
        run(type, std::integral_constant<int, 4>{});
        return;
      }
    }
    run(type, std::integral_constant<int, 1>{});
  });
}

// body(call) on tensor cores, if they take it; returns whether they do.
template <typename Body>
bool with_tiles(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                const Dropout& dropout, bool aligned, const Body& body) {
  const DType dtype = qkv.spec.dtype;
  if (!aligned || !takes_attention_tiles(shape, dtype, context_of(ctx).tf32())) return false;
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    auto call = make_attention_call<T, kWide<T>>(shape, qkv, dropout);
    body(call);
  });
  return true;
}

// Of forward's and backward's operands.
template <typename T, int N>
void set_operands(AttentionCall<T, N>& call, const Tensor& out, std::byte* state) {
  call.out = out.as<T>();
  call.lse = reinterpret_cast<float*>(state);
}
template <typename T, int N>
void set_operands(ComputeContext& ctx, AttentionCall<T, N>& call, const Tensor& out,
                  const Tensor& dout, const std::byte* state, const Tensor& dqkv) {
  set_operands(call, out, const_cast<std::byte*>(state));  // which is only read: forward wrote it
  call.dout = dout.as<T>();
  call.dqkv = dqkv.as<T>();
  call.delta =
      reinterpret_cast<float*>(ctx.workspace(flash_attention_backward_workspace(call.shape)));
}

template <typename T, int N>
void compute_delta(cudaStream_t stream, const AttentionCall<T, N>& call) {
  const int64_t lines = call.shape.rows() * call.shape.heads;
  launch("attention backward, row dots", delta_kernel<T, N>,
         {blocks_for(lines, kBlockThreads / kWarpThreads), kBlockThreads}, stream, call);
}

}  // namespace

bool attention_on_tensor_cores(const ComputeContext& ctx, const AttentionShape& shape,
                               DType dtype) {
  return takes_attention_tiles(shape, dtype, context_of(ctx).tf32());
}

void flash_attention_forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                             const Dropout& dropout, const Tensor& out, std::byte* state) {
  if (shape.rows() == 0) return;
  const cudaStream_t stream = native(ctx.stream());
  const bool wide = aligned(qkv.data, out.data);
  if (with_tiles(ctx, shape, qkv, dropout, wide, [&](auto& call) {
        set_operands(call, out, state);
        attention_tiles_forward(stream, call);
      })) {
    return;
  }
  with_slices(shape, qkv.spec.dtype, wide, [&](auto type, auto at_once, auto slices) {
    using T = decltype(type);
    using Work = ForwardTile<slices()>;
    auto call = make_attention_call<T, at_once()>(shape, qkv, dropout);
    set_operands(call, out, state);
    launch("attention forward", forward_kernel<T, at_once(), slices()>,
           attention_tiles(shape, shape.heads, Work::kOwn, Work::bytes(1, 1)), stream, call);
  });
}

std::size_t flash_attention_backward_workspace(const AttentionShape& shape) {
  return static_cast<std::size_t>(shape.rows() * shape.heads) * sizeof(float);
}

void flash_attention_backward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                              const Tensor& out, const Tensor& dout, const Dropout& dropout,
                              const std::byte* state, const Tensor& dqkv) {
  if (shape.rows() == 0) return;
  const cudaStream_t stream = native(ctx.stream());
  const bool wide = aligned(qkv.data, out.data, dout.data, dqkv.data);
  if (with_tiles(ctx, shape, qkv, dropout, wide, [&](auto& call) {
        set_operands(ctx, call, out, dout, state, dqkv);
        compute_delta(stream, call);
        attention_tiles_backward(stream, call);
      })) {
    return;
  }
  with_slices(shape, qkv.spec.dtype, wide, [&](auto type, auto at_once, auto slices) {
    using T = decltype(type);
    using Work = BackwardTile<slices()>;
    auto call = make_attention_call<T, at_once()>(shape, qkv, dropout);
    set_operands(ctx, call, out, dout, state, dqkv);
    compute_delta(stream, call);
    launch("attention backward, queries", query_kernel<T, at_once(), slices()>,
           attention_tiles(shape, shape.heads, Work::kOwn, Work::bytes(2, 1)), stream, call);
    launch("attention backward, keys and values", key_kernel<T, at_once(), slices()>,
           attention_tiles(shape, shape.kv_heads, Work::kOwn, Work::bytes(2, 2)), stream, call);
  });
}

}  // namespace sluice::cuda
