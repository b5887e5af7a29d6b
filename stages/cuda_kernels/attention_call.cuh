// One call of attention, as kernels take it, and the heads, rows and tiles that it consists of.
#pragma once

#include <cmath>
#include <cstdint>

#include "stages/compute/call_arguments.hpp"
#include "stages/cuda_kernels/random.cuh"

namespace sluice::cuda {

constexpr int kAttentionWarps = 4;  // of a block
constexpr int kAttentionThreads = kAttentionWarps * kWarpThreads;

// One head's rows of a sample: queries, keys, values or outputs; N elements move at once.
template <typename T, int N>
struct HeadRows {
  T* data;
  int64_t stride, count;
  int dimensions;
};

// N > 1: heads start and end at multiples of N elements, 16 bytes, in all of the tensors.
template <typename T, int N>
struct AttentionCall {
  AttentionShape shape;
  const T* qkv;
  T* out;         // forward
  const T* dout;  // backward
  T* dqkv;        // backward
  float* lse;     // [samples, heads, sequence]
  float* delta;   // as lse: dot(dout, out); backward
  float scale;
  bool drops;
  DropoutArguments dropout;

  // Head `head` of all heads, keys and values in a packed row.
  template <typename U>
  __device__ HeadRows<U, N> packed(U* data, int64_t sample, int64_t head) const {
    const int64_t width = shape.packed_width();
    return {data + sample * shape.sequence * width + head * shape.head_dim, width, shape.sequence,
            shape.head_dim};
  }
  template <typename U>
  __device__ HeadRows<U, N> output(U* data, int64_t sample, int64_t head) const {
    const int64_t width = int64_t{shape.heads} * shape.head_dim;
    return {data + sample * shape.sequence * width + head * shape.head_dim, width, shape.sequence,
            shape.head_dim};
  }
  [[nodiscard]] __device__ int64_t line(int64_t sample, int64_t head, int64_t query) const {
    return (sample * shape.heads + head) * shape.sequence + query;
  }
  // Of a query in the mask of all the model's heads: element mask_line() * sequence + key after
  // dropout.first belongs to it and that key.
  [[nodiscard]] __device__ int64_t mask_line(int64_t sample, int64_t head, int64_t query) const {
    return (sample * shape.all_heads + head) * shape.sequence + query;
  }
};

template <typename T, int N>
AttentionCall<T, N> make_attention_call(const AttentionShape& shape, const Tensor& qkv,
                                        const Dropout& dropout) {
  AttentionCall<T, N> call{};
  call.shape = shape;
  if (shape.all_heads == 0) call.shape.all_heads = shape.heads;
  call.qkv = qkv.as<T>();
  call.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(shape.head_dim)));
  call.drops = dropout.probability != 0;
  if (call.drops) call.dropout = dropout_arguments(dropout, 0);
  call.dropout.first += static_cast<uint64_t>(shape.first_head * shape.sequence * shape.sequence);
  return call;
}

// What block blockIdx.x works on: `rows` rows of one head of one sample. Those with the most to do
// start first: of queries the last, of keys the first.
struct AttentionTile {
  int64_t sample, head, first;  // first row
};
__device__ inline AttentionTile attention_tile(int heads, int64_t sequence, int rows,
                                               bool last_first) {
  const auto tiles = static_cast<uint32_t>(divide_up(sequence, rows));
  const uint32_t lane = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  return {lane / static_cast<uint32_t>(heads), lane % static_cast<uint32_t>(heads),
          int64_t{last_first ? tiles - 1 - tile : tile} * rows};
}

// A block per tile of `rows` rows of each head of each sample.
inline LaunchShape attention_tiles(const AttentionShape& shape, int heads, int rows,
                                   std::size_t shared_bytes) {
  const int64_t tiles = shape.samples * heads * divide_up(shape.sequence, rows);
  return {static_cast<unsigned>(tiles), kAttentionThreads, shared_bytes};
}

}  // namespace sluice::cuda
