// Losses: sums per row or block in double, then their sum in a fixed order.
#include <type_traits>

#include "stages/compute/call_arguments.hpp"
#include "stages/cuda_context/context.hpp"
#include "stages/cuda_kernels/block_sums.cuh"
#include "stages/cuda_kernels/kernels.hpp"

namespace sluice::cuda {

namespace {

// Threads of a block, which has one row.
constexpr int kThreadsOfLongRow = 704, kThreadsOfShortRow = 64;
constexpr int64_t kShortRow = 2048;
constexpr float kLowest = -3.4e38F;

// Sum of e^(x - top) over some numbers x, top the largest (Milakov and Gimelshein 2018, "Online
// normalizer calculation for softmax").
struct Exponentials {
  float top = kLowest;
  float sum = 0;

  // No NaN is a top, but it makes the sum one.
  template <int N>
  __device__ void add(const Floats<N>& values) {
    float highest = top;
#pragma unroll
    for (int k = 0; k < N; ++k) highest = ::fmaxf(values.at[k], highest);
    if (highest > top) raise(highest);
#pragma unroll
    for (int k = 0; k < N; ++k) sum += exponential_below_one(values.at[k] - top);
  }
  __device__ void raise(float to) {
    sum *= exponential_below_one(top - to);
    top = to;
  }
};

// The scale of gradients times `factor`; from device memory if it is there.
struct Scale {
  double value;
  const double* on_device;
  double factor;
  [[nodiscard]] __device__ float get() const {
    return static_cast<float>(factor * (on_device == nullptr ? value : *on_device));
  }
};
Scale scale_of(StepValue<double> scale, double factor) {
  return {scale.value, scale.on_device, factor};
}

template <typename T>
struct CrossEntropy {
  T* logits;
  const int32_t* targets;
  Scale scale;
  bool gradient;
  double* losses;
  int64_t rows, width;
};

// Loads from `from`, and keeps the bits at `kept` in shared memory.
template <int N, typename T>
__device__ __forceinline__ Floats<N> load_and_keep(const T* from, T* kept) {
  using Raw = std::conditional_t<sizeof(T) * N == 16, uint4, Pack<T, N>>;
  const Raw raw = *reinterpret_cast<const Raw*>(from);
  *reinterpret_cast<Raw*>(kept) = raw;
  return load<N>(reinterpret_cast<const T*>(&raw));
}

// A block per row: once for maximum and sum, once for the gradient, by then from shared memory (of
// the row's size, where kKept) or the cache.
template <int kThreads, int N, bool kKept, typename T>
__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(const CrossEntropy<T> a) {
  constexpr int kStep = kThreads * N;
  T* kept = nullptr;
  if constexpr (kKept) kept = shared_memory<T>();
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    T* logits = a.logits + row * a.width;
    const int64_t first = static_cast<int64_t>(threadIdx.x) * N;
    const int32_t target = a.targets[row];
    if (target < 0) {
      if (threadIdx.x == 0) a.losses[row] = 0;
      for (int64_t i = first; a.gradient && i < a.width; i += kStep) store(logits + i, Floats<N>{});
      continue;
    }
    Exponentials mine;
#pragma unroll 4
    for (int64_t i = first; i < a.width; i += kStep) {
      mine.add(kKept ? load_and_keep<N>(logits + i, kept + i) : load<N>(logits + i));
    }
    const float top = block_max<kThreads>(mine.top);
    mine.raise(top);
    const float sum = block_sum<kThreads>(mine.sum);
    float wanted = 0;  // of thread 0, before anybody overwrites it
    if (threadIdx.x == 0) wanted = widen((kKept ? kept : logits)[target]);
    if constexpr (!kKept) __syncthreads();
    const float scale = a.scale.get(), factor = scale / sum;
#pragma unroll 2
    for (int64_t i = first; a.gradient && i < a.width; i += kStep) {
      Floats<N> values = load<N>((kKept ? kept : logits) + i);
#pragma unroll
      for (int k = 0; k < N; ++k) values.at[k] = exponential_below_one(values.at[k] - top) * factor;
      store(logits + i, values);
    }
    __syncthreads();  // the target's column is written, and all of the row read
    if (threadIdx.x == 0) {
      const double at_target = static_cast<double>(wanted) - static_cast<double>(top);
      a.losses[row] = rounded_loss(::log(static_cast<double>(sum)) - at_target);
      if (a.gradient) narrow(exponential_below_one(wanted - top) * factor - scale, logits[target]);
    }
  }
}

struct SquaredError {
  float* outputs;
  const float* targets;
  Scale scale;
  bool gradient;
  template <int N>
  __device__ void add(int64_t i, double& sum) const {
    Floats<N> difference = load<N>(outputs + i);
    const Floats<N> target = load<N>(targets + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      difference.at[k] -= target.at[k];
      sum += static_cast<double>(difference.at[k]) * static_cast<double>(difference.at[k]);
    }
    if (!gradient) return;
    const float factor = scale.get();
#pragma unroll
    for (int k = 0; k < N; ++k) difference.at[k] *= factor;
    store(outputs + i, difference);
  }
};

// out[block] = the sum over the block's elements.
__global__ void __launch_bounds__(kSumThreads)
    squared_error_kernel(const SquaredError terms, const int64_t count, const bool wide,
                         double* const out) {
  const int64_t blocks = divide_up(count, kSumBlock);
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t end = (block + 1) * kSumBlock < count ? (block + 1) * kSumBlock : count;
    const double sum = sum_of_range(terms, block * kSumBlock, end, wide);
    if (threadIdx.x == 0) out[block] = sum;
  }
}

