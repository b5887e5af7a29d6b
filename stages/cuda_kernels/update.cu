// Optimizer updates over all runs of a stage, the rounding of all its weights, and sums of squares.
#include <algorithm>
#include <type_traits>

#include "stages/compute/call_arguments.hpp"
#include "stages/cuda_kernels/block_sums.cuh"
#include "stages/cuda_kernels/kernels.hpp"
#include "stages/cuda_kernels/random.cuh"

namespace sluice::cuda {

namespace {

constexpr int kPacks = 4;  // per thread and chunk
template <typename Body>
constexpr int64_t kChunk = int64_t{kBlockThreads * kPacks} * Body::kPack;  // of a run, per block

// What one launch works on: a kernel's parameters hold 32,764 bytes (CUDA 12.1 or newer).
template <typename Run, int kMostRuns>
struct RunTable {
  static constexpr int kRuns = kMostRuns;
  Run runs[kRuns];
  int64_t first_chunk[kRuns + 1];  // of each run among all chunks
  int count;

  // The run that chunk `chunk` belongs to.
  [[nodiscard]] __device__ int run_of(int64_t chunk) const {
    int low = 0, high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_chunk[middle] <= chunk ? low : high) = middle;
    }
    return low;
  }
  void add(const Run& run, int64_t chunks) {
    runs[count] = run;
    first_chunk[count + 1] = first_chunk[count] + chunks;
    ++count;
  }
  [[nodiscard]] __host__ __device__ int64_t chunks() const { return first_chunk[count]; }
  static_assert(kRuns * (sizeof(Run) + sizeof(int64_t)) <= 32'000);
};
struct AdamWRun : AdamWRange {
  int64_t count;
  bool decay;
};
using AdamWTable = RunTable<AdamWRun, 400>;
using SgdTable = RunTable<UpdateRun, 400>;
struct Rounding {
  const float* from;
  Bf16* to;
  int64_t count;
};
using RoundingTable = RunTable<Rounding, 1000>;
struct Vector {
  const float* values;
  int64_t count;
};
using SquareTable = RunTable<Vector, 1024>;

__device__ bool aligned_run(const AdamWRange& run) {
  return aligned(run.value, run.grad, run.first, run.second, run.bf16_copy);
}
__device__ bool aligned_run(const UpdateRun& run) {
  return aligned(run.value, run.grad, run.first, run.second);
}
__device__ bool aligned_run(const Rounding& run) { return aligned(run.from, run.to); }

// A word per element.
template <int N>
struct Words {
  uint32_t at[N];
};

// Of elements `first` to first + N - 1 of a stream.
template <int N>
SLUICE_MATH Words<N> random_words(const uint32_t (&key)[2], uint64_t first) {
  Words<N> words;
  if constexpr (N % 4 == 0) {
    if (first % 4 == 0) {
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        const PhiloxWords block = philox_words(key, first / 4 + static_cast<uint64_t>(i / 4));
#pragma unroll
        for (int k = 0; k < 4; ++k) words.at[i + k] = block.at[k];
      }
      return words;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) words.at[i] = philox_word(key, first + static_cast<uint64_t>(i));
  return words;
}

template <int N>
SLUICE_MATH void store_at_random(Bf16* to, const Floats<N>& values, const Words<N>& random) {
  if constexpr (N == 8) {
    const auto pair = [&](int i) {
      return round_at_random(values.at[i], random.at[i]) |
             round_at_random(values.at[i + 1], random.at[i + 1]) << 16;
    };
    __stwb(reinterpret_cast<uint4*>(to), make_uint4(pair(0), pair(2), pair(4), pair(6)));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      to[i].bits = static_cast<uint16_t>(round_at_random(values.at[i], random.at[i]));
    }
  }
}

// T: of the moments.
template <typename T>
struct AdamWUpdate {
  static constexpr int kPack = kWide<T>;
  AdamWArguments arguments;
  template <int N>
  __device__ void run(const AdamWRun& run, int64_t i) const {
    AdamWArguments a = arguments;
    if (!run.decay) a.decay = a.coupled_decay = 0;
    auto* const firsts = static_cast<T*>(run.first) + i;
    auto* const seconds = static_cast<T*>(run.second) + i;
    const Floats<N> grad = load<N>(run.grad + i);
    Floats<N> value = load<N>(run.value + i), first = load<N>(firsts), second = load<N>(seconds);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      adamw_update(a, grad.at[k], value.at[k], first.at[k], second.at[k]);
    }
    store(run.value + i, value);
    if (run.bf16_copy != nullptr) store(static_cast<Bf16*>(run.bf16_copy) + i, value);
    if constexpr (std::is_same_v<T, float>) {
      store(firsts, first);
      store(seconds, second);
    } else {
      Words<N> words = random_words<N>(run.key, run.element + static_cast<uint64_t>(i));
      store_at_random(firsts, first, words);
#pragma unroll
      for (int k = 0; k < N; ++k) words.at[k] >>= 16;
      store_at_random(seconds, second, words);
    }
  }
};

