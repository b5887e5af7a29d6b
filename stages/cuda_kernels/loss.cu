// Losses: sums per row or block in double, then their sum in a fixed order.
#include <type_traits>

#include "comm/base/sum_tree.hpp"
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

// --- of rows whose classes shards divide ---
// Classes [first, first + width) of all rows. What is summed depends on the panel alone.
template <typename T>
struct Panel {
  T* logits;
  const int32_t* targets;
  int64_t first, rows, width;
};
constexpr int kPanelThreads = 256;  // of a block, which has one row

// maxima[row] = the largest of the panel and, where it is not the first, of what is there.
template <int N, typename T>
__global__ void __launch_bounds__(kPanelThreads)
    panel_maxima_kernel(const Panel<T> a, const bool is_first, float* const maxima) {
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int64_t end = a.targets[row] < 0 ? 0 : a.width;
    float top = kLowest;
    for (int64_t i = static_cast<int64_t>(threadIdx.x) * N; i < end; i += kPanelThreads * N) {
      const Floats<N> values = load<N>(a.logits + row * a.width + i);
#pragma unroll
      for (int k = 0; k < N; ++k) top = ::fmaxf(values.at[k], top);
    }
    top = block_max<kPanelThreads>(top);
    if (threadIdx.x == 0) maxima[row] = is_first ? top : ::fmaxf(maxima[row], top);
  }
}

// Also the target's logit, where the panel has it.
template <int N, typename T>
__global__ void __launch_bounds__(kPanelThreads)
    panel_sums_kernel(const Panel<T> a, const float* const shifts, float* const sums,
                      float* const wanted) {
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* const logits = a.logits + row * a.width;
    const int32_t target = a.targets[row];
    const int64_t end = target < 0 ? 0 : a.width, place = target - a.first;
    const float shift = shifts[row];
    float sum = 0;
    for (int64_t i = static_cast<int64_t>(threadIdx.x) * N; i < end; i += kPanelThreads * N) {
      const Floats<N> values = load<N>(logits + i);
#pragma unroll
      for (int k = 0; k < N; ++k) sum += exponential_below_one(values.at[k] - shift);
    }
    sum = block_sum<kPanelThreads>(sum);
    if (threadIdx.x != 0) continue;
    sums[row] = sum;
    if (place >= 0 && place < end) wanted[row] = widen(logits[place]);
  }
}

// The largest of all ranks, in the first one's place; which zero it is depends on no order.
struct PanelShifts {
  float* maxima;  // [ranks, rows]
  float* wanted;
  int64_t rows;
  int ranks;
  template <int N>
  __device__ void run(int64_t row) const {
    float top = maxima[row];
    for (int rank = 1; rank < ranks; ++rank) top = ::fmaxf(maxima[rank * rows + row], top);
    maxima[row] = top + 0.0F;
    wanted[row] = 0;
  }
};

// The logits of targets in [begin, end), which one rank has.
struct WantedOfRank {
  const int32_t* targets;
  int64_t begin, end;
  const float* from;
  float* wanted;
  template <int N>
  __device__ void run(int64_t row) const {
    if (targets[row] >= begin && targets[row] < end) wanted[row] = from[row];
  }
};

struct RowLosses {
  const int32_t* targets;
  const float* shifts;
  const float* sums;
  const float* wanted;
  double* losses;
  template <int N>
  __device__ void run(int64_t row) const {
    const double at_target = static_cast<double>(wanted[row]) - static_cast<double>(shifts[row]);
    losses[row] =
        targets[row] < 0 ? 0 : rounded_loss(::log(static_cast<double>(sums[row])) - at_target);
  }
};

template <typename T>
struct PanelGradient {
  Panel<T> panel;
  Scale scale;
  const float* shifts;
  const float* sums;
  template <int N>
  __device__ void run(int64_t row, int64_t column) const {
    T* const logits = panel.logits + row * panel.width + column;
    const int32_t target = panel.targets[row];
    Floats<N> values = {};
    if (target >= 0) {
      const float at_target = scale.get(), factor = at_target / sums[row], shift = shifts[row];
      values = load<N>(logits);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        values.at[k] = exponential_below_one(values.at[k] - shift) * factor;
        if (panel.first + column + k == target) values.at[k] -= at_target;
      }
    }
    store(logits, values);
  }
};

