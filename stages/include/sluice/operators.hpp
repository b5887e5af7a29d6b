// Operators: forward, input gradient, weight gradient, on the context's device. The CPU versions
// are the specification of the GPU's.
//
// Streams. On a GPU every operator goes to the context's stream and returns at once. Operands are
// memory of that device. A number for the host is written in stream order to memory that the host
// can read; on a GPU it must be page-locked (HostBuffer).
//
// Conventions. rows = samples * sequence. Activations are [rows, width], dense, of the operator's
// activation type T (f32 or bf16, equal for all activation operands unless said). The residual
// stream and its gradient are of type S: f32, or bf16 where T is bf16. Parameters, their gradients
// and statistics are f32. Sums run in f32 (or wider) in an order that depends on shapes alone.
// Every output is overwritten unless a comment says that it is added to. Weight gradients are added
// to, or overwritten with Write::kOverwrite: then whatever they hold is replaced, without being
// read, and elements without a term become 0. The bits are those of adding to zeros, but for the
// sign of a zero.
//
// Operands. Every call first checks the types and shapes of its operands. It throws Error(kUsage)
// that names the operator, the operands and what is legal. The last dimension is the width; rows
// may be several dimensions, such as [samples, sequence, width]. Weights and tables have two
// dimensions, biases and gains one. Data may be null only where a comment says so, or without
// elements. Not checked: contents (a token outside the table) and the size of the memory at a
// pointer.
//
// Scratch. <operator>_workspace() returns the bytes that a call takes from ctx.workspace(). Stages
// describe the largest of them. Operators without such a function take none. Memory that the CPU's
// matrix library allocates is not included. On a GPU the function may make the library's plan,
// which allocates only library handles on the device.
#pragma once

#include <cstdint>
#include <string>

#include <sluice/compute.hpp>
#include <sluice/tensor.hpp>

#pragma GCC visibility push(default)
namespace sluice {

// --- matmul layer: weight [out, in], bias [out] (null data: none) ---
// y = x weightᵀ + bias; x [rows, in], y [rows, out]. `weight` of x's type, bias f32, y of x's type
// or f32 (an f32 residual stream). On a GPU a bf16 y takes the bias rounded to bf16; there the bias
// may be bf16 itself, which takes no scratch.
void linear_forward(ComputeContext& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias,
                    const Tensor& y);
[[nodiscard]] std::size_t linear_forward_workspace(ComputeContext& ctx, const LinearShape& shape);
// y = residual + x weightᵀ + bias, the end of a branch of the residual stream; y and residual f32,
// or of x's type, y not residual's memory. On a CPU the bits are those of linear_forward() to y,
// then add(residual, y). A GPU adds in the matmul: residual before bias, and a bf16 y is rounded
// once. Takes the scratch of linear_forward.
void linear_residual_forward(ComputeContext& ctx, const Tensor& x, const Tensor& weight,
                             const Tensor& bias, const Tensor& residual, const Tensor& y);
// dx = dy weight; overwrites. dy, weight and dx of one type.
void linear_backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& weight,
                           const Tensor& dx);
// dweight += dyᵀ x, dbias += column sums of dy; f32.
void linear_backward_weight(ComputeContext& ctx, const Tensor& x, const Tensor& dy,
                            const Tensor& dweight, const Tensor& dbias, Write write = Write::kAdd);
[[nodiscard]] std::size_t linear_backward_weight_workspace(ComputeContext& ctx,
                                                           const LinearShape& shape);

// The matmul before or after an activation, fused with it. kSwiglu: raised is [rows, 2 * hidden].
// On a CPU the bits are those of the separate calls; blocks of rows stay in the cache. On a GPU the
// library may apply GELU in bf16 to the sum before rounding it to `raised`; the values are then
// those of the separate calls within rounding. Whether it does depends on the shapes, the device
// model and the library alone.
//
// raised = x weightᵀ + bias, y = activation(raised); both overwritten, of x's type. Takes the
// scratch of linear_forward.
void linear_activation_forward(ComputeContext& ctx, Activation activation, const Tensor& x,
                               const Tensor& weight, const Tensor& bias, const Tensor& raised,
                               const Tensor& y);
