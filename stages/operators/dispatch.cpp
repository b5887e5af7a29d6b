// Every operator checks its operands once, then calls the backend of the context's device.
#include <sluice/operators.hpp>

#include "stages/compute/backend.hpp"
#include "stages/compute/operator_table.hpp"
#include "stages/compute/partial_sums.hpp"
#include "stages/operators/context.hpp"
#include "stages/operators/operand_checks.hpp"

namespace sluice {

namespace {

const OperatorTable& operators_of(const ComputeContext& ctx) { return ctx.backend().operators(); }

}  // namespace

void linear_forward(ComputeContext& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias,
                    const Tensor& y) {
  operands::linear_forward(__func__, x, weight, bias, y);
  operators_of(ctx).linear_forward(ctx, x, weight, bias, y);
}

void linear_backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& weight,
                           const Tensor& dx) {
  operands::linear_backward_input(__func__, dy, weight, dx);
  operators_of(ctx).linear_backward_input(ctx, dy, weight, dx);
}

void linear_backward_weight(ComputeContext& ctx, const Tensor& x, const Tensor& dy,
                            const Tensor& dweight, const Tensor& dbias) {
  operands::linear_backward_weight(__func__, x, dy, dweight, dbias);
  operators_of(ctx).linear_backward_weight(ctx, x, dy, dweight, dbias);
}

void linear_activation_forward(ComputeContext& ctx, Activation activation, const Tensor& x,
                               const Tensor& weight, const Tensor& bias, const Tensor& raised,
                               const Tensor& y) {
  operands::linear_activation_forward(__func__, activation, x, weight, bias, raised, y);
  operators_of(ctx).linear_activation_forward(ctx, activation, x, weight, bias, raised, y);
}

void linear_activation_backward_input(ComputeContext& ctx, Activation activation, const Tensor& dy,
                                      const Tensor& weight, const Tensor& raised,
                                      const Tensor& draised) {
  operands::linear_activation_backward_input(__func__, activation, dy, weight, raised, draised);
  operators_of(ctx).linear_activation_backward_input(ctx, activation, dy, weight, raised, draised);
}

void embedding_forward(ComputeContext& ctx, const Tensor& tokens, const Tensor& table,
                       const Tensor& positions, const Tensor& out) {
  operands::embedding_forward(__func__, tokens, table, positions, out);
  operators_of(ctx).embedding_forward(ctx, tokens, table, positions, out);
}

void embedding_backward_weight(ComputeContext& ctx, const Tensor& tokens, const Tensor& dout,
                               const Tensor& dtable, const Tensor& dpositions) {
  operands::embedding_backward_weight(__func__, tokens, dout, dtable, dpositions);
  operators_of(ctx).embedding_backward_weight(ctx, tokens, dout, dtable, dpositions);
}

void layer_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& delta,
                        const Tensor& gamma, const Tensor& beta, float epsilon, const Tensor& y,
                        const Tensor& stats) {
  operands::norm_forward(__func__, x, delta, gamma, &beta, y, stats);
  operators_of(ctx).layer_norm_forward(ctx, x, delta, gamma, beta, epsilon, y, stats);
}

void layer_norm_backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                               const Tensor& gamma, const Tensor& stats, const Tensor& dx) {
  operands::norm_backward_input(__func__, dy, x, gamma, stats, 2, dx);
  operators_of(ctx).layer_norm_backward_input(ctx, dy, x, gamma, stats, dx);
}

void layer_norm_backward_weight(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                                const Tensor& stats, const Tensor& dgamma, const Tensor& dbeta) {
  operands::norm_backward_weight(__func__, dy, x, stats, dgamma, &dbeta);
  operators_of(ctx).layer_norm_backward_weight(ctx, dy, x, stats, dgamma, dbeta);
}

