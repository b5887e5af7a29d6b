// Embedding of tokens and positions.
//
// The gradient of the table sums, per token, the gradients of its places in ascending order,
// without atomic additions of floats: places are sorted by token, stably, by counting (per chunk of
// places how often each token occurs; where the chunk's share of a token's run begins; where each
// place lies within it). Blocks then sum equal tiles of the sorted places, however unequal the runs
// are. Runs that lie inside a tile go to the table at once; pieces of longer ones are kept and
// joined in order. The gradient of positions sums the same numbers in another order: both are
// computed slice by slice of the columns, so that the second reads a slice from the cache.
#include "stages/cuda_kernels/elements.cuh"
#include "stages/cuda_kernels/kernels.hpp"
#include "stages/tensor/bump_allocator.hpp"

namespace sluice::cuda {

namespace {

// Several samples at one position: their tokens are read before the first row of the table, and the
// position's row once.
template <typename S>
struct EmbeddingForward {
  static constexpr int kSamples = 4;
  const int32_t* tokens;
  const float* table;
  const float* positions;  // may be null
  S* out;
  int64_t samples, sequence, width;
  // Of `group`, which is group / sequence in samples and group % sequence in positions.
  template <int N>
  __device__ void run(int64_t group, int64_t column) const {
    const int64_t position = group % sequence, first = group / sequence * kSamples;
    int32_t token[kSamples];
    Floats<N> values[kSamples];
#pragma unroll
    for (int k = 0; k < kSamples; ++k) {  // no branch: all at once, the last again
      token[k] = tokens[min(first + k, samples - 1) * sequence + position];
    }
#pragma unroll
    for (int k = 0; k < kSamples; ++k) values[k] = load<N>(table + token[k] * width + column);
    Floats<N> added = {};
    if (positions != nullptr) added = load<N>(positions + position * width + column);
#pragma unroll
    for (int k = 0; k < kSamples; ++k) {
      if (first + k >= samples) return;
      if (positions != nullptr) add_to(values[k], added);
      store(out + ((first + k) * sequence + position) * width + column, values[k]);
    }
  }
};

// Rows of a table that begins at token `first`, with +0 for -0; zeros for tokens outside it.
struct EmbeddingPart {
  const int32_t* tokens;
  int64_t first, count;
  const float* table;
  float* values;
  int64_t width;
  template <int N>
  __device__ void run(int64_t row, int64_t column) const {
    const int64_t place = tokens[row] - first;
    Floats<N> sum = {};
    if (place >= 0 && place < count) add_to(sum, load<N>(table + place * width + column));
    store(values + row * width + column, sum);
  }
};

template <typename S>
struct PositionGradient {
  const S* dout;
  float* dpositions;
  int64_t samples, sequence, width;
  bool adds;
  template <int N>
  __device__ void run(int64_t position, int64_t column) const {
    Floats<N> sum = {};
    if (adds) sum = load<N>(dpositions + position * width + column);
    for (int64_t sample = 0; sample < samples; ++sample) {
      add_to(sum, load<N>(dout + (sample * sequence + position) * width + column));
    }
    store(dpositions + position * width + column, sum);
  }
};

constexpr int kChunk = 1024;       // places whose tokens are counted together
constexpr int kSortThreads = 256;  // of the kernels that sort
constexpr int kTile = 32;          // sorted places that one block sums

// Sorting's scratch and its results, in the workspace. Of a rank's part of a table, those of the
// tokens before it, and after it, sort as one token each: the sums of a token have one order,
// whichever rank has it.
struct Places {
  const int32_t* tokens;
  int64_t count, vocabulary;
  int32_t first;    // the tokens are `first` to first + last, or the nearest of these
  int32_t last;     // vocabulary - 1
  int32_t others;   // of them at either end: not in the table
  int32_t* counts;  // [chunks, vocabulary]: occurrences; then those in earlier chunks
  int32_t* starts;  // [vocabulary + 1]: of each token's run in `sorted`
  int32_t* totals;  // places per kSortThreads tokens
  int32_t* sorted;  // [count]: places by token, ascending within a token