struct SgdUpdate {
  static constexpr int kPack = kWide<float>;
  SgdArguments arguments;
  template <int N>
  __device__ void run(const UpdateRun& run, int64_t i) const {
    SgdArguments a = arguments;
    if (!run.decay) a.decay = 0;
    const Floats<N> grad = load<N>(run.grad + i);
    Floats<N> value = load<N>(run.value + i), direction;
#pragma unroll
    for (int k = 0; k < N; ++k) direction.at[k] = sgd_direction(a, grad.at[k], value.at[k]);
    if (run.first != nullptr) {
      auto* const velocities = static_cast<float*>(run.first) + i;
      Floats<N> velocity = load<N>(velocities);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        velocity.at[k] = sgd_momentum(a, direction.at[k], velocity.at[k]);
        direction.at[k] = sgd_step(a, direction.at[k], velocity.at[k]);
      }
      store(velocities, velocity);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) value.at[k] = sgd_value(a, value.at[k], direction.at[k]);
    store(run.value + i, value);
  }
};

struct Rounded {
  static constexpr int kPack = kWide<Bf16>;
  template <int N>
  __device__ void run(const Rounding& run, int64_t i) const {
    store(run.to + i, load<N>(run.from + i));
  }
};

// body.run<N>(run, i) for elements [i, i + N) of a run, all of every run.
template <typename Body, typename Table>
__global__ void __launch_bounds__(kBlockThreads)
    runs_kernel(const Body __grid_constant__ body, const Table __grid_constant__ table) {
  constexpr int kPack = Body::kPack;
  const int64_t chunks = table.chunks();
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const int index = table.run_of(chunk);
    const auto& run = table.runs[index];
    const int64_t first = (chunk - table.first_chunk[index]) * kChunk<Body>;
    const int64_t end = first + kChunk<Body> < run.count ? first + kChunk<Body> : run.count;
    const int64_t packed_end = aligned_run(run) ? end / kPack * kPack : first;
    for (int64_t i = first + int64_t{threadIdx.x} * kPack; i < packed_end;
         i += int64_t{kBlockThreads} * kPack) {
      body.template run<kPack>(run, i);
    }
    for (int64_t i = packed_end + threadIdx.x; i < end; i += kBlockThreads) {
      body.template run<1>(run, i);
    }
  }
}

// Over to_run(item) of all items, in as few launches as their tables allow. Of parameters,
// neighbours that decay alike are one run: 8 of them per layer of a GPT-2, 4 of a Llama. So one
// launch for up to about 50 layers of a GPT-2 on one rank. Where the moments are bf16, or some
// parameters have a copy in bf16, each may be a run: 12 of them per layer.
template <typename Table, typename Body, typename Item, typename ToRun>
void for_runs(ComputeContext& ctx, const char* name, const Body& body, std::span<const Item> items,
              const ToRun& to_run) {
  for (std::size_t next = 0; next < items.size();) {
    Table table{};
    for (; next < items.size() && table.count < Table::kRuns; ++next) {
      const auto run = to_run(items[next]);
      table.add(run, divide_up(run.count, kChunk<Body>));
    }
    if (table.chunks() == 0) continue;
    launch(name, runs_kernel<Body, Table>, {blocks_for(table.chunks(), 1), kBlockThreads},
           native(ctx.stream()), body, table);
  }
}

struct Squares {
  const float* values;
  template <int N>
  __device__ void add(int64_t i, double& sum) const {
    const Floats<N> terms = load<N>(values + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const auto value = static_cast<double>(terms.at[k]);
      sum += value * value;
    }
  }
};

// sums[block] = the sum of squares of one block of kSumBlock elements of a vector.
__global__ void __launch_bounds__(kSumThreads)
    squares_kernel(const SquareTable __grid_constant__ table, double* const sums) {
  const int64_t blocks = table.chunks();
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int index = table.run_of(block);
    const auto [values, count] = table.runs[index];
    const int64_t first = (block - table.first_chunk[index]) * kSumBlock;
    const int64_t end = first + kSumBlock < count ? first + kSumBlock : count;
    const double sum = sum_of_range(Squares{values}, first, end, aligned(values));
    if (threadIdx.x == 0) sums[block] = sum;
  }
}

}  // namespace

void adamw(ComputeContext& ctx, const AdamWStep& step, std::span<const UpdateRun> runs) {
  with_type(step.moments, [&](auto type) {
    for_runs<AdamWTable>(ctx, "adamw", AdamWUpdate<decltype(type)>{adamw_arguments(step, true)},
                         runs, [&](const UpdateRun& run) {
                           return AdamWRun{adamw_range(step, run, 0), run.count, run.decay};
                         });
  });
}

void sgd(ComputeContext& ctx, const SgdStep& step, std::span<const UpdateRun> runs) {
  for_runs<SgdTable>(ctx, "sgd", SgdUpdate{sgd_arguments(step, true)}, runs,
                     [](const UpdateRun& run) { return run; });
}

void convert_all(ComputeContext& ctx, std::span<const Conversion> conversions) {
  for_runs<RoundingTable>(ctx, "conversions to bf16", Rounded{}, conversions,
                          [](const Conversion& conversion) {
                            const auto& [from, to] = conversion;
                            return Rounding{from.as<float>(), to.as<Bf16>(), from.elements()};
                          });
}

void sums_of_squares(ComputeContext& ctx, std::span<const std::span<const float>> vectors,
                     double* sums) {
  for (std::size_t next = 0; next < vectors.size();) {
    SquareTable table{};
    for (; next < vectors.size() && table.count < SquareTable::kRuns; ++next) {
      const Vector vector = {vectors[next].data(), static_cast<int64_t>(vectors[next].size())};
      table.add(vector, sum_blocks(vector.count));
    }
    if (table.chunks() == 0) continue;
    launch("sums of squares", squares_kernel, {blocks_for(table.chunks(), 1), kSumThreads},
           native(ctx.stream()), table, sums);
    sums += table.chunks();
  }
}

}  // namespace sluice::cuda
