// Element-wise operators.
#include "stages/compute/call_arguments.hpp"
#include "stages/cuda_kernels/elements.cuh"
#include "stages/cuda_kernels/kernels.hpp"
#include "stages/cuda_kernels/random.cuh"

namespace sluice::cuda {

namespace {

// y = f(x)
template <typename Function, typename From, typename To>
struct Unary {
  const From* x;
  To* y;
  template <int N>
  __device__ void run(int64_t i) const {
    Floats<N> values = load<N>(x + i);
#pragma unroll
    for (int k = 0; k < N; ++k) values.at[k] = Function::of(values.at[k]);
    store(y + i, values);
  }
};

// y = f(x, y), of another y where `to` is elsewhere
template <typename Function, typename X, typename Y>
struct Binary {
  const X* x;
  const Y* y;
  Y* to;
  template <int N>
  __device__ void run(int64_t i) const {
    const Floats<N> first = load<N>(x + i);
    Floats<N> second = load<N>(y + i);
#pragma unroll
    for (int k = 0; k < N; ++k) second.at[k] = Function::of(first.at[k], second.at[k]);
    store(to + i, second);
  }
};

struct Same {
  static __device__ float of(float x) { return x; }
};
template <typename Function>
struct Value {
  static __device__ float of(float x) { return Function{}.value(x); }
};
template <typename Function>
struct Gradient {
  static __device__ float of(float x, float dy) { return Function{}.gradient(x, dy); }
};
struct Added {
  static __device__ float of(float x, float y) { return y + x; }
};

// y = sum + bias + residual, each where it is there. y may be the sum's memory.
template <typename T>
struct FinishedSum {
  const float* sum;
  const float* bias;
  const T* residual;
  T* y;
  int64_t width;
  template <int N>
  __device__ void run(int64_t row, int64_t column) const {
    const int64_t at = row * width + column;
    Floats<N> values = load<N>(sum + at);
    if (bias != nullptr) add_to(values, load<N>(bias + column));
    if (residual != nullptr) add_to(values, load<N>(residual + at));
    store(y + at, values);
  }
};

template <typename Function, typename From, typename To>
void run_unary(ComputeContext& ctx, const char* name, const Tensor& x, const Tensor& y) {
  for_elements<kWide<From, To>>(ctx, name, x.elements(), aligned(x.data, y.data),
                                Unary<Function, From, To>{x.as<From>(), y.as<To>()});
}
template <typename Function>
void run_unary(ComputeContext& ctx, const char* name, const Tensor& x, const Tensor& y) {
  with_type(x.spec.dtype, [&](auto type) {
    using T = decltype(type);
    run_unary<Function, T, T>(ctx, name, x, y);
  });
}

template <typename Function>
void run_gradient(ComputeContext& ctx, const char* name, const Tensor& x, const Tensor& dy,
                  const Tensor& dx) {
  with_type(x.spec.dtype, [&](auto type) {
    using T = decltype(type);
    for_elements<kWide<T>>(ctx, name, x.elements(), aligned(x.data, dy.data, dx.data),
                           Binary<Function, T, T>{x.as<T>(), dy.as<T>(), dx.as<T>()});
  });
}

// gate_up is [rows, 2 * hidden]; hidden is its last dimension's half.
int64_t hidden_of(const Tensor& gate_up) { return gate_up.shape()[gate_up.shape().rank() - 1] / 2; }

template <typename T>
struct SwigluForward {
  const T* gate_up;
  T* y;
  int64_t hidden;
  template <int N>
  __device__ void run(int64_t row, int64_t column) const {
    const T* gate = gate_up + row * 2 * hidden + column;
    Floats<N> values = load<N>(gate);
    const Floats<N> up = load<N>(gate + hidden);
#pragma unroll
    for (int k = 0; k < N; ++k) values.at[k] = swiglu(values.at[k], up.at[k]);
    store(y + row * hidden + column, values);
  }
};

template <typename T>
struct SwigluBackward {
  const T* gate_up;
  const T* dy;
  T* dgate_up;
  int64_t hidden;
  template <int N>
  __device__ void run(int64_t row, int64_t column) const {
    const int64_t at = row * 2 * hidden + column;
    const Floats<N> gate = load<N>(gate_up + at), up = load<N>(gate_up + at + hidden);
    const Floats<N> gradient = load<N>(dy + row * hidden + column);
    Floats<N> dgate, dup;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      swiglu_gradient(gate.at[k], up.at[k], gradient.at[k], dgate.at[k], dup.at[k]);
    }
    store(dgate_up + at, dgate);
    store(dgate_up + at + hidden, dup);
  }
};

// Random numbers take many registers, and memory many loads in flight.
constexpr int kDropoutBlocks = 8;

template <typename X, typename Y>
struct DropoutBody {
  DropoutArguments arguments;
  const X* x;
  Y* y;
  template <int N>
  __device__ void run(int64_t i) const {
    Floats<N> values = load<N>(x + i);
    drop_consecutive(at_step(arguments), arguments.first + static_cast<uint64_t>(i), values);
    store(y + i, values);
  }
};

template <typename X, typename Y>
struct DropoutResidualBody {
  DropoutArguments arguments;
  const X* x;
  const Y* residual;
  Y* y;
  template <int N>
  __device__ void run(int64_t i) const {
    Floats<N> values = load<N>(x + i);
    const Floats<N> before = load<N>(residual + i);
    drop_consecutive(at_step(arguments), arguments.first + static_cast<uint64_t>(i), values);
    add_to(values, before);
    store(y + i, values);
  }
};

template <template <typename, typename> typename Body, typename X, typename Y, typename... Operands>
void run_dropout(ComputeContext& ctx, const char* name, const Dropout& dropout, const Tensor& x,
                 const Tensor& y, const Operands*... operands) {
  const DropoutArguments arguments = dropout_arguments(dropout, 0);
  // Words come in fours.
  const bool wide = aligned(x.data, operands..., y.data) && arguments.first % 4 == 0;
  for_elements<kWide<X, Y>, kDropoutBlocks>(
      ctx, name, x.elements(), wide,
      Body<X, Y>{arguments, x.as<X>(), static_cast<const Y*>(operands)..., y.as<Y>()});
}

}  // namespace