  [[nodiscard]] __device__ int32_t token_at(int64_t place) const {
    return max(0, min(tokens[place] - first, last));
  }
  // Of the table; not one of the others.
  [[nodiscard]] __device__ bool has(int32_t token) const {
    return token >= others && token <= last - others;
  }
  template <int N>
  [[nodiscard]] __device__ Pack<int32_t, N>* counts_at(int64_t chunk, int64_t token) const {
    return reinterpret_cast<Pack<int32_t, N>*>(counts + chunk * vocabulary + token);
  }
};

__global__ void count_kernel(const Places places) {
  for (int64_t i = grid_thread(); i < places.count; i += grid_threads()) {
    atomicAdd(places.counts + i / kChunk * places.vocabulary + places.token_at(i), 1);
  }
}

// Counts become sums over earlier chunks; starts[token + 1] the number of its places, totals those
// of each block's tokens. A thread per N tokens; N divides the vocabulary.
template <int N>
__global__ void __launch_bounds__(kSortThreads / N) chunk_sums_kernel(const Places places) {
  constexpr int kBatch = 4;  // chunks whose counts are read before any is written
  using Counts = Pack<int32_t, N>;
  const int64_t chunks = divide_up(places.count, kChunk), token = grid_thread() * N;
  Counts sum = {};
  for (int64_t first = 0; token < places.vocabulary && first < chunks; first += kBatch) {
    Counts here[kBatch] = {};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < chunks) here[i] = *places.template counts_at<N>(first + i, token);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < chunks) *places.template counts_at<N>(first + i, token) = sum;
#pragma unroll
      for (int k = 0; k < N; ++k) sum.at[k] += here[i].at[k];
    }
  }
  int32_t all = 0;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (token < places.vocabulary) places.starts[token + 1 + k] = sum.at[k];
    all += sum.at[k];
  }
  const int32_t total = block_sum<kSortThreads / N>(all);
  if (threadIdx.x == 0) places.totals[blockIdx.x] = total;
}

// Numbers of places become sums over earlier tokens. The same blocks.
__global__ void __launch_bounds__(kSortThreads) starts_kernel(const Places places) {
  __shared__ int32_t numbers[kSortThreads];
  const int64_t token = grid_thread();
  const auto thread = static_cast<int>(threadIdx.x);
  int32_t earlier = 0;
  for (int64_t block = thread; block < blockIdx.x; block += kSortThreads) {
    earlier += places.totals[block];
  }
  numbers[thread] = token < places.vocabulary ? places.starts[token + 1] : 0;
  int32_t start = block_sum<kSortThreads>(earlier);  // makes the numbers visible as well
  for (int other = 0; other <= thread; ++other) start += numbers[other];
  if (token < places.vocabulary) places.starts[token + 1] = start;
  if (token == 0) places.starts[0] = 0;
}

// Blocks share a chunk: a thread places one of its tokens.
constexpr int kSortBlocks = kChunk / kSortThreads;

__global__ void __launch_bounds__(kSortThreads) sort_kernel(const Places places) {
  __shared__ int32_t tokens[kChunk];
  const int64_t chunk = blockIdx.x / kSortBlocks, first = chunk * kChunk;
  const auto begin = static_cast<int>(blockIdx.x % kSortBlocks) * kSortThreads;
  const auto end = static_cast<int>(min(places.count - first, int64_t{begin} + kSortThreads));
  const auto thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < end; i += kSortThreads) tokens[i] = places.token_at(first + i);
  __syncthreads();
  const int i = begin + thread;
  if (i >= end) return;
  const int32_t token = tokens[i];
  int32_t at = places.starts[token] + places.counts[chunk * places.vocabulary + token];
  for (int other = 0; other < i; ++other) at += tokens[other] == token ? 1 : 0;
  places.sorted[at] = static_cast<int32_t>(first + i);
}

template <typename S>
struct TableGradient {
  Places places;
  const S* dout;
  float* dtable;
  float* heads;  // [tiles, width]: of the run that began in an earlier tile
  float* tails;  // [tiles, width]: of the run that goes on in the next
  int64_t width;
  bool adds;  // to the table