// draised = gradient through the activation of (dy weight), for the matmul that follows the
// activation; overwrites. All of one type.
void linear_activation_backward_input(ComputeContext& ctx, Activation activation, const Tensor& dy,
                                      const Tensor& weight, const Tensor& raised,
                                      const Tensor& draised);
[[nodiscard]] std::size_t linear_activation_backward_input_workspace(ComputeContext& ctx,
                                                                     Activation activation,
                                                                     const LinearShape& shape);

// --- embedding: tokens i32 [samples, sequence], table [vocabulary, width], positions
// [context, width] (null data: none); out, dout [rows, width] of type S. A bf16 out is the rounded
// sum. ---
void embedding_forward(ComputeContext& ctx, const Tensor& tokens, const Tensor& table,
                       const Tensor& positions, const Tensor& out);
void embedding_backward_weight(ComputeContext& ctx, const Tensor& tokens, const Tensor& dout,
                               const Tensor& dtable, const Tensor& dpositions,
                               Write write = Write::kAdd);
[[nodiscard]] std::size_t embedding_backward_weight_workspace(ComputeContext& ctx,
                                                              std::int64_t rows,
                                                              std::int64_t vocabulary,
                                                              std::int64_t width);

// --- normalisation over the last dimension; x of type S (residual stream), y of type T ---
// LayerNorm: y = (x - mean) * rstd * gamma + beta. stats f32 [rows, 2]: mean, rstd; overwritten.
void layer_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& gamma,
                        const Tensor& beta, float epsilon, const Tensor& y, const Tensor& stats);
// What is wanted of a norm's backward: what has data. The gradients of the weights have the same
// bits in a call of their own.
struct NormGradients {
  // [rows, width] of type S: dx = residual + the gradient through the normalisation; overwritten.
  // `residual` may be dx, or have no data: then it is zeros.
  Tensor dx = {}, residual = {};
  // bf16 [rows, width], where dx is f32 and wanted: dx rounded; overwritten.
  Tensor rounded = {};
  Tensor dgamma = {}, dbeta = {};  // f32 [width]; LayerNorm: both or none
  Write write = Write::kAdd;       // to dgamma and dbeta
};
void layer_norm_backward(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                         const Tensor& gamma, const Tensor& stats, const NormGradients& gradients);
// RMSNorm: y = x * rstd * gamma; stats [rows, 1]: rstd. As above otherwise.
void rms_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& gamma, float epsilon,
                      const Tensor& y, const Tensor& stats);
void rms_norm_backward(ComputeContext& ctx, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                       const Tensor& stats, const NormGradients& gradients);
// Of either: `terms` is 2 for LayerNorm's two gradients, 1 for RMSNorm's.
[[nodiscard]] std::size_t norm_backward_workspace(ComputeContext& ctx, std::int64_t rows,
                                                  std::int64_t width, int terms);

// --- causal self-attention ---
// Bytes attention_forward keeps for backward. On the CPU: probabilities before dropout, [samples,
// heads, sequence, sequence rounded up to 16]; of a block of 64 rows, only the blocks of 64 columns
// with one that a row sees are written and read. On a GPU: log-sum-exp of the scores, f32 [samples,
// heads, sequence].
[[nodiscard]] std::size_t attention_state_bytes(DeviceKind device, const AttentionShape& shape,
                                                DType dtype);
// qkv [rows, packed_width]: all queries, then keys, then values of a position. A query at position
// i sees the keys of positions i - seen() + 1 to i; what it does not see is not computed. out
// [rows, heads * head_dim]; scores are scaled by 1/sqrt(head_dim). `dropout` applies to the
// probabilities; its element index is ((sample * all_heads + first_head + head) * sequence + query)
// * sequence + key.
void attention_forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                       const Dropout& dropout, const Tensor& out, std::byte* state);
// dtype: of qkv; drops: whether the dropout's probability is not 0.
[[nodiscard]] std::size_t attention_forward_workspace(ComputeContext& ctx,
                                                      const AttentionShape& shape, DType dtype,
                                                      bool drops);
// dqkv overwritten. `out` is the forward's output.
void attention_backward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                        const Tensor& out, const Tensor& dout, const Dropout& dropout,
                        const std::byte* state, const Tensor& dqkv);
[[nodiscard]] std::size_t attention_backward_workspace(ComputeContext& ctx,
                                                       const AttentionShape& shape, DType dtype,
                                                       bool drops);