void pointwise_forward(ComputeContext& ctx, Pointwise function, const Tensor& x, const Tensor& y) {
  switch (function) {
#define SLUICE_FORWARD(name) \
  case Pointwise::k##name:   \
    return run_unary<Value<name>>(ctx, #name " forward", x, y);
    SLUICE_POINTWISE(SLUICE_FORWARD)
    case Pointwise::kCount:
      break;
  }
}

void pointwise_backward(ComputeContext& ctx, Pointwise function, const Tensor& x, const Tensor& dy,
                        const Tensor& dx) {
  switch (function) {
#define SLUICE_BACKWARD(name) \
  case Pointwise::k##name:    \
    return run_gradient<Gradient<name>>(ctx, #name " backward", x, dy, dx);
    SLUICE_POINTWISE(SLUICE_BACKWARD)
    case Pointwise::kCount:
      break;
  }
}

void swiglu_forward(ComputeContext& ctx, const Tensor& gate_up, const Tensor& y) {
  const int64_t hidden = hidden_of(gate_up);
  if (hidden == 0) return;
  with_type(y.spec.dtype, [&](auto type) {
    using T = decltype(type);
    for_rows<kWide<T>>(ctx, "swiglu forward", y.elements() / hidden, hidden,
                       hidden % kWide<T> == 0 && aligned(gate_up.data, y.data),
                       SwigluForward<T>{gate_up.as<T>(), y.as<T>(), hidden});
  });
}

void swiglu_backward(ComputeContext& ctx, const Tensor& gate_up, const Tensor& dy,
                     const Tensor& dgate_up) {
  const int64_t hidden = hidden_of(gate_up);
  if (hidden == 0) return;
  with_type(dy.spec.dtype, [&](auto type) {
    using T = decltype(type);
    for_rows<kWide<T>>(ctx, "swiglu backward", dy.elements() / hidden, hidden,
                       hidden % kWide<T> == 0 && aligned(gate_up.data, dy.data, dgate_up.data),
                       SwigluBackward<T>{gate_up.as<T>(), dy.as<T>(), dgate_up.as<T>(), hidden});
  });
}

void dropout(ComputeContext& ctx, const Tensor& x, const Dropout& dropout, const Tensor& y) {
  if (dropout.probability == 0) return cuda::convert(ctx, x, y);
  with_type(y.spec.dtype, [&](auto y_type) {
    using Y = decltype(y_type);
    if (x.spec.dtype == y.spec.dtype) {
      run_dropout<DropoutBody, Y, Y>(ctx, "dropout", dropout, x, y);
    } else {
      run_dropout<DropoutBody, float, Y>(ctx, "dropout", dropout, x, y);
    }
  });
}

void dropout_residual(ComputeContext& ctx, const Tensor& x, const Dropout& dropout,
                      const Tensor& residual, const Tensor& y) {
  with_type(x.spec.dtype, [&](auto x_type) {
    using X = decltype(x_type);
    const auto run = [&](auto y_type) {
      using Y = decltype(y_type);
      run_dropout<DropoutResidualBody, X, Y>(ctx, "dropout to residual", dropout, x, y,
                                             residual.data);
    };
    y.spec.dtype == DType::kF32 ? run(float{}) : run(X{});
  });
}

void add(ComputeContext& ctx, const Tensor& x, const Tensor& y) {
  with_type(x.spec.dtype, [&](auto type) {
    using T = decltype(type);
    const auto run = [&](auto y_type) {
      using Y = decltype(y_type);
      for_elements<kWide<T>>(ctx, "addition", x.elements(), aligned(x.data, y.data),
                             Binary<Added, T, Y>{x.as<T>(), y.as<Y>(), y.as<Y>()});
    };
    y.spec.dtype == DType::kF32 ? run(float{}) : run(T{});
  });
}

void finish_sum(ComputeContext& ctx, const Tensor& sum, const Tensor& bias, const Tensor& residual,
                const Tensor& y) {
  if (y.spec.dtype == DType::kF32 && bias.data == nullptr && residual.data == nullptr) return;
  const int64_t rows = sum.shape()[0], width = sum.shape()[1];
  with_type(y.spec.dtype, [&](auto type) {
    using T = decltype(type);
    for_rows<kWide<T>>(
        ctx, "end of a sum over shards", rows, width,
        width % kWide<T> == 0 && aligned(sum.data, bias.data, residual.data, y.data),
        FinishedSum<T>{sum.as<float>(), bias.as<float>(), residual.as<T>(), y.as<T>(), width});
  });
}

void convert(ComputeContext& ctx, const Tensor& from, const Tensor& to) {
  if (from.spec.dtype == to.spec.dtype) {
    if (from.data != to.data) copy_async(to.data, from.data, from.spec.bytes(), ctx.stream());
  } else if (to.spec.dtype == DType::kBf16) {
    run_unary<Same, float, Bf16>(ctx, "conversion to bf16", from, to);
  } else {
    run_unary<Same, Bf16, float>(ctx, "conversion to f32", from, to);
  }
}

}  // namespace sluice::cuda
