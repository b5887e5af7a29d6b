// Element-wise operators.
#include <cstring>

#include "stages/compute/call_arguments.hpp"
#include "stages/cpu/cpu_backend.hpp"
#include "stages/cpu/parallel.hpp"

namespace sluice::cpu {

namespace {

const PointwiseKernels& kernels_of(ComputeContext& ctx, Pointwise function, const Tensor& x) {
  return kernels_for(ctx, x.spec.dtype).pointwise[static_cast<int>(function)];
}

// gate_up is [rows, 2 * hidden]; hidden is its last dimension's half.
std::int64_t hidden_of(const Tensor& gate_up) {
  return gate_up.shape()[gate_up.shape().rank() - 1] / 2;
}

}  // namespace

void pointwise_forward(ComputeContext& ctx, Pointwise function, const Tensor& x, const Tensor& y) {
  const auto kernel = kernels_of(ctx, function, x).forward;
  parallel_range(ctx, x.elements(), kElementGrain, [&](std::int64_t begin, std::int64_t end) {
    kernel(element(x, begin), element(y, begin), end - begin);
  });
}

void pointwise_backward(ComputeContext& ctx, Pointwise function, const Tensor& x, const Tensor& dy,
                        const Tensor& dx) {
  const auto kernel = kernels_of(ctx, function, x).backward;
  parallel_range(ctx, x.elements(), kElementGrain, [&](std::int64_t begin, std::int64_t end) {
    kernel(element(x, begin), element(dy, begin), element(dx, begin), end - begin);
  });
}

void swiglu_forward(ComputeContext& ctx, const Tensor& gate_up, const Tensor& y) {
  const std::int64_t hidden = hidden_of(gate_up);
  if (hidden == 0) return;
  const TypedKernels& kernels = kernels_for(ctx, y.spec.dtype);
  parallel_range(ctx, y.elements() / hidden, 1, [&](std::int64_t begin, std::int64_t end) {
    kernels.swiglu_forward(element(gate_up, 2 * begin * hidden), element(y, begin * hidden),
                           end - begin, hidden);
  });
}

void swiglu_backward(ComputeContext& ctx, const Tensor& gate_up, const Tensor& dy,
                     const Tensor& dgate_up) {
  const std::int64_t hidden = hidden_of(gate_up);
  if (hidden == 0) return;
  const TypedKernels& kernels = kernels_for(ctx, dy.spec.dtype);
  parallel_range(ctx, dy.elements() / hidden, 1, [&](std::int64_t begin, std::int64_t end) {
    kernels.swiglu_backward(element(gate_up, 2 * begin * hidden), element(dy, begin * hidden),
                            element(dgate_up, 2 * begin * hidden), end - begin, hidden);
  });
}

void dropout(ComputeContext& ctx, const Tensor& x, const Dropout& dropout, const Tensor& y) {
  if (dropout.probability == 0) return cpu::convert(ctx, x, y);
  const TypedKernels& kernels = kernels_for(ctx, y.spec.dtype);
  const auto kernel = x.spec.dtype == y.spec.dtype ? kernels.dropout : kernels.dropout_from_float;
  parallel_range(ctx, x.elements(), kElementGrain, [&](std::int64_t begin, std::int64_t end) {
    const DropoutArguments arguments = dropout_arguments(dropout, begin);
    kernel(&arguments, element(x, begin), element(y, begin), end - begin);
  });
}

void dropout_residual(ComputeContext& ctx, const Tensor& x, const Dropout& dropout,
                      const Tensor& residual, const Tensor& y) {
  const TypedKernels& kernels = kernels_for(ctx, x.spec.dtype);
  const auto kernel =
      y.spec.dtype == DType::kF32 ? kernels.dropout_residual : kernels.dropout_residual_typed;
  parallel_range(ctx, x.elements(), kElementGrain, [&](std::int64_t begin, std::int64_t end) {
    const DropoutArguments arguments = dropout_arguments(dropout, begin);
    kernel(&arguments, element(x, begin), element(residual, begin), element(y, begin), end - begin);
  });
}

void add(ComputeContext& ctx, const Tensor& x, const Tensor& y) {
  const TypedKernels& kernels = kernels_for(ctx, x.spec.dtype);
  const auto kernel = y.spec.dtype == DType::kF32 ? kernels.add : kernels.add_typed;
  parallel_range(ctx, x.elements(), kElementGrain, [&](std::int64_t begin, std::int64_t end) {
    kernel(element(x, begin), element(y, begin), end - begin);
  });
}

void convert(ComputeContext& ctx, const Tensor& from, const Tensor& to) {
  if (from.spec.dtype == to.spec.dtype) {
    if (from.data != to.data) std::memcpy(to.data, from.data, from.spec.bytes());
    return;
  }
  const TypedKernels& kernels = kernels_of(ctx).bf16;
  const auto kernel = to.spec.dtype == DType::kBf16 ? kernels.from_float : kernels.to_float;
  parallel_range(ctx, from.elements(), kElementGrain, [&](std::int64_t begin, std::int64_t end) {
    kernel(element(from, begin), element(to, begin), end - begin);
  });
}

}  // namespace sluice::cpu
