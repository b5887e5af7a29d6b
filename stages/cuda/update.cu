// Optimizer updates over all runs of a stage, and sums of squares.
#include <algorithm>

#include "stages/backends.hpp"
#include "stages/call_arguments.hpp"
#include "stages/cuda/block_sums.cuh"

namespace sluice::cuda {

namespace {

constexpr int kPacks = 4;  // per thread and chunk
constexpr int kPack = kWide<float>;
constexpr int64_t kChunk = int64_t{kBlockThreads} * kPacks * kPack;  // elements of a run per block

// What one launch updates: a kernel's parameters hold 4 KiB.
struct RunTable {
  static constexpr int kRuns = 64;
  UpdateRun runs[kRuns];
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
};
static_assert(sizeof(RunTable) <= 3840);

struct AdamWUpdate {
  AdamWArguments arguments;
  template <int N>
  __device__ void run(const UpdateRun& run, int64_t i) const {
    AdamWArguments a = arguments;
    if (!run.decay) a.decay = 0;
    const Floats<N> grad = load<N>(run.grad + i);
    Floats<N> value = load<N>(run.value + i), first = load<N>(run.first + i);
    Floats<N> second = load<N>(run.second + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      adamw_update(a, grad.at[k], value.at[k], first.at[k], second.at[k]);
    }
    store(run.value + i, value);
    store(run.first + i, first);
    store(run.second + i, second);
  }
};

struct SgdUpdate {
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
      const Floats<N> velocity = load<N>(run.first + i);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        direction.at[k] = sgd_momentum(a, direction.at[k], velocity.at[k]);
      }
      store(run.first + i, direction);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) value.at[k] = sgd_value(a, value.at[k], direction.at[k]);
    store(run.value + i, value);
  }
};

template <typename Update>
__global__ void __launch_bounds__(kBlockThreads)
    update_kernel(const __grid_constant__ Update update, const __grid_constant__ RunTable table) {
  const int64_t chunks = table.first_chunk[table.count];
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const int index = table.run_of(chunk);
    const UpdateRun& run = table.runs[index];
    const int64_t first = (chunk - table.first_chunk[index]) * kChunk;
    const int64_t end = first + kChunk < run.count ? first + kChunk : run.count;
    const auto bits =
        reinterpret_cast<std::uintptr_t>(run.value) | reinterpret_cast<std::uintptr_t>(run.grad) |
        reinterpret_cast<std::uintptr_t>(run.first) | reinterpret_cast<std::uintptr_t>(run.second);
    const int64_t packed_end = bits % sizeof(Pack<float, kPack>) == 0 ? end / kPack * kPack : first;
    for (int64_t i = first + int64_t{threadIdx.x} * kPack; i < packed_end;
         i += int64_t{kBlockThreads} * kPack) {
      update.template run<kPack>(run, i);
    }
    for (int64_t i = packed_end + threadIdx.x; i < end; i += kBlockThreads) {
      update.template run<1>(run, i);
    }
  }
}

// A few launches at most: neighbouring parameters that decay alike are one run.
template <typename Update>
void run_updates(ComputeContext& ctx, const char* name, const Update& update,
                 std::span<const UpdateRun> runs) {
  for (std::size_t next = 0; next < runs.size();) {
    RunTable table{};
    int64_t chunks = 0;
    for (; next < runs.size() && table.count < RunTable::kRuns; ++next) {
      if (runs[next].count == 0) continue;
      table.runs[table.count] = runs[next];
      chunks += divide_up(runs[next].count, kChunk);
      table.first_chunk[++table.count] = chunks;
    }
    if (chunks == 0) continue;
    launch(name, update_kernel<Update>, {blocks_for(chunks, 1), kBlockThreads},
           native(ctx.stream()), update, table);
  }
}

struct Squares {
  const float* values;
  __device__ double of(int64_t i) const {
    const auto value = static_cast<double>(values[i]);
    return value * value;
  }
};

}  // namespace

void adamw(ComputeContext& ctx, const AdamWStep& step, std::span<const UpdateRun> runs) {
  run_updates(ctx, "adamw", AdamWUpdate{adamw_arguments(step, true)}, runs);
}

void sgd(ComputeContext& ctx, const SgdStep& step, std::span<const UpdateRun> runs) {
  run_updates(ctx, "sgd", SgdUpdate{sgd_arguments(step, true)}, runs);
}

void sum_of_squares(ComputeContext& ctx, std::span<const float> values, double* sum) {
  sum_of_blocks(ctx, "sum of squares", Squares{values.data()}, static_cast<int64_t>(values.size()),
                sum);
}

}  // namespace sluice::cuda
