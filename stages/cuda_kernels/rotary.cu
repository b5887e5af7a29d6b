// Rotary positions.
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

void rotary(ComputeContext& ctx, const AttentionShape& shape, float base, const Tensor& qkv,
            bool backward) {
  const int64_t half = shape.head_dim / 2;
  const float* table = ctx.rotary_table(shape.sequence, shape.head_dim, base);
  with_type(qkv.spec.dtype, [&](auto type) {
    using T = decltype(type);
    const bool wide = half % kWide<T> == 0 && shape.head_dim % 2 == 0 && aligned(qkv.data, table);
    for_rows<kWide<T>>(ctx, "rotary positions", shape.rows(),
                       int64_t{shape.heads + shape.kv_heads} * half, wide,
                       Rotation<T>{qkv.as<T>(), table, shape.sequence, shape.packed_width(),
                                   shape.head_dim, backward});
  });
}

}  // namespace

RotaryOperators rotary_operators() {
  return {
      .rotary = rotary,
  };
}

}  // namespace sluice::cuda
