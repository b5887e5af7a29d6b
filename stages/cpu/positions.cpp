// What happens to queries and keys between their matmul and attention: a norm of each head, rotary
// positions. In place in the packed rows; rows go to threads.
#include <algorithm>

#include "stages/cpu/cpu_backend.hpp"
#include "stages/cpu/parallel.hpp"

namespace sluice::cpu {

namespace {

// Rows whose shares of the gains' gradients are summed before they are added to the others'.
constexpr std::int64_t kNormBlock = 64;

// Where a row's queries and keys are: in the packed rows, in raw, in stats.
struct HeadRow {
  HeadRow(const AttentionShape& shape, std::int64_t row)
      : packed(row * shape.packed_width()),
        raw(row * (shape.heads + shape.kv_heads) * shape.head_dim),
        stats(row * (shape.heads + shape.kv_heads)),
        keys(std::int64_t{shape.heads} * shape.head_dim) {}
  std::int64_t packed, raw, stats;
  std::int64_t keys;  // from the row's first query to its first key
};

// [2, head_dim] for each block of rows.
std::size_t share_bytes(const AttentionShape& shape) {
  const std::int64_t blocks = (shape.rows() + kNormBlock - 1) / kNormBlock;
  return static_cast<std::size_t>(blocks * 2 * shape.head_dim) * sizeof(float);
}

// One block of rows; dgains [2, head_dim] receives its share.
void norm_backward_block(const TypedKernels& kernels, const AttentionShape& shape,
                         std::int64_t first, const Tensor& raw, const float* query_gain,
                         const float* key_gain, const float* stats, const Tensor& dqkv,
                         float* dgains) {
  std::fill_n(dgains, 2 * shape.head_dim, 0.0F);
  const std::int64_t end = std::min(first + kNormBlock, shape.rows());
  for (std::int64_t row = first; row < end; ++row) {
    const HeadRow at(shape, row);
    const float* const rstd = stats + at.stats;
    kernels.head_norm_backward(element(dqkv, at.packed), element(raw, at.raw), shape.heads,
                               shape.head_dim, query_gain, rstd, dgains);
    kernels.head_norm_backward(element(dqkv, at.packed + at.keys), element(raw, at.raw + at.keys),
                               shape.kv_heads, shape.head_dim, key_gain, rstd + shape.heads,
                               dgains + shape.head_dim);
  }
}

}  // namespace

void rotary(ComputeContext& ctx, const AttentionShape& shape, const RotaryPositions& positions,
            const Tensor& qkv, bool backward) {
  const std::int64_t half = shape.head_dim / 2, heads = shape.heads + shape.kv_heads;
  const float* table = ctx.rotary_table(shape.sequence, shape.head_dim, positions);
  const TypedKernels& kernels = kernels_for(ctx, qkv.spec.dtype);
  parallel_range(ctx, shape.rows(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const float* angles = table + row % shape.sequence * 3 * half;
      kernels.rotate(element(qkv, row * shape.packed_width()), heads, shape.head_dim, angles,
                     angles + (backward ? 2 : 1) * half);
    }
  });
}

void query_key_norm_forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                            const Tensor& query_gain, const Tensor& key_gain, float epsilon,
                            const Tensor& raw, const Tensor& stats) {
  const auto kernel = kernels_for(ctx, qkv.spec.dtype).head_norm_forward;
  parallel_range(ctx, shape.rows(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const HeadRow at(shape, row);
      float* const rstd = stats.as<float>() + at.stats;
      kernel(element(qkv, at.packed), shape.heads, shape.head_dim, query_gain.as<float>(), epsilon,
             element(raw, at.raw), rstd);
      kernel(element(qkv, at.packed + at.keys), shape.kv_heads, shape.head_dim,
             key_gain.as<float>(), epsilon, element(raw, at.raw + at.keys), rstd + shape.heads);
    }
  });
}

std::size_t query_key_norm_backward_workspace(ComputeContext& /*ctx*/,
                                              const AttentionShape& shape) {
  return share_bytes(shape);
}

void query_key_norm_backward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& raw,
                             const Tensor& query_gain, const Tensor& key_gain, const Tensor& stats,
                             const Tensor& dqkv, const Tensor& dgains) {
  const TypedKernels& kernels = kernels_for(ctx, dqkv.spec.dtype);
  const std::int64_t width = std::int64_t{2} * shape.head_dim;
  const std::int64_t blocks = (shape.rows() + kNormBlock - 1) / kNormBlock;
  auto* const shares = reinterpret_cast<float*>(ctx.workspace(share_bytes(shape)));
  parallel_range(ctx, blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      norm_backward_block(kernels, shape, block * kNormBlock, raw, query_gain.as<float>(),
                          key_gain.as<float>(), stats.as<float>(), dqkv, shares + block * width);
    }
  });
  auto* const sums = dgains.as<float>();
  std::fill_n(sums, width, 0.0F);
  for (std::int64_t block = 0; block < blocks; ++block) {
    kernels_of(ctx).f32.add(shares + block * width, sums, width);
  }
}

}  // namespace sluice::cpu
