// Every operator: its operands are checked once, then handed to the backend of the context's
// device.
#include "stages/operators.hpp"

#include "stages/backends.hpp"
#include "stages/operand_checks.hpp"

namespace sluice {

namespace {

// The GPU's where the build has one; a context for a GPU exists nowhere else.
#if SLUICE_WITH_CUDA
#define SLUICE_BACKEND(ctx, name) \
  ((ctx).device().kind == DeviceKind::kCuda ? cuda::name : cpu::name)
#else
#define SLUICE_BACKEND(ctx, name) cpu::name
#endif

}  // namespace

void linear_forward(ComputeContext& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias,
                    const Tensor& y) {
  operands::linear_forward(__func__, x, weight, bias, y);
  SLUICE_BACKEND(ctx, linear_forward)(ctx, x, weight, bias, y);
}

void linear_backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& weight,
                           const Tensor& dx) {
  operands::linear_backward_input(__func__, dy, weight, dx);
  SLUICE_BACKEND(ctx, linear_backward_input)(ctx, dy, weight, dx);
}

void linear_backward_weight(ComputeContext& ctx, const Tensor& x, const Tensor& dy,
                            const Tensor& dweight, const Tensor& dbias) {
  operands::linear_backward_weight(__func__, x, dy, dweight, dbias);
  SLUICE_BACKEND(ctx, linear_backward_weight)(ctx, x, dy, dweight, dbias);
}

void linear_activation_forward(ComputeContext& ctx, Activation activation, const Tensor& x,
                               const Tensor& weight, const Tensor& bias, const Tensor& raised,
                               const Tensor& y) {
  operands::linear_activation_forward(__func__, activation, x, weight, bias, raised, y);
  SLUICE_BACKEND(ctx, linear_activation_forward)(ctx, activation, x, weight, bias, raised, y);
}

void linear_activation_backward_input(ComputeContext& ctx, Activation activation, const Tensor& dy,
                                      const Tensor& weight, const Tensor& raised,
                                      const Tensor& draised) {
  operands::linear_activation_backward_input(__func__, activation, dy, weight, raised, draised);
  SLUICE_BACKEND(ctx, linear_activation_backward_input)
  (ctx, activation, dy, weight, raised, draised);
}

void embedding_forward(ComputeContext& ctx, const Tensor& tokens, const Tensor& table,
                       const Tensor& positions, const Tensor& out) {
  operands::embedding_forward(__func__, tokens, table, positions, out);
  SLUICE_BACKEND(ctx, embedding_forward)(ctx, tokens, table, positions, out);
}

void embedding_backward_weight(ComputeContext& ctx, const Tensor& tokens, const Tensor& dout,
                               const Tensor& dtable, const Tensor& dpositions) {
  operands::embedding_backward_weight(__func__, tokens, dout, dtable, dpositions);
  SLUICE_BACKEND(ctx, embedding_backward_weight)(ctx, tokens, dout, dtable, dpositions);
}

void layer_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& delta,
                        const Tensor& gamma, const Tensor& beta, float epsilon, const Tensor& y,
                        const Tensor& stats) {
  operands::norm_forward(__func__, x, delta, gamma, &beta, y, stats);
  SLUICE_BACKEND(ctx, layer_norm_forward)(ctx, x, delta, gamma, beta, epsilon, y, stats);
}

void layer_norm_backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                               const Tensor& gamma, const Tensor& stats, const Tensor& dx) {
  operands::norm_backward_input(__func__, dy, x, gamma, stats, 2, dx);
  SLUICE_BACKEND(ctx, layer_norm_backward_input)(ctx, dy, x, gamma, stats, dx);
}

void layer_norm_backward_weight(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                                const Tensor& stats, const Tensor& dgamma, const Tensor& dbeta) {
  operands::norm_backward_weight(__func__, dy, x, stats, dgamma, &dbeta);
  SLUICE_BACKEND(ctx, layer_norm_backward_weight)(ctx, dy, x, stats, dgamma, dbeta);
}

void rms_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& delta,
                      const Tensor& gamma, float epsilon, const Tensor& y, const Tensor& stats) {
  operands::norm_forward(__func__, x, delta, gamma, nullptr, y, stats);
  SLUICE_BACKEND(ctx, rms_norm_forward)(ctx, x, delta, gamma, epsilon, y, stats);
}

