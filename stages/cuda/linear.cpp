// The matmul layer on a GPU: one matmul for all rows. Only the shape of the micro-batch
// determines the matmul.
#include "stages/cuda/cuda_backend.hpp"
#include "stages/cuda_kernels/kernels.hpp"

namespace sluice::cuda {

namespace {

// Over the rows of `operand`.
LinearShape shape_of(const Tensor& weight, const Tensor& operand) {
  return {.rows = leading_rows(operand),
          .in = weight.shape()[1],
          .out = weight.shape()[0],
          .operands = operand.spec.dtype};
}

LinearShape forward_shape(const Tensor& x, const Tensor& weight, const Tensor& bias,
                          const Tensor& y) {
  LinearShape shape = shape_of(weight, x);
  shape.result = y.spec.dtype;
  shape.bias = bias.data != nullptr;
  return shape;
}

// The library adds a bias of the result's type only; a bf16 result gets an f32 one rounded, in
// scratch.
std::size_t rounded_bias_bytes(std::int64_t out, DType result) {
  return result == DType::kF32 ? 0 : static_cast<std::size_t>(out) * size_of(result);
}

const void* bias_for(ComputeContext& ctx, const Tensor& bias, DType result) {
  if (bias.data == nullptr || bias.spec.dtype == result) return bias.data;
  Tensor rounded = {nullptr, {result, bias.shape()}};
  rounded.data = ctx.workspace(rounded_bias_bytes(bias.elements(), result));
  cuda::convert(ctx, bias, rounded);
  return rounded.data;
}

// The result of a matmul whose sums have no terms, which the library does not take.
void write_bias(ComputeContext& ctx, const Tensor& bias, const Tensor& y) {
  if (bias.data == nullptr) return fill_zero_async(y.data, y.spec.bytes(), ctx.stream());
  const void* const row = bias_for(ctx, bias, y.spec.dtype);
  const std::size_t bytes = static_cast<std::size_t>(bias.elements()) * size_of(y.spec.dtype);
  for (std::size_t at = 0; at < y.spec.bytes(); at += bytes) {
    copy_async(y.as<std::byte>() + at, row, bytes, ctx.stream());
  }
}

// Whether the matmul applies or differentiates GELU itself. Only in bf16: there the library's
// approximation of tanh is lost in the rounding of the result. On Ampere and Ada its fused matmuls
// are slower than a matmul and a kernel. It takes rows of multiples of 8 elements.
bool fuses(ComputeContext& ctx, const FusedMatmulSpec& spec) {
  constexpr int kHopper = 90;
  const MatmulSpec& matmul = spec.matmul;
  CudaBackend& cuda = backend_of(ctx);
  return matmul.operands == DType::kBf16 && matmul.result == DType::kBf16 &&
         cuda.compute_capability() >= kHopper && matmul.c.row % 8 == 0 && matmul.m > 0 &&
         matmul.k > 0 && cuda.matmuls().supports(spec);
}

}  // namespace

std::size_t linear_forward_workspace(ComputeContext& /*ctx*/, const LinearShape& shape) {
  return shape.bias ? rounded_bias_bytes(shape.out, shape.result) : 0;
}

std::size_t linear_backward_weight_workspace(ComputeContext& /*ctx*/, const LinearShape& shape) {
  return shape.bias ? column_sums_workspace(shape.rows, shape.out) : 0;
}

std::size_t linear_activation_backward_input_workspace(ComputeContext& /*ctx*/,
                                                       Activation activation,
                                                       const LinearShape& shape) {
  if (activation == Activation::kGelu) return 0;
  return TensorSpec{shape.operands, {shape.rows, shape.in}}.bytes();
}

void linear_forward(ComputeContext& ctx, const Tensor& x, const Tensor& weight, const Tensor& bias,
                    const Tensor& y) {
  if (weight.shape()[1] == 0) return write_bias(ctx, bias, y);
  backend_of(ctx).matmuls().run(
      {linear_matmul(forward_shape(x, weight, bias, y))},
      {.a = x.data, .b = weight.data, .bias = bias_for(ctx, bias, y.spec.dtype), .c = y.data});
}

void linear_residual_forward(ComputeContext& ctx, const Tensor& x, const Tensor& weight,
                             const Tensor& bias, const Tensor& residual, const Tensor& y) {
  if (weight.shape()[1] == 0) {
    write_bias(ctx, bias, y);
    return cuda::add(ctx, residual, y);
  }
  MatmulSpec matmul = linear_matmul(forward_shape(x, weight, bias, y));
  matmul.accumulate = true;
  backend_of(ctx).matmuls().run({matmul}, {.a = x.data,
                                           .b = weight.data,
                                           .bias = bias_for(ctx, bias, y.spec.dtype),
                                           .added = residual.data,
                                           .c = y.data});
}

void linear_backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& weight,
                           const Tensor& dx) {
  if (weight.shape()[0] == 0) return write_bias(ctx, {}, dx);
  backend_of(ctx).matmuls().run({linear_input_matmul(shape_of(weight, dy))},
                                {.a = dy.data, .b = weight.data, .c = dx.data});
}