// One block: *sum = sum of values[0, count), 0 for none.
__global__ void __launch_bounds__(kSumThreads)
    total_kernel(const Doubles terms, const int64_t count, const bool wide, double* const sum) {
  const double total = sum_of_range(terms, 0, count, wide);
  if (threadIdx.x == 0) *sum = total;
}

// *sum = sum of values, in stream order; `sum` is memory that the device can write.
void add_up(ComputeContext& ctx, const double* values, int64_t count, double* sum) {
  launch("sum of partial sums", total_kernel, {1, kSumThreads}, native(ctx.stream()),
         Doubles{values}, count, aligned(values), sum);
}

}  // namespace

// Requires a row.
void row_cross_entropy(ComputeContext& ctx, const Tensor& logits, const Tensor& targets,
                       StepValue<double> scale, bool gradient, double* losses) {
  const int64_t rows = targets.elements(), width = logits.elements() / rows;
  const std::size_t row_bytes = static_cast<std::size_t>(width) * size_of(logits.spec.dtype);
  const auto run = [&](auto threads, auto keeps) {
    constexpr int kThreads = decltype(threads)::value;
    constexpr bool kKept = decltype(keeps)::value;
    with_type(logits.spec.dtype, [&](auto type) {
      using T = decltype(type);
      const bool wide = width % kWide<T> == 0 && aligned(logits.data);
      launch("softmax cross-entropy",
             wide ? cross_entropy_kernel<kThreads, kWide<T>, kKept, T>
                  : cross_entropy_kernel<kThreads, 1, kKept, T>,
             {blocks_for(rows, 1), kThreads, kKept ? row_bytes : 0}, native(ctx.stream()),
             CrossEntropy<T>{logits.as<T>(), targets.as<int32_t>(), scale_of(scale, 1), gradient,
                             losses, rows, width});
    });
  };
  constexpr std::size_t kReserved = 2048;  // of each block, by the system and by reductions
  if (width <= kShortRow) {
    run(std::integral_constant<int, kThreadsOfShortRow>{}, std::false_type{});
  } else if (gradient && 2 * (row_bytes + kReserved) <= context_of(ctx).shared_memory()) {
    run(std::integral_constant<int, kThreadsOfLongRow>{}, std::true_type{});
  } else {
    run(std::integral_constant<int, kThreadsOfLongRow>{}, std::false_type{});
  }
}

void sum_of_losses(ComputeContext& ctx, const double* losses, std::int64_t rows, double* sum) {
  add_up(ctx, losses, rows, sum);
}

void mean_squared_error(ComputeContext& ctx, const Tensor& outputs, const Tensor& targets,
                        StepValue<double> scale, bool gradient, double* sum) {
  const int64_t count = outputs.elements(), blocks = divide_up(count, kSumBlock);
  auto* sums = reinterpret_cast<double*>(ctx.workspace(block_sum_bytes(count)));
  if (blocks > 0) {
    launch("squared error", squared_error_kernel, {blocks_for(blocks, 1), kSumThreads},
           native(ctx.stream()),
           SquaredError{outputs.as<float>(), targets.as<float>(), scale_of(scale, 2), gradient},
           count, aligned(outputs.data, targets.data), sums);
  }
  add_up(ctx, sums, blocks, sum);
}

}  // namespace sluice::cuda
