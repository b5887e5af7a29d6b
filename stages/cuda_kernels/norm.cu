// LayerNorm and RMSNorm: a warp per row. It keeps a row of up to 2048 in registers; where a wider
// one is read once more, it is in the cache.
#include <type_traits>

#include "stages/cuda_kernels/column_sums.cuh"
#include "stages/cuda_kernels/elements.cuh"
#include "stages/cuda_kernels/kernels.hpp"

namespace sluice::cuda {

namespace {

enum class Norm { kLayer, kRms };

constexpr int kRowsPerBlock = 4;

struct NormShape {
  int64_t rows, width;
};

NormShape shape_of(const Tensor& x, const Tensor& gamma) {
  const int64_t width = gamma.elements();
  return {width == 0 ? 0 : x.elements() / width, width};
}

// body(row, lane) for the row of the thread's warp, if there is one. No loop over a grid's shares:
// it would keep addresses in registers from row to row.
template <typename Body>
__device__ void for_warp_row(int64_t rows, const Body& body) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarpThreads;
  if (row < rows) body(row, lane);
}

LaunchShape warp_rows(int64_t rows) {
  return {static_cast<unsigned>(divide_up(rows, kRowsPerBlock)), kRowsPerBlock * kWarpThreads};
}

template <typename T, typename Delta>
struct Forward {
  float* x;
  const Delta* delta;  // may be null
  const float* gamma;
  const float* beta;  // null for RMSNorm
  float epsilon;
  T* y;
  float* stats;
  NormShape shape;
};

// A lane's packs of N in a row: body(pack, i) for each that starts at i. kPacks is the most there
// are of them; 0: any number, all called pack 0.
template <int N, int kPacks, typename Body>
__device__ void for_packs(int64_t width, int lane, const Body& body) {
  if constexpr (kPacks > 0) {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      const int64_t i = lane * N + int64_t{pack} * kWarpThreads * N;
      if (i < width) body(pack, i);
    }
  } else {
    for (int64_t i = lane * N; i < width; i += kWarpThreads * N) body(0, i);
  }
}

// kCount packs of a lane from its one at i on, all at once, hence without a branch: past the end of
// the row its last one, which is of no use. Kept: Floats<N>, or Pack<T, N> as they lie in memory.
template <int N, typename T, typename Kept, int kCount>
__device__ void read_packs(const T* row, int64_t width, int64_t i, Kept (&packs)[kCount]) {
  const int first = static_cast<int>(i), last = static_cast<int>(width) - N;
#pragma unroll
  for (int pack = 0; pack < kCount; ++pack) {
    const T* from = row + min(first + pack * kWarpThreads * N, last);
    if constexpr (std::is_same_v<Kept, Floats<N>>) {
      packs[pack] = load<N>(from);
    } else {
      packs[pack] = *reinterpret_cast<const Kept*>(from);
    }
  }
}