// The matmul adds to the gradient in f32 (beta = 1), or does not read it (beta = 0); the library
// chooses the algorithm without beta. Its bias-gradient epilogue stores only this micro-batch's
// sums: a separate kernel adds them to the gradient (gpu_benchmark biases compares).
void linear_backward_weight(ComputeContext& ctx, const Tensor& x, const Tensor& dy,
                            const Tensor& dweight, const Tensor& dbias, Write write) {
  if (dbias.data != nullptr) sum_columns(ctx, dy, dbias, write);
  const LinearShape shape = shape_of(dweight, x);
  if (shape.rows == 0 && write == Write::kOverwrite) {
    return fill_zero_async(dweight.data, dweight.spec.bytes(), ctx.stream());
  }
  backend_of(ctx).matmuls().run({linear_weight_matmul(shape, write)},
                                {.a = dy.data, .b = x.data, .c = dweight.data});
}

void linear_activation_forward(ComputeContext& ctx, Activation activation, const Tensor& x,
                               const Tensor& weight, const Tensor& bias, const Tensor& raised,
                               const Tensor& y) {
  const FusedMatmulSpec fused = {linear_matmul(forward_shape(x, weight, bias, y)), Epilogue::kGelu};
  if (activation == Activation::kGelu && fuses(ctx, fused)) {
    backend_of(ctx).matmuls().run(fused, {.a = x.data,
                                          .b = weight.data,
                                          .bias = bias_for(ctx, bias, y.spec.dtype),
                                          .c = y.data,
                                          .aux = raised.data});
    return;
  }
  cuda::linear_forward(ctx, x, weight, bias, raised);
  if (activation == Activation::kGelu) {
    cuda::pointwise_forward(ctx, Pointwise::kGeluTanh, raised, y);
  } else {
    cuda::swiglu_forward(ctx, raised, y);
  }
}

void linear_activation_backward_input(ComputeContext& ctx, Activation activation, const Tensor& dy,
                                      const Tensor& weight, const Tensor& raised,
                                      const Tensor& draised) {
  const LinearShape shape = shape_of(weight, dy);
  if (activation == Activation::kGelu) {
    const FusedMatmulSpec fused = {linear_input_matmul(shape), Epilogue::kGeluGradient};
    if (fuses(ctx, fused)) {
      backend_of(ctx).matmuls().run(
          fused, {.a = dy.data, .b = weight.data, .c = draised.data, .aux = raised.data});
      return;
    }
    cuda::linear_backward_input(ctx, dy, weight, draised);
    cuda::pointwise_backward(ctx, Pointwise::kGeluTanh, raised, draised, draised);
    return;
  }
  Tensor gradient = {nullptr, {dy.spec.dtype, {shape.rows, shape.in}}};
  gradient.data =
      ctx.workspace(cuda::linear_activation_backward_input_workspace(ctx, activation, shape));
  cuda::linear_backward_input(ctx, dy, weight, gradient);
  cuda::swiglu_backward(ctx, raised, gradient, draised);
}

}  // namespace sluice::cuda