// Which code computes it, for reports: "cuDNN", "own kernels on tensor cores (why)" or "own kernels
// (why)" on a GPU, empty on a CPU. The same for forward and backward, and a function of shape,
// type, dropout, ComputeContext::set_tf32(), device model and library. May make the plan that
// attention_forward would make.
[[nodiscard]] std::string attention_engine(ComputeContext& ctx, const AttentionShape& shape,
                                           DType dtype, bool drops);
// Rotary positions (Su et al. 2021; halves rotated as in Llama), in place on queries and keys of a
// packed qkv; `backward` rotates the other way.
void rotary(ComputeContext& ctx, const AttentionShape& shape, const RotaryPositions& positions,
            const Tensor& qkv, bool backward);
// RMSNorm of each head of queries and of keys (Henry et al. 2020), in place in a packed qkv; gains
// f32 [head_dim]. Keeps for backward what was there before, raw [rows, (heads + kv_heads) *
// head_dim] of qkv's type, and stats f32 [rows, heads + kv_heads]: rstd; both overwritten.
void query_key_norm_forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                            const Tensor& query_gain, const Tensor& key_gain, float epsilon,
                            const Tensor& raw, const Tensor& stats);
// In place in dqkv: the gradient of what the forward wrote becomes that of what it read. dgains f32
// [2, head_dim], overwritten: the gradients of the two gains, summed over the rows and the heads.
void query_key_norm_backward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& raw,
                             const Tensor& query_gain, const Tensor& key_gain, const Tensor& stats,
                             const Tensor& dqkv, const Tensor& dgains);
[[nodiscard]] std::size_t query_key_norm_backward_workspace(ComputeContext& ctx,
                                                            const AttentionShape& shape);

// --- element-wise; overwrites unless said; the result may be the gradient operand in place ---
// y = function(x), and dx = dy times its derivative at x.
void pointwise_forward(ComputeContext& ctx, Pointwise function, const Tensor& x, const Tensor& y);
void pointwise_backward(ComputeContext& ctx, Pointwise function, const Tensor& x, const Tensor& dy,
                        const Tensor& dx);
// SwiGLU: gate_up [rows, 2 * hidden] (gate, then up), y = silu(gate) * up, [rows, hidden].
void swiglu_forward(ComputeContext& ctx, const Tensor& gate_up, const Tensor& y);
void swiglu_backward(ComputeContext& ctx, const Tensor& gate_up, const Tensor& dy,
                     const Tensor& dgate_up);
// y = keep ? x / (1 - p) : 0; the same call is its own backward. y of x's type, or bf16 where x is
// f32: then it is rounded. In place allowed where the types are equal.
void dropout(ComputeContext& ctx, const Tensor& x, const Dropout& dropout, const Tensor& y);
// y = residual + dropout(x), rounded once: the end of a branch of the residual stream that drops.
// residual and y f32, or of x's type. y may be residual's memory, or x's where the types are equal.
void dropout_residual(ComputeContext& ctx, const Tensor& x, const Dropout& dropout,
                      const Tensor& residual, const Tensor& y);
void add(ComputeContext& ctx, const Tensor& x, const Tensor& y);  // y += x; y f32, or as x
// Converts between f32 and bf16 (to nearest even).
void convert(ComputeContext& ctx, const Tensor& from, const Tensor& to);

// --- losses ---
// logits [rows, vocabulary] of T, targets i32 [rows]; a negative target does not count. *sum = the
// sum over counted rows of -log softmax(logits)[target]. With `gradient`, logits are replaced by
// scale * (softmax - onehot), zero in uncounted rows.
void softmax_cross_entropy(ComputeContext& ctx, const Tensor& logits, const Tensor& targets,
                           StepValue<double> scale, bool gradient, double* sum);
[[nodiscard]] std::size_t softmax_cross_entropy_workspace(std::int64_t rows);
// *sum = the squared differences over all elements. outputs and targets have equally many, in any
// shape. With `gradient`, outputs become 2 * scale * (outputs - targets).
void mean_squared_error(ComputeContext& ctx, const Tensor& outputs, const Tensor& targets,
                        StepValue<double> scale, bool gradient, double* sum);
[[nodiscard]] std::size_t mean_squared_error_workspace(std::int64_t elements);

}  // namespace sluice
#pragma GCC visibility pop