// kPacks > 0: a lane keeps that many packs of its row, which it reads once. 0: rows of any width,
// read again for each pass. The order of the sums is the same.
template <Norm kNorm, int N, int kPacks, typename T, typename Delta>
__global__ void __launch_bounds__(kRowsPerBlock* kWarpThreads, kPacks* N > 32 ? 4 : 6)
    forward_kernel(const Forward<T, Delta> a) {
  constexpr bool kKept = kPacks > 0;
  const int64_t width = a.shape.width;
  const float inverse = 1.0F / static_cast<float>(width);
  for_warp_row(a.shape.rows, [&](int64_t row, int lane) {
    float* x = a.x + row * width;
    const Delta* delta = a.delta == nullptr ? nullptr : a.delta + row * width;
    Floats<N> v[kKept ? kPacks : 1];
    const auto each_pack = [&](const auto& body) { for_packs<N, kPacks>(width, lane, body); };
    if constexpr (kKept) {
      read_packs<N>(x, width, lane * N, v);
      if (delta != nullptr) {
        Floats<N> change[kPacks];
        read_packs<N>(delta, width, lane * N, change);
#pragma unroll
        for (int pack = 0; pack < kPacks; ++pack) add_to(v[pack], change[pack]);
        each_pack([&](int pack, int64_t i) { store(x + i, v[pack]); });
      }
    }
    const auto read = [&](int pack, int64_t i) {
      if constexpr (!kKept) v[pack] = load<N>(x + i);
    };
    float sum = 0;  // of x, or of its squares
    each_pack([&](int pack, int64_t i) {
      read(pack, i);
      if (!kKept && delta != nullptr) {
        add_to(v[pack], load<N>(delta + i));
        store(x + i, v[pack]);
      }
#pragma unroll
      for (const float value : v[pack].at) sum += kNorm == Norm::kLayer ? value : value * value;
    });
    sum = warp_sum(sum);
    const float mean = kNorm == Norm::kLayer ? inverse * sum : 0.0F;
    if constexpr (kNorm == Norm::kLayer) {
      sum = 0;  // of squares about the mean
      each_pack([&](int pack, int64_t i) {
        read(pack, i);
#pragma unroll
        for (const float value : v[pack].at) sum += (value - mean) * (value - mean);
      });
      sum = warp_sum(sum);
    }
    const float rstd = 1.0F / ::sqrtf(inverse * sum + a.epsilon);
    each_pack([&](int pack, int64_t i) {
      read(pack, i);
      const Floats<N> gamma = load<N>(a.gamma + i);
      Floats<N> y;
      if constexpr (kNorm == Norm::kLayer) {
        const Floats<N> beta = load<N>(a.beta + i);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          y.at[k] = layer_norm_value(v[pack].at[k], mean, rstd, gamma.at[k], beta.at[k]);
        }
      } else {
#pragma unroll
        for (int k = 0; k < N; ++k) y.at[k] = rms_norm_value(v[pack].at[k], rstd, gamma.at[k]);
      }
      store(a.y + row * width + i, y);
    });
    if (lane == 0) {
      if constexpr (kNorm == Norm::kLayer) {
        a.stats[2 * row] = mean;
        a.stats[2 * row + 1] = rstd;
      } else {
        a.stats[row] = rstd;
      }
    }
  });
}

// Calls body(N, kPacks) with what a kernel is to take, each a constant. Two numbers of packs are
// kept: the fewer registers, the more rows are under way.
template <int kAtOnce, typename Body>
void with_packs(int64_t width, bool wide, const Body& body) {
  const int64_t each = divide_up(width, kWarpThreads);
  if (!wide) {
    body(std::integral_constant<int, 1>{}, std::integral_constant<int, 0>{});
  } else if (each <= 32) {
    body(std::integral_constant<int, kAtOnce>{}, std::integral_constant<int, 32 / kAtOnce>{});
  } else if (each <= 64) {
    body(std::integral_constant<int, kAtOnce>{}, std::integral_constant<int, 64 / kAtOnce>{});
  } else {
    body(std::integral_constant<int, kAtOnce>{}, std::integral_constant<int, 0>{});
  }
}

template <Norm kNorm, typename T, typename Delta>
void run_forward(ComputeContext& ctx, const Forward<T, Delta>& arguments) {
  constexpr int kAtOnce = kWide<T, Delta>;
  const auto& a = arguments;
  const bool wide = a.shape.width % kAtOnce == 0 && aligned(a.x, a.delta, a.gamma, a.beta, a.y);
  if (a.shape.rows == 0) return;
  with_packs<kAtOnce>(a.shape.width, wide, [&](auto at_once, auto packs) {
    launch(kNorm == Norm::kLayer ? "layer norm forward" : "rms norm forward",
           forward_kernel<kNorm, at_once, packs, T, Delta>, warp_rows(a.shape.rows),
           native(ctx.stream()), a);
  });
}

template <Norm kNorm>
void norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& delta, const Tensor& gamma,
                  const float* beta, float epsilon, const Tensor& y, const Tensor& stats) {
  with_type(y.spec.dtype, [&](auto y_type) {
    using T = decltype(y_type);
    const auto run = [&](auto delta_type) {
      using Delta = decltype(delta_type);
      run_forward<kNorm>(
          ctx, Forward<T, Delta>{x.as<float>(), delta.as<Delta>(), gamma.as<float>(), beta, epsilon,
                                 y.as<T>(), stats.as<float>(), shape_of(x, gamma)});
    };
    if (delta.data != nullptr && delta.spec.dtype == DType::kBf16) {
      run(Bf16{});
    } else {
      run(float{});
    }
  });
}

