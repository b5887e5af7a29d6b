// LayerNorm and RMSNorm, forward: a warp per row. It keeps a row of up to 2048 in registers; where
// a wider one is read once more, it is in the cache.

#include "stages/cuda_kernels/kernels.hpp"
#include "stages/cuda_kernels/norm.cuh"

namespace sluice::cuda {

namespace {

template <typename T, typename X>
struct Forward {
  const X* x;
  const float* gamma;
  const float* beta;  // null for RMSNorm
  float epsilon;
  T* y;
  float* stats;
  NormShape shape;
};

// kCount packs of a lane from its one at i on, all at once, hence without a branch: past the end of
// the row its last one, which is of no use.
template <int N, typename T, int kCount>
__device__ void read_packs(const T* row, int64_t width, int64_t i, Floats<N> (&packs)[kCount]) {
  const int first = static_cast<int>(i), last = static_cast<int>(width) - N;
#pragma unroll
  for (int pack = 0; pack < kCount; ++pack) {
    packs[pack] = load<N>(row + min(first + pack * kWarpThreads * N, last));
  }
}

// kPacks > 0: a lane keeps that many packs of its row, which it reads once. 0: rows of any width,
// read again for each pass. The order of the sums is the same.
template <Norm kNorm, int N, int kPacks, typename T, typename X>
__global__ void __launch_bounds__(kRowsPerBlock* kWarpThreads, kPacks* N > 32 ? 4 : 6)
    forward_kernel(const Forward<T, X> a) {
  constexpr bool kKept = kPacks > 0;
  const int64_t width = a.shape.width;
  const float inverse = 1.0F / static_cast<float>(width);
  for_warp_row(a.shape.rows, [&](int64_t row, int lane) {
    const X* x = a.x + row * width;
    Floats<N> v[kKept ? kPacks : 1];
    const auto each_pack = [&](const auto& body) { for_packs<N, kPacks>(width, lane, body); };
    if constexpr (kKept) read_packs<N>(x, width, lane * N, v);
    const auto read = [&](int pack, int64_t i) {
      if constexpr (!kKept) v[pack] = load<N>(x + i);
    };
    float sum = 0;  // of x, or of its squares
    each_pack([&](int pack, int64_t i) {
      read(pack, i);
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

template <Norm kNorm, typename T, typename X>
void run_forward(ComputeContext& ctx, const Forward<T, X>& arguments) {
  constexpr int kAtOnce = kWide<T, X>;
  const auto& a = arguments;
  const bool wide = a.shape.width % kAtOnce == 0 && aligned(a.x, a.gamma, a.beta, a.y);
  if (a.shape.rows == 0) return;
  with_packs<kAtOnce>(a.shape.width, wide, [&](auto at_once, auto packs) {
    launch(kNorm == Norm::kLayer ? "layer norm forward" : "rms norm forward",
           forward_kernel<kNorm, at_once, packs, T, X>, warp_rows(a.shape.rows),
           native(ctx.stream()), a);
  });
}

template <Norm kNorm>
void norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& gamma, const float* beta,
                  float epsilon, const Tensor& y, const Tensor& stats) {
  const auto run = [&](auto y_type, auto x_type) {
    using T = decltype(y_type);
    using X = decltype(x_type);
    run_forward<kNorm>(ctx, Forward<T, X>{x.as<X>(), gamma.as<float>(), beta, epsilon, y.as<T>(),
                                          stats.as<float>(), shape_of(x, gamma)});
  };
  if (x.spec.dtype == DType::kBf16) return run(Bf16{}, Bf16{});
  with_type(y.spec.dtype, [&](auto y_type) { run(y_type, float{}); });
}

}  // namespace

void layer_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& gamma,
                        const Tensor& beta, float epsilon, const Tensor& y, const Tensor& stats) {
  norm_forward<Norm::kLayer>(ctx, x, gamma, beta.as<float>(), epsilon, y, stats);
}

void rms_norm_forward(ComputeContext& ctx, const Tensor& x, const Tensor& gamma, float epsilon,
                      const Tensor& y, const Tensor& stats) {
  norm_forward<Norm::kRms>(ctx, x, gamma, nullptr, epsilon, y, stats);
}

}  // namespace sluice::cuda