  [[nodiscard]] __device__ int32_t token_at(int64_t place) const {
    return places.token_at(places.sorted[place]);
  }
  template <int N>
  __device__ void write_to_table(int32_t token, int64_t column, Floats<N> sum) const {
    if (!places.has(token)) return;
    float* to = dtable + (token * width - places.others * width) + column;  // spills no register
    if (adds) add_to(sum, load<N>(to));
    store(to, sum);
  }
};

// The rows of the table that no place has.
template <typename S>
struct AbsentTokens : TableGradient<S> {
  using TableGradient<S>::dtable, TableGradient<S>::places, TableGradient<S>::width;
  template <int N>
  __device__ void run(int64_t token, int64_t column) const {
    if (places.has(static_cast<int32_t>(token)) &&
        places.starts[token] == places.starts[token + 1]) {
      store(dtable + (token - places.others) * width + column, Floats<N>{});
    }
  }
};

template <typename S>
struct TileSums : TableGradient<S> {
  using TableGradient<S>::dout, TableGradient<S>::heads, TableGradient<S>::places;
  using TableGradient<S>::tails, TableGradient<S>::token_at, TableGradient<S>::width;
  using TableGradient<S>::write_to_table;
  template <int N>
  __device__ void run(int64_t tile, int64_t column) const {
    const int64_t first = tile * kTile;
    const int64_t end = first + kTile < places.count ? first + kTile : places.count;
    for (int64_t place = first; place < end;) {
      const int32_t token = token_at(place);
      const int64_t run_end = places.starts[token + 1];
      const int64_t piece_end = run_end < end ? run_end : end;
      Floats<N> sum = {};
#pragma unroll 4
      for (; place < piece_end; ++place) {
        add_to(sum, load<N>(dout + places.sorted[place] * width + column));
      }
      if (places.starts[token] < first) {
        store(heads + tile * width + column, sum);
      } else if (run_end > end) {
        store(tails + tile * width + column, sum);
      } else {
        write_to_table(token, column, sum);
      }
    }
  }
};

// The run that begins in a tile and goes on after it.
template <typename S>
struct JoinedSums : TableGradient<S> {
  using TableGradient<S>::heads, TableGradient<S>::places, TableGradient<S>::tails;
  using TableGradient<S>::token_at, TableGradient<S>::width, TableGradient<S>::write_to_table;
  template <int N>
  __device__ void run(int64_t tile, int64_t column) const {
    const int64_t end = (tile + 1) * kTile;
    if (end >= places.count) return;
    const int32_t token = token_at(end - 1);
    const int64_t run_end = places.starts[token + 1];
    if (run_end <= end || places.starts[token] < tile * kTile) return;
    Floats<N> sum = load<N>(tails + tile * width + column);
    for (int64_t next = tile + 1; next * kTile < run_end; ++next) {
      add_to(sum, load<N>(heads + next * width + column));
    }
    write_to_table(token, column, sum);
  }
};

// Hands out the scratch of a gradient whose counts and width are set; returns the bytes it takes.
template <typename S>
std::size_t cut(TableGradient<S>& gradient, std::byte* base) {
  Places& places = gradient.places;
  const int64_t tiles = divide_up(places.count, kTile);
  BumpAllocator pieces(base);
  places.counts = pieces.take<int32_t>(divide_up(places.count, kChunk) * places.vocabulary);
  places.starts = pieces.take<int32_t>(places.vocabulary + 1);
  places.totals = pieces.take<int32_t>(divide_up(places.vocabulary, kSortThreads));
  places.sorted = pieces.take<int32_t>(places.count);
  gradient.heads = pieces.take<float>(tiles * gradient.width);
  gradient.tails = pieces.take<float>(tiles * gradient.width);
  return pieces.used();
}

template <typename S>
TableGradient<S> take_scratch(ComputeContext& ctx, const Tensor& tokens, int64_t first,
                              int64_t others, const Tensor& dout, const Tensor& dtable,
                              Write write) {
  TableGradient<S> gradient{};
  Places& places = gradient.places;
  places.tokens = tokens.as<int32_t>();
  places.count = tokens.elements();
  places.vocabulary = dtable.shape()[0] + 2 * others;
  places.first = static_cast<int32_t>(first - others);
  places.last = static_cast<int32_t>(places.vocabulary - 1);
  places.others = static_cast<int32_t>(others);
  gradient.dout = dout.as<S>();
  gradient.dtable = dtable.as<float>();
  gradient.width = dtable.shape()[1];
  gradient.adds = write == Write::kAdd;
  cut(gradient, ctx.workspace(cuda::embedding_backward_weight_workspace(
                    ctx, places.count, dtable.shape()[0], gradient.width)));
  return gradient;
}

