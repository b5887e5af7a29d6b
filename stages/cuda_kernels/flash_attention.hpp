// Sluice's own attention kernels. They are the reference for cuDNN's, and run where cuDNN does not:
// in f32, with dropout (masks as on the CPU), with a window, and for shapes that it refuses.
// Internal to stages/cuda; operands as for attention_forward and attention_backward in
// operators.hpp.
#pragma once

#include <sluice/compute.hpp>

namespace sluice::cuda {

// Whether the kernels multiply on tensor cores, in bf16 or, where the context allows it, in TF32.
// Otherwise all their arithmetic is f32. So it is too for operands that do not start at multiples
// of 16 bytes.
[[nodiscard]] bool attention_on_tensor_cores(const ComputeContext& ctx, const AttentionShape& shape,
                                             DType dtype);

// Computes tiles in shared memory with an online softmax (Dao et al. 2022, "FlashAttention"),
// without a matrix of scores in device memory; tiles that no query sees are skipped. Sums,
// softmax and dropout are f32; on tensor cores, probabilities and the gradients of scores are
// rounded to the operands' type before they are multiplied, as cuDNN does. `state` receives the
// log-sum-exp of the scaled scores, f32 [samples, heads, sequence]. The order of sums depends only
// on the shape. Throws Error(kUsage) for a head_dim above 256.
void flash_attention_forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                             const Dropout& dropout, const Tensor& out, std::byte* state);
void flash_attention_backward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                              const Tensor& out, const Tensor& dout, const Dropout& dropout,
                              const std::byte* state, const Tensor& dqkv);
// Bytes of ctx.workspace() that it takes: one f32 per row and head.
[[nodiscard]] std::size_t flash_attention_backward_workspace(const AttentionShape& shape);

}  // namespace sluice::cuda