template <typename T>
struct Backward {
  const T* dy;
  const float* x;
  const float* gamma;
  const float* stats;
  float* dx;
  NormShape shape;
};

// Blocks per multiprocessor that leave the registers for `kept` of a row.
constexpr int backward_blocks(int kept) { return kept > 96 ? 2 : kept > 48 ? 3 : 4; }

// kPacks as in the forward pass. dy is kept as it lies in memory, for bf16 in half the registers;
// of dx four packs are under way, the row's first four from the start on.
template <Norm kNorm, int N, int kPacks, typename T>
__global__ void __launch_bounds__(kRowsPerBlock* kWarpThreads,
                                  backward_blocks(kPacks* N*(4 + sizeof(T)) / 4))
    backward_kernel(const Backward<T> a) {
  constexpr bool kKept = kPacks > 0;
  constexpr int kAhead = kKept ? 4 : 1;
  const int64_t width = a.shape.width;
  const float inverse = 1.0F / static_cast<float>(width);
  for_warp_row(a.shape.rows, [&](int64_t row, int lane) {
    const T* dy = a.dy + row * width;
    const float* x = a.x + row * width;
    float* to = a.dx + row * width;
    Pack<T, N> d[kKept ? kPacks : 1];
    Floats<N> v[kKept ? kPacks : 1], dx[kAhead];
    const auto read = [&](int64_t i) {
      read_packs<N>(dy, width, i, d);
      read_packs<N>(x, width, i, v);
    };
    const auto each_pack = [&](const auto& body) { for_packs<N, kPacks>(width, lane, body); };
    if constexpr (kKept) {
      read(lane * N);
      read_packs<N>(to, width, lane * N, dx);
    }
    const float mean = kNorm == Norm::kLayer ? a.stats[2 * row] : 0.0F;
    const float rstd = kNorm == Norm::kLayer ? a.stats[2 * row + 1] : a.stats[row];
    float sum = 0, dot = 0;
    each_pack([&](int pack, int64_t i) {
      if constexpr (!kKept) read(i);
      const Floats<N> gamma = load<N>(a.gamma + i);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float g = widen(d[pack].at[k]) * gamma.at[k];
        sum += g;
        dot = fma(g, v[pack].at[k] - mean, dot);
      }
    });
    dot = warp_sum(dot);
    NormGradient gradient;
    if constexpr (kNorm == Norm::kLayer) {
      gradient = layer_norm_gradient(mean, rstd, warp_sum(sum), dot, inverse);
    } else {
      gradient = rms_norm_gradient(rstd, dot, inverse);
    }
    each_pack([&](int pack, int64_t i) {
      if constexpr (!kKept) read(i);
      if (!kKept || (pack > 0 && pack % kAhead == 0)) read_packs<N>(to, width, i, dx);
      const Floats<N> gamma = load<N>(a.gamma + i);
      Floats<N>& changed = dx[pack % kAhead];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float g = widen(d[pack].at[k]) * gamma.at[k];
        changed.at[k] += kNorm == Norm::kLayer ? layer_norm_change(gradient, g, v[pack].at[k])
                                               : rms_norm_change(gradient, g, v[pack].at[k]);
      }
      store(to + i, changed);
    });
  });
}

template <Norm kNorm>
void norm_backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                         const Tensor& gamma, const Tensor& stats, const Tensor& dx) {
  const NormShape shape = shape_of(x, gamma);
  if (shape.rows == 0) return;
  with_type(dy.spec.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kAtOnce = kWide<T>;
    const Backward<T> arguments = {dy.as<T>(),        x.as<float>(),  gamma.as<float>(),
                                   stats.as<float>(), dx.as<float>(), shape};
    const bool wide = shape.width % kAtOnce == 0 && aligned(dy.data, x.data, gamma.data, dx.data);
    with_packs<kAtOnce>(shape.width, wide, [&](auto at_once, auto packs) {
      launch(kNorm == Norm::kLayer ? "layer norm backward" : "rms norm backward",
             backward_kernel<kNorm, at_once, packs, T>, warp_rows(shape.rows), native(ctx.stream()),
             arguments);
    });
  });
}