void rms_norm_backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                             const Tensor& gamma, const Tensor& stats, const Tensor& dx) {
  operands::norm_backward_input(__func__, dy, x, gamma, stats, 1, dx);
  SLUICE_BACKEND(ctx, rms_norm_backward_input)(ctx, dy, x, gamma, stats, dx);
}

void rms_norm_backward_weight(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                              const Tensor& stats, const Tensor& dgamma) {
  operands::norm_backward_weight(__func__, dy, x, stats, dgamma, nullptr);
  SLUICE_BACKEND(ctx, rms_norm_backward_weight)(ctx, dy, x, stats, dgamma);
}

std::size_t attention_state_bytes([[maybe_unused]] DeviceKind device, const AttentionShape& shape,
                                  DType dtype) {
  operands::attention_shape(__func__, shape);
#if SLUICE_WITH_CUDA
  if (device == DeviceKind::kCuda) return cuda::attention_state_bytes(shape, dtype);
#endif
  return cpu::attention_state_bytes(shape, dtype);
}

std::string attention_engine([[maybe_unused]] ComputeContext& ctx, const AttentionShape& shape,
                             [[maybe_unused]] DType dtype, [[maybe_unused]] bool drops) {
  operands::attention_shape(__func__, shape);
#if SLUICE_WITH_CUDA
  if (ctx.device().kind == DeviceKind::kCuda) {
    return cuda::attention_engine(ctx, shape, dtype, drops);
  }
#endif
  return {};
}

void attention_forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                       const Dropout& dropout, const Tensor& out, std::byte* state) {
  operands::attention_forward(__func__, shape, qkv, out, state);
  SLUICE_BACKEND(ctx, attention_forward)(ctx, shape, qkv, dropout, out, state);
}

void attention_backward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                        const Tensor& out, const Tensor& dout, const Dropout& dropout,
                        const std::byte* state, const Tensor& dqkv) {
  operands::attention_backward(__func__, shape, qkv, out, dout, state, dqkv);
  SLUICE_BACKEND(ctx, attention_backward)(ctx, shape, qkv, out, dout, dropout, state, dqkv);
}

void rotary(ComputeContext& ctx, const AttentionShape& shape, float base, const Tensor& qkv,
            bool backward) {
  operands::rotary(__func__, shape, qkv);
  SLUICE_BACKEND(ctx, rotary)(ctx, shape, base, qkv, backward);
}

void gelu_forward(ComputeContext& ctx, const Tensor& x, const Tensor& y) {
  operands::elementwise(__func__, x, y);
  SLUICE_BACKEND(ctx, gelu_forward)(ctx, x, y);
}

void gelu_backward(ComputeContext& ctx, const Tensor& x, const Tensor& dy, const Tensor& dx) {
  operands::elementwise_backward(__func__, x, dy, dx);
  SLUICE_BACKEND(ctx, gelu_backward)(ctx, x, dy, dx);
}

void swiglu_forward(ComputeContext& ctx, const Tensor& gate_up, const Tensor& y) {
  operands::swiglu_forward(__func__, gate_up, y);
  SLUICE_BACKEND(ctx, swiglu_forward)(ctx, gate_up, y);
}

void swiglu_backward(ComputeContext& ctx, const Tensor& gate_up, const Tensor& dy,
                     const Tensor& dgate_up) {
  operands::swiglu_backward(__func__, gate_up, dy, dgate_up);
  SLUICE_BACKEND(ctx, swiglu_backward)(ctx, gate_up, dy, dgate_up);
}

void relu_forward(ComputeContext& ctx, const Tensor& x, const Tensor& y) {
  operands::elementwise(__func__, x, y);
  SLUICE_BACKEND(ctx, relu_forward)(ctx, x, y);
}

void relu_backward(ComputeContext& ctx, const Tensor& x, const Tensor& dy, const Tensor& dx) {
  operands::elementwise_backward(__func__, x, dy, dx);
  SLUICE_BACKEND(ctx, relu_backward)(ctx, x, dy, dx);
}

void dropout(ComputeContext& ctx, const Tensor& x, const Dropout& dropout, const Tensor& y) {
  operands::elementwise(__func__, x, y);
  SLUICE_BACKEND(ctx, dropout)(ctx, x, dropout, y);
}