void sort_places(ComputeContext& ctx, const Places& places) {
  const cudaStream_t stream = native(ctx.stream());
  const int64_t chunks = divide_up(places.count, kChunk);
  fill_zero_async(places.counts,
                  static_cast<std::size_t>(chunks * places.vocabulary) * sizeof(int32_t),
                  ctx.stream());
  launch("counts of tokens", count_kernel, {blocks_for(places.count, kSortThreads), kSortThreads},
         stream, places);
  const auto blocks = static_cast<unsigned>(divide_up(places.vocabulary, kSortThreads));
  constexpr int kAtOnce = 4;
  const bool wide = places.vocabulary % kAtOnce == 0;
  launch("sums of token counts", wide ? chunk_sums_kernel<kAtOnce> : chunk_sums_kernel<1>,
         {blocks, kSortThreads / (wide ? kAtOnce : 1)}, stream, places);
  launch("starts of tokens", starts_kernel, {blocks, kSortThreads}, stream, places);
  launch("sorting of places", sort_kernel,
         {static_cast<unsigned>(chunks * kSortBlocks), kSortThreads}, stream, places);
}

// Rows of the positions' gradient, then tiles of the table's.
template <typename S>
struct BothSums {
  PositionGradient<S> positions;
  TileSums<S> tiles;
  int64_t rows;  // of the first
  template <int N>
  __device__ void run(int64_t row, int64_t column) const {
    if (row < rows) {
      positions.template run<N>(row, column);
    } else {
      tiles.template run<N>(row - rows, column);
    }
  }
};

// As row_kernel(), in slices of a warp's columns, all rows of one before the next: rows that read
// the same numbers find them in the cache. A warp for each row.
template <int N, typename Body>
__global__ void __launch_bounds__(kBlockThreads)
    slice_kernel(const Body body, const int64_t rows, const int64_t width) {
  constexpr int64_t kRows = kBlockThreads / kWarpThreads, kSlice = kWarpThreads * N;
  const int64_t start = blockIdx.x * kRows + threadIdx.x / kWarpThreads;
  const int64_t place = threadIdx.x % kWarpThreads * N;
  for (int64_t slice = blockIdx.y * kSlice; slice < width; slice += gridDim.y * kSlice) {
    if (slice + place >= width) return;
    for (int64_t row = start; row < rows; row += gridDim.x * kRows) {
      body.template run<N>(row, slice + place);
    }
  }
}

template <int N, typename Body>
void for_slices(ComputeContext& ctx, const char* name, int64_t rows, int64_t width, bool wide,
                const Body& body) {
  if (rows == 0 || width == 0) return;
  constexpr int64_t kRows = kBlockThreads / kWarpThreads;
  const dim3 grid(blocks_for(rows, kRows), blocks_for(width, kWarpThreads * (wide ? N : 1)));
  launch(name, wide ? slice_kernel<N, Body> : slice_kernel<1, Body>, {grid, kBlockThreads},
         native(ctx.stream()), body, rows, width);
}

// Positions after the sequence have no place.
void zero_rest(ComputeContext& ctx, const Tensor& dpositions, int64_t sequence) {
  const int64_t width = dpositions.shape()[1], rest = dpositions.shape()[0] - sequence;
  fill_zero_async(dpositions.as<float>() + sequence * width,
                  static_cast<std::size_t>(rest * width) * sizeof(float), ctx.stream());
}