// Shares of dgamma and, for LayerNorm, dbeta.
template <Norm kNorm, typename T>
struct WeightTerms {
  static constexpr int kTerms = kNorm == Norm::kLayer ? 2 : 1, kRowsAtOnce = 2;
  const T* dy;
  const float* x;
  const float* stats;
  int64_t width;
  template <int N>
  struct Row {
    Floats<N> dy, x;
    float mean, rstd;
  };
  template <int N>
  __device__ Row<N> load(int64_t row, int64_t column) const {
    const float mean = kNorm == Norm::kLayer ? stats[2 * row] : 0.0F;
    const float rstd = kNorm == Norm::kLayer ? stats[2 * row + 1] : stats[row];
    return {cuda::load<N>(dy + row * width + column), cuda::load<N>(x + row * width + column), mean,
            rstd};
  }
  template <int N>
  __device__ void add(const Row<N>& row, Floats<N> (&sums)[kTerms]) const {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float d = row.dy.at[k], v = row.x.at[k];
      const float normal = kNorm == Norm::kLayer ? (v - row.mean) * row.rstd : v * row.rstd;
      sums[0].at[k] = fma(d, normal, sums[0].at[k]);
      if constexpr (kNorm == Norm::kLayer) sums[1].at[k] += d;
    }
  }
};

template <Norm kNorm>
void norm_backward_weight(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                          const Tensor& stats, const Tensor& dgamma, Write write,
                          float* const (&out)[kNorm == Norm::kLayer ? 2 : 1]) {
  const NormShape shape = shape_of(x, dgamma);
  with_type(dy.spec.dtype, [&](auto type) {
    using T = decltype(type);
    write_sums<kWide<T>>(
        ctx, kNorm == Norm::kLayer ? "layer norm weights" : "rms norm weights",
        WeightTerms<kNorm, T>{dy.as<T>(), x.as<float>(), stats.as<float>(), shape.width},
        shape.rows, shape.width, shape.width % kWide<T> == 0 && aligned(dy.data, x.data), write,
        out);
  });
}

std::size_t norm_backward_weight_workspace(ComputeContext& /*ctx*/, std::int64_t rows,
                                           std::int64_t width, int terms) {
  return column_sums_bytes(rows, width, terms);
}

void layer_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& delta,
                        const Tensor& gamma, const Tensor& beta, float epsilon, const Tensor& y,
                        const Tensor& stats) {
  norm_forward<Norm::kLayer>(ctx, x, delta, gamma, beta.as<float>(), epsilon, y, stats);
}

void layer_norm_backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                               const Tensor& gamma, const Tensor& stats, const Tensor& dx) {
  norm_backward_input<Norm::kLayer>(ctx, dy, x, gamma, stats, dx);
}

void layer_norm_backward_weight(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                                const Tensor& stats, const Tensor& dgamma, const Tensor& dbeta,
                                Write write) {
  norm_backward_weight<Norm::kLayer>(ctx, dy, x, stats, dgamma, write,
                                     {dgamma.as<float>(), dbeta.as<float>()});
}

void rms_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& delta,
                      const Tensor& gamma, float epsilon, const Tensor& y, const Tensor& stats) {
  norm_forward<Norm::kRms>(ctx, x, delta, gamma, nullptr, epsilon, y, stats);
}

void rms_norm_backward_input(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                             const Tensor& gamma, const Tensor& stats, const Tensor& dx) {
  norm_backward_input<Norm::kRms>(ctx, dy, x, gamma, stats, dx);
}

void rms_norm_backward_weight(ComputeContext& ctx, const Tensor& dy, const Tensor& x,
                              const Tensor& stats, const Tensor& dgamma, Write write) {
  norm_backward_weight<Norm::kRms>(ctx, dy, x, stats, dgamma, write, {dgamma.as<float>()});
}

}  // namespace

NormOperators norm_operators() {
  return {
      .layer_norm_forward = layer_norm_forward,
      .layer_norm_backward_input = layer_norm_backward_input,
      .layer_norm_backward_weight = layer_norm_backward_weight,
      .rms_norm_forward = rms_norm_forward,
      .rms_norm_backward_input = rms_norm_backward_input,
      .rms_norm_backward_weight = rms_norm_backward_weight,
      .norm_backward_weight_workspace = norm_backward_weight_workspace,
  };
}

}  // namespace sluice::cuda
