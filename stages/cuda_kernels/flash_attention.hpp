// Attention in kernels of Sluice's own: the reference for the library's, what takes its place where
// it does not do, and the one used with dropout (whose masks are the CPU's). Internal to
// stages/cuda; operands and meaning as for attention_forward and attention_backward in
// operators.hpp.
#pragma once

#include <sluice/compute.hpp>

namespace sluice::cuda {

// Works through tiles in shared memory with an online softmax (Dao et al. 2022, "FlashAttention");
// no matrix of scores is ever in memory. All arithmetic is f32. `state` receives the log-sum-exp of
// the scaled scores, f32 [samples, heads, sequence]. Sums run in an order that depends on the shape
// alone. Throws Error(kUsage) for a head_dim above 256.
void flash_attention_forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                             const Dropout& dropout, const Tensor& out, std::byte* state);
void flash_attention_backward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                              const Tensor& out, const Tensor& dout, const Dropout& dropout,
                              const std::byte* state, const Tensor& dqkv);
// What it takes of ctx.workspace(): one f32 per row and head.
[[nodiscard]] std::size_t flash_attention_backward_workspace(const AttentionShape& shape);

}  // namespace sluice::cuda
