// The matrix product layer on a GPU: one product for all rows. A GPU has no cache to block for; the
// shape of the micro-batch alone fixes a product.
#include "stages/cuda/cuda_backend.hpp"
#include "stages/cuda/cuda_operators.hpp"
#include "stages/cuda_kernels/kernels.hpp"

namespace sluice::cuda {

namespace {

LinearShape shape_of(const Tensor& weight, std::int64_t rows) {
  return {.rows = rows, .in = weight.shape()[1], .out = weight.shape()[0]};
}

std::int64_t rows_of(const Tensor& tensor, std::int64_t width) {
  return width == 0 ? 0 : tensor.elements() / width;
}

// x weightᵀ
MatMulSpec forward_product(const LinearShape& shape, DType operands, DType result, bool bias) {
  return {.m = shape.rows,
          .n = shape.out,
          .k = shape.in,
          .a = {.row = shape.in},
          .b = {.row = 1, .column = shape.in},
          .c = {.row = shape.out},
          .operands = operands,
          .result = result,
          .bias = bias};
}

// dy weight
MatMulSpec backward_product(const LinearShape& shape, DType dtype) {
  return {.m = shape.rows,
          .n = shape.in,
          .k = shape.out,
          .a = {.row = shape.out},
          .b = {.row = shape.in},
          .c = {.row = shape.in},
          .operands = dtype,
          .result = dtype};
}

// The library adds a bias of the result's type only; a bf16 result gets it rounded, in scratch.
std::size_t rounded_bias_bytes(std::int64_t out, DType result) {
  return result == DType::kF32 ? 0 : static_cast<std::size_t>(out) * size_of(result);
}

const void* bias_for(ComputeContext& ctx, const Tensor& bias, DType result) {
  if (bias.data == nullptr || result == DType::kF32) return bias.data;
  Tensor rounded = {nullptr, {result, bias.shape()}};
  rounded.data = ctx.workspace(rounded_bias_bytes(bias.elements(), result));
  cuda::convert(ctx, bias, rounded);
  return rounded.data;
}

// Whether the product applies or differentiates GELU itself. Only in bf16: there the library's
// approximation of tanh is lost in the rounding of the result. On Ampere and Ada its fused products
// are slower than a product and a kernel. It takes rows of multiples of 8 elements.
bool fuses(ComputeContext& ctx, const ProductSpec& spec) {
  constexpr int kHopper = 90;
  const MatMulSpec& product = spec.product;
  CudaBackend& cuda = backend_of(ctx);
  return product.operands == DType::kBf16 && product.result == DType::kBf16 &&
         cuda.compute_capability() >= kHopper && product.c.row % 8 == 0 && product.m > 0 &&
         cuda.matmuls().supports(spec);
}

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
  const LinearShape shape = shape_of(weight, rows_of(x, weight.shape()[1]));
  backend_of(ctx).matmuls().run(
      {forward_product(shape, x.spec.dtype, y.spec.dtype, bias.data != nullptr)},
      {.a = x.data, .b = weight.data, .bias = bias_for(ctx, bias, y.spec.dtype), .c = y.data});
}

void linear_backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& weight,
                           const Tensor& dx) {
  const LinearShape shape = shape_of(weight, rows_of(dy, weight.shape()[0]));
  backend_of(ctx).matmuls().run({backward_product(shape, dy.spec.dtype)},
                                {.a = dy.data, .b = weight.data, .c = dx.data});
}

// The product adds to the gradient in f32 (beta = 1). The library's bias-gradient epilogue stores
// the sums of this micro-batch alone, in the type of dy: a separate kernel adds them in f32.
void linear_backward_weight(ComputeContext& ctx, const Tensor& x, const Tensor& dy,
                            const Tensor& dweight, const Tensor& dbias) {
  const LinearShape shape = shape_of(dweight, rows_of(x, dweight.shape()[1]));
  if (dbias.data != nullptr) add_column_sums(ctx, dy, dbias);
  backend_of(ctx).matmuls().run({{.m = shape.out,
                                  .n = shape.in,
                                  .k = shape.rows,
                                  .a = {.row = 1, .column = shape.out},
                                  .b = {.row = shape.in},
                                  .c = {.row = shape.in},
                                  .operands = x.spec.dtype,
                                  .accumulate = true}},
                                {.a = dy.data, .b = x.data, .c = dweight.data});
}

void linear_activation_forward(ComputeContext& ctx, Activation activation, const Tensor& x,
                               const Tensor& weight, const Tensor& bias, const Tensor& raised,
                               const Tensor& y) {
  const LinearShape shape = shape_of(weight, rows_of(x, weight.shape()[1]));
  const ProductSpec fused = {
      forward_product(shape, x.spec.dtype, y.spec.dtype, bias.data != nullptr), Epilogue::kGelu};
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
    cuda::gelu_forward(ctx, raised, y);
  } else {
    cuda::swiglu_forward(ctx, raised, y);
  }
}

void linear_activation_backward_input(ComputeContext& ctx, Activation activation, const Tensor& dy,
                                      const Tensor& weight, const Tensor& raised,
                                      const Tensor& draised) {
  LinearShape shape = shape_of(weight, rows_of(dy, weight.shape()[0]));
  shape.operands = dy.spec.dtype;
  if (activation == Activation::kGelu) {
    const ProductSpec fused = {backward_product(shape, dy.spec.dtype), Epilogue::kGeluGradient};
    if (fuses(ctx, fused)) {
      backend_of(ctx).matmuls().run(
          fused, {.a = dy.data, .b = weight.data, .c = draised.data, .aux = raised.data});
      return;
    }
    cuda::linear_backward_input(ctx, dy, weight, draised);
    cuda::gelu_backward(ctx, raised, draised, draised);
    return;
  }
  Tensor gradient = {nullptr, {dy.spec.dtype, {shape.rows, shape.in}}};
  gradient.data =
      ctx.workspace(cuda::linear_activation_backward_input_workspace(ctx, activation, shape));
  cuda::linear_backward_input(ctx, dy, weight, gradient);
  cuda::swiglu_backward(ctx, raised, gradient, draised);
}

}  // namespace

LinearOperators linear_operators() {
  return {
      .linear_forward = linear_forward,
      .linear_backward_input = linear_backward_input,
      .linear_backward_weight = linear_backward_weight,
      .linear_activation_forward = linear_activation_forward,
      .linear_activation_backward_input = linear_activation_backward_input,
      .linear_forward_workspace = linear_forward_workspace,
      .linear_backward_weight_workspace = linear_backward_weight_workspace,
      .linear_activation_backward_input_workspace = linear_activation_backward_input_workspace,
  };
}

}  // namespace sluice::cuda