template <typename S>
void run_gradients(ComputeContext& ctx, const Tensor& tokens, int64_t first, int64_t others,
                   const Tensor& dout, const Tensor& dtable, const Tensor& dpositions,
                   Write write) {
  const int64_t samples = tokens.shape()[0], sequence = tokens.shape()[1];
  const int64_t width = dtable.shape()[1];
  const bool has_positions = dpositions.data != nullptr, adds = write == Write::kAdd;
  constexpr int kAtOnce = kWide<S>;
  const bool wide = width % kAtOnce == 0 && aligned(dout.data, dtable.data, dpositions.data);
  const auto gradient = take_scratch<S>(ctx, tokens, first, others, dout, dtable, write);
  sort_places(ctx, gradient.places);
  if (!adds) {
    if (has_positions) zero_rest(ctx, dpositions, sequence);
    for_rows<kAtOnce>(ctx, "embedding gradient of absent tokens", gradient.places.vocabulary, width,
                      wide, AbsentTokens<S>{gradient});
  }
  const int64_t tiles = divide_up(tokens.elements(), kTile);
  const int64_t positions = has_positions ? sequence : 0;
  for_slices<kAtOnce>(
      ctx, "embedding gradient", positions + tiles, width, wide,
      BothSums<S>{{dout.as<S>(), dpositions.as<float>(), samples, sequence, width, adds},
                  {gradient},
                  positions});
  for_rows<kAtOnce>(ctx, "embedding gradient of long runs", tiles, width, wide,
                    JoinedSums<S>{gradient});
}

}  // namespace

void embedding_forward(ComputeContext& ctx, const Tensor& tokens, const Tensor& table,
                       const Tensor& positions, const Tensor& out) {
  const int64_t samples = tokens.shape()[0], sequence = tokens.shape()[1];
  const int64_t width = table.shape()[1];
  with_type(out.spec.dtype, [&](auto type) {
    using S = decltype(type);
    constexpr int kAtOnce = kWide<S>;
    for_rows<kAtOnce>(
        ctx, "embedding forward", divide_up(samples, EmbeddingForward<S>::kSamples) * sequence,
        width, width % kAtOnce == 0 && aligned(table.data, positions.data, out.data),
        EmbeddingForward<S>{tokens.as<int32_t>(), table.as<float>(), positions.as<float>(),
                            out.as<S>(), samples, sequence, width});
  });
}

std::size_t embedding_backward_weight_workspace(ComputeContext& /*ctx*/, std::int64_t rows,
                                                std::int64_t vocabulary, std::int64_t width) {
  TableGradient<float> gradient{};
  gradient.places.count = rows;
  gradient.places.vocabulary = vocabulary + 2;  // of a part of a table
  gradient.width = width;
  return cut(gradient, nullptr);
}

namespace {

void add_gradients(ComputeContext& ctx, const Tensor& tokens, int64_t first, int64_t others,
                   const Tensor& dout, const Tensor& dtable, const Tensor& dpositions,
                   Write write) {
  if (tokens.elements() == 0 || dtable.shape()[1] == 0) {
    if (write == Write::kAdd) return;
    for (const Tensor& each : {dtable, dpositions}) {
      if (each.data != nullptr) fill_zero_async(each.data, each.spec.bytes(), ctx.stream());
    }
    return;
  }
  with_type(dout.spec.dtype, [&](auto type) {
    run_gradients<decltype(type)>(ctx, tokens, first, others, dout, dtable, dpositions, write);
  });
}

}  // namespace

void embedding_backward_weight(ComputeContext& ctx, const Tensor& tokens, const Tensor& dout,
                               const Tensor& dtable, const Tensor& dpositions, Write write) {
  add_gradients(ctx, tokens, 0, 0, dout, dtable, dpositions, write);
}

void embedding_part_backward_weight(ComputeContext& ctx, const Tensor& tokens, std::int64_t first,
                                    const Tensor& dout, const Tensor& dtable,
                                    const Tensor& dpositions, Write write) {
  add_gradients(ctx, tokens, first, 1, dout, dtable, dpositions, write);
}

void embedding_part_forward(ComputeContext& ctx, const Tensor& tokens, std::int64_t first,
                            const Tensor& table, const Tensor& values) {
  const int64_t width = table.shape()[1];
  constexpr int kAtOnce = kWide<float>;
  for_rows<kAtOnce>(ctx, "embedding forward of a part", tokens.elements(), width,
                    width % kAtOnce == 0 && aligned(table.data, values.data),
                    EmbeddingPart{tokens.as<int32_t>(), first, table.shape()[0], table.as<float>(),
                                  values.as<float>(), width});
}

}  // namespace sluice::cuda