// work(panel, number, whether kWide<T> of its logits are read at once) for each.
template <typename Work>
void for_panels(const LogitPanels& panels, const Tensor& targets, const Work& work) {
  const int64_t rows = targets.elements();
  with_type(panels.logits.spec.dtype, [&](auto type) {
    using T = decltype(type);
    T* logits = panels.logits.as<T>();
    for (int number = 0; number < panels.local; ++number) {
      const auto shard = static_cast<std::size_t>(panels.first + number);
      const int64_t first = panels.starts[shard], width = panels.starts[shard + 1] - first;
      work(Panel<T>{logits, targets.as<int32_t>(), first, rows, width}, number,
           width % kWide<T> == 0 && aligned(logits));
      logits += rows * width;
    }
  });
}

// The sum of `leaves` vectors, each `stride` after the one before, in the first one's place.
void add_tree(ComputeContext& ctx, float* values, int leaves, int64_t stride, int64_t count) {
  const auto leaf = [&](std::size_t number) {
    return Tensor{values + static_cast<int64_t>(number) * stride, {DType::kF32, Shape{count}}};
  };
  add_leaves(static_cast<std::size_t>(leaves),
             [&](std::size_t into, std::size_t from) { cuda::add(ctx, leaf(from), leaf(into)); });
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

void panel_maxima(ComputeContext& ctx, const LogitPanels& panels, const Tensor& targets,
                  float* maxima) {
  for_panels(panels, targets, [&]<typename T>(const Panel<T>& panel, int number, bool wide) {
    launch("largest logits of a shard",
           wide ? panel_maxima_kernel<kWide<T>, T> : panel_maxima_kernel<1, T>,
           {blocks_for(panel.rows, 1), kPanelThreads}, native(ctx.stream()), panel, number == 0,
           maxima);
  });
}

void panel_sums(ComputeContext& ctx, const LogitPanels& panels, const Tensor& targets,
                bool /*gradient*/, float* maxima, float* sums, float* found) {
  const int64_t rows = targets.elements();
  float* const wanted = found + rows;
  for_elements<1>(ctx, "largest logits of all shards", rows, false,
                  PanelShifts{maxima, wanted, rows, panels.ranks()});
  for_panels(panels, targets, [&]<typename T>(const Panel<T>& panel, int number, bool wide) {
    launch("sums of exponentials of a shard",
           wide ? panel_sums_kernel<kWide<T>, T> : panel_sums_kernel<1, T>,
           {blocks_for(rows, 1), kPanelThreads}, native(ctx.stream()), panel, maxima,
           sums + number * rows, wanted);
  });
  add_tree(ctx, sums, panels.local, rows, rows);
  copy_async(found, sums, static_cast<std::size_t>(rows) * sizeof(float), ctx.stream());
}

void panel_losses(ComputeContext& ctx, const LogitPanels& panels, const Tensor& targets,
                  StepValue<double> scale, bool gradient, const float* shifts, float* found,
                  double* losses) {
  const int64_t rows = targets.elements();
  float* const wanted = found + rows;
  add_tree(ctx, found, panels.ranks(), 2 * rows, rows);
  for (int rank = 1; rank < panels.ranks(); ++rank) {
    const auto first = static_cast<std::size_t>(rank) * static_cast<std::size_t>(panels.local);
    const auto end = first + static_cast<std::size_t>(panels.local);
    for_elements<1>(ctx, "logits of targets", rows, false,
                    WantedOfRank{targets.as<int32_t>(), panels.starts[first], panels.starts[end],
                                 wanted + rank * 2 * rows, wanted});
  }
  for_elements<1>(ctx, "losses of rows", rows, false,
                  RowLosses{targets.as<int32_t>(), shifts, found, wanted, losses});
  if (!gradient) return;
  for_panels(panels, targets, [&]<typename T>(const Panel<T>& panel, int /*number*/, bool wide) {
    for_rows<kWide<T>>(ctx, "softmax gradient of a shard", rows, panel.width, wide,
                       PanelGradient<T>{panel, scale_of(scale, 1), shifts, found});
  });
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