void add(ComputeContext& ctx, const Tensor& x, const Tensor& y) {
  operands::add(__func__, x, y);
  SLUICE_BACKEND(ctx, add)(ctx, x, y);
}

void convert(ComputeContext& ctx, const Tensor& from, const Tensor& to) {
  operands::convert(__func__, from, to);
  SLUICE_BACKEND(ctx, convert)(ctx, from, to);
}

void convert_all(ComputeContext& ctx, std::span<const Conversion> conversions) {
  operands::convert_all(__func__, conversions);
  SLUICE_BACKEND(ctx, convert_all)(ctx, conversions);
}

void softmax_cross_entropy(ComputeContext& ctx, const Tensor& logits, const Tensor& targets,
                           StepValue<double> scale, bool gradient, double* sum) {
  operands::softmax_cross_entropy(__func__, logits, targets, sum);
  SLUICE_BACKEND(ctx, softmax_cross_entropy)(ctx, logits, targets, scale, gradient, sum);
}

void mean_squared_error(ComputeContext& ctx, const Tensor& outputs, const Tensor& targets,
                        StepValue<double> scale, bool gradient, double* sum) {
  operands::mean_squared_error(__func__, outputs, targets, sum);
  SLUICE_BACKEND(ctx, mean_squared_error)(ctx, outputs, targets, scale, gradient, sum);
}

void adamw(ComputeContext& ctx, const AdamWStep& step, std::span<const UpdateRun> runs) {
  operands::adamw(__func__, runs);
  SLUICE_BACKEND(ctx, adamw)(ctx, step, runs);
}

void sgd(ComputeContext& ctx, const SgdStep& step, std::span<const UpdateRun> runs) {
  operands::sgd(__func__, step, runs);
  SLUICE_BACKEND(ctx, sgd)(ctx, step, runs);
}

void sums_of_squares(ComputeContext& ctx, std::span<const std::span<const float>> vectors,
                     double* sums) {
  operands::sums_of_squares(__func__, vectors, sums);
  SLUICE_BACKEND(ctx, sums_of_squares)(ctx, vectors, sums);
}

std::size_t linear_forward_workspace(ComputeContext& ctx, const LinearShape& shape) {
  return SLUICE_BACKEND(ctx, linear_forward_workspace)(ctx, shape);
}

std::size_t linear_backward_weight_workspace(ComputeContext& ctx, const LinearShape& shape) {
  return SLUICE_BACKEND(ctx, linear_backward_weight_workspace)(ctx, shape);
}

std::size_t linear_activation_backward_input_workspace(ComputeContext& ctx, Activation activation,
                                                       const LinearShape& shape) {
  return SLUICE_BACKEND(ctx, linear_activation_backward_input_workspace)(ctx, activation, shape);
}

std::size_t embedding_backward_weight_workspace(ComputeContext& ctx, std::int64_t rows,
                                                std::int64_t vocabulary, std::int64_t width) {
  return SLUICE_BACKEND(ctx, embedding_backward_weight_workspace)(ctx, rows, vocabulary, width);
}

std::size_t norm_backward_weight_workspace(ComputeContext& ctx, std::int64_t rows,
                                           std::int64_t width, int terms) {
  return SLUICE_BACKEND(ctx, norm_backward_weight_workspace)(ctx, rows, width, terms);
}

std::size_t attention_forward_workspace(ComputeContext& ctx, const AttentionShape& shape,
                                        DType dtype, bool drops) {
  operands::attention_shape(__func__, shape);
  return SLUICE_BACKEND(ctx, attention_forward_workspace)(ctx, shape, dtype, drops);
}

std::size_t attention_backward_workspace(ComputeContext& ctx, const AttentionShape& shape,
                                         DType dtype, bool drops) {
  operands::attention_shape(__func__, shape);
  return SLUICE_BACKEND(ctx, attention_backward_workspace)(ctx, shape, dtype, drops);
}

// One sum per row.
std::size_t softmax_cross_entropy_workspace(std::int64_t rows) {
  return static_cast<std::size_t>(rows) * sizeof(double);
}

std::size_t mean_squared_error_workspace(std::int64_t elements) {
  return sum_of_squares_workspace(elements);
}

// One sum per block.
std::size_t sum_of_squares_workspace(std::int64_t elements) {
  return static_cast<std::size_t>((elements + kSumBlock - 1) / kSumBlock) * sizeof(double);
}

}  // namespace sluice