void rms_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& delta,
                      const Tensor& gamma, float epsilon, const Tensor& y, const Tensor& stats) {
  operands::norm_forward(__func__, x, delta, gamma, nullptr, y, stats);
  operators_of(ctx).rms_norm_forward(ctx, x, delta, gamma, epsilon, y, stats);
}

void rms_norm_backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                             const Tensor& gamma, const Tensor& stats, const Tensor& dx) {
  operands::norm_backward_input(__func__, dy, x, gamma, stats, 1, dx);
  operators_of(ctx).rms_norm_backward_input(ctx, dy, x, gamma, stats, dx);
}

void rms_norm_backward_weight(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                              const Tensor& stats, const Tensor& dgamma) {
  operands::norm_backward_weight(__func__, dy, x, stats, dgamma, nullptr);
  operators_of(ctx).rms_norm_backward_weight(ctx, dy, x, stats, dgamma);
}

std::size_t attention_state_bytes(DeviceKind device, const AttentionShape& shape, DType dtype) {
  operands::attention_shape(__func__, shape);
  return operators_for(device).attention_state_bytes(shape, dtype);
}

std::string attention_engine(ComputeContext& ctx, const AttentionShape& shape, DType dtype,
                             bool drops) {
  operands::attention_shape(__func__, shape);
  return operators_of(ctx).attention_engine(ctx, shape, dtype, drops);
}

void attention_forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                       const Dropout& dropout, const Tensor& out, std::byte* state) {
  operands::attention_forward(__func__, shape, qkv, out, state);
  operators_of(ctx).attention_forward(ctx, shape, qkv, dropout, out, state);
}

void attention_backward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                        const Tensor& out, const Tensor& dout, const Dropout& dropout,
                        const std::byte* state, const Tensor& dqkv) {
  operands::attention_backward(__func__, shape, qkv, out, dout, state, dqkv);
  operators_of(ctx).attention_backward(ctx, shape, qkv, out, dout, dropout, state, dqkv);
}

void rotary(ComputeContext& ctx, const AttentionShape& shape, float base, const Tensor& qkv,
            bool backward) {
  operands::rotary(__func__, shape, qkv);
  operators_of(ctx).rotary(ctx, shape, base, qkv, backward);
}

void gelu_forward(ComputeContext& ctx, const Tensor& x, const Tensor& y) {
  operands::elementwise(__func__, x, y);
  operators_of(ctx).gelu_forward(ctx, x, y);
}

void gelu_backward(ComputeContext& ctx, const Tensor& x, const Tensor& dy, const Tensor& dx) {
  operands::elementwise_backward(__func__, x, dy, dx);
  operators_of(ctx).gelu_backward(ctx, x, dy, dx);
}

void swiglu_forward(ComputeContext& ctx, const Tensor& gate_up, const Tensor& y) {
  operands::swiglu_forward(__func__, gate_up, y);
  operators_of(ctx).swiglu_forward(ctx, gate_up, y);
}

void swiglu_backward(ComputeContext& ctx, const Tensor& gate_up, const Tensor& dy,
                     const Tensor& dgate_up) {
  operands::swiglu_backward(__func__, gate_up, dy, dgate_up);
  operators_of(ctx).swiglu_backward(ctx, gate_up, dy, dgate_up);
}

void relu_forward(ComputeContext& ctx, const Tensor& x, const Tensor& y) {
  operands::elementwise(__func__, x, y);
  operators_of(ctx).relu_forward(ctx, x, y);
}

void relu_backward(ComputeContext& ctx, const Tensor& x, const Tensor& dy, const Tensor& dx) {
  operands::elementwise_backward(__func__, x, dy, dx);
  operators_of(ctx).relu_backward(ctx, x, dy, dx);
}

void dropout(ComputeContext& ctx, const Tensor& x, const Dropout& dropout, const Tensor& y) {
  operands::elementwise(__func__, x, y);
  operators_of(ctx).dropout(ctx, x, dropout, y);
}

void add(ComputeContext& ctx, const Tensor& x, const Tensor& y) {
  operands::add(__func__, x, y);
  operators_of(ctx).add(ctx, x, y);
}

void convert(ComputeContext& ctx, const Tensor& from, const Tensor& to) {
  operands::convert(__func__, from, to);
  operators_of(ctx).convert(ctx, from, to);
}

void convert_all(ComputeContext& ctx, std::span<const Conversion> conversions) {
  operands::convert_all(__func__, conversions);
  operators_of(ctx).convert_all(ctx, conversions);
}

void softmax_cross_entropy(ComputeContext& ctx, const Tensor& logits, const Tensor& targets,
                           StepValue<double> scale, bool gradient, double* sum) {
  operands::softmax_cross_entropy(__func__, logits, targets, sum);
  operators_of(ctx).softmax_cross_entropy(ctx, logits, targets, scale, gradient, sum);
}

void mean_squared_error(ComputeContext& ctx, const Tensor& outputs, const Tensor& targets,
                        StepValue<double> scale, bool gradient, double* sum) {
  operands::mean_squared_error(__func__, outputs, targets, sum);
  operators_of(ctx).mean_squared_error(ctx, outputs, targets, scale, gradient, sum);
}

void adamw(ComputeContext& ctx, const AdamWStep& step, std::span<const UpdateRun> runs) {
  operands::adamw(__func__, runs);
  operators_of(ctx).adamw(ctx, step, runs);
}

void sgd(ComputeContext& ctx, const SgdStep& step, std::span<const UpdateRun> runs) {
  operands::sgd(__func__, step, runs);
  operators_of(ctx).sgd(ctx, step, runs);
}

void sums_of_squares(ComputeContext& ctx, std::span<const std::span<const float>> vectors,
                     double* sums) {
  operands::sums_of_squares(__func__, vectors, sums);
  operators_of(ctx).sums_of_squares(ctx, vectors, sums);
}

std::size_t linear_forward_workspace(ComputeContext& ctx, const LinearShape& shape) {
  return operators_of(ctx).linear_forward_workspace(ctx, shape);
}

std::size_t linear_backward_weight_workspace(ComputeContext& ctx, const LinearShape& shape) {
  return operators_of(ctx).linear_backward_weight_workspace(ctx, shape);
}

std::size_t linear_activation_backward_input_workspace(ComputeContext& ctx, Activation activation,
                                                       const LinearShape& shape) {
  return operators_of(ctx).linear_activation_backward_input_workspace(ctx, activation, shape);
}

std::size_t embedding_backward_weight_workspace(ComputeContext& ctx, std::int64_t rows,
                                                std::int64_t vocabulary, std::int64_t width) {
  return operators_of(ctx).embedding_backward_weight_workspace(ctx, rows, vocabulary, width);
}

std::size_t norm_backward_weight_workspace(ComputeContext& ctx, std::int64_t rows,
                                           std::int64_t width, int terms) {
  return operators_of(ctx).norm_backward_weight_workspace(ctx, rows, width, terms);
}

std::size_t attention_forward_workspace(ComputeContext& ctx, const AttentionShape& shape,
                                        DType dtype, bool drops) {
  operands::attention_shape(__func__, shape);
  return operators_of(ctx).attention_forward_workspace(ctx, shape, dtype, drops);
}

std::size_t attention_backward_workspace(ComputeContext& ctx, const AttentionShape& shape,
                                         DType dtype, bool drops) {
  operands::attention_shape(__func__, shape);
  return operators_of(ctx).attention_backward_workspace(ctx, shape, dtype, drops);
}

std::size_t softmax_cross_entropy_workspace(std::int64_t rows) { return row_sum_bytes(rows); }

std::size_t mean_squared_error_workspace(std::int64_t elements) {
  return block_sum_bytes(elements);
}

std::size_t sum_of_squares_workspace(std::int64_t elements) { return block_sum_bytes(elements); }

}  // namespace sluice
