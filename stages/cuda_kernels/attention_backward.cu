// One kernel sums the gradients of queries, another those of keys and values; each computes scores
// and probabilities again. So no two blocks add to the same numbers, and every order is fixed.
#include <cstdint>

#include "stages/cuda_kernels/attention_tiles.cuh"

namespace sluice::cuda {

namespace {

// Chosen so that sums stay in registers and two blocks fit a multiprocessor. Sums of heads of 256
// dimensions do not fit: keys and values take a kernel each.
template <typename T, int kDims>
struct BackwardTile {
  using Rows = SharedRows<T, kDims>;
  static constexpr int kTiles = Rows::kRowBytes <= 128 ? 2 : 1;
  static constexpr int kStreamed = Rows::kRowBytes <= 256 ? 32 : 16;
  static constexpr int kBlocksAtOnce = 2;
  static constexpr bool kSplit = kDims > 128;
  using QueryWarp = WarpMatmuls<T, kDims, kTiles, kStreamed, InOrder, ByFours>;
  using KeyWarp = WarpMatmuls<T, kDims, kTiles, kStreamed, ByLanes<kTiles>, InOrder>;
  static constexpr int kOwn = kAttentionWarps * QueryWarp::kOwn;
  static constexpr std::size_t kTileBytes = (2 * kOwn + 4 * kStreamed) * Rows::kRowBytes;
  // Of the log-sum-exp and delta of streamed queries, twice.
  static constexpr std::size_t kLineBytes = 4 * kStreamed * sizeof(float);

  // Of the block's shared memory: two own tiles, two pairs of streamed ones, two pairs of lines.
  static __device__ Rows own(int place) {
    return {static_cast<uint32_t>(place * kOwn * Rows::kRowBytes)};
  }
  static __device__ Rows streamed(int place) {
    return {static_cast<uint32_t>((2 * kOwn + place * kStreamed) * Rows::kRowBytes)};
  }
  static __device__ float* lines(int place) {
    return reinterpret_cast<float*>(Rows::at(kTileBytes)) + 2 * kStreamed * place;
  }
};

// Gradient of a score by that of its probability after dropout. `kept`: by dropout.
__device__ __forceinline__ float score_gradient(float p, float dp, float delta, bool kept,
                                                float factor) {
  return p * ((kept ? dp * factor : 0.0F) - delta);
}

template <typename T, int kDims>
__global__ void __launch_bounds__(kAttentionThreads, (BackwardTile<T, kDims>::kBlocksAtOnce))
    tile_query_kernel(const AttentionCall<T, kWide<T>> call) {
  using Tile = BackwardTile<T, kDims>;
  using Warp = typename Tile::QueryWarp;
  constexpr int kTiles = Tile::kTiles, kStreamed = Tile::kStreamed;
  const QueryBlock<Tile::kOwn, kStreamed, T, kWide<T>> block(call);
  const auto queries = Tile::own(0), douts = Tile::own(1);
  const Warp warp;
  const TileDropout dropout(call);

  float lse[kTiles][2], delta[kTiles][2];
  for_each_row<kTiles>([&](int t, int half) {
    const int row = warp.own_row(t, half);
    const bool exists = block.begin + row < block.sequence;
    lse[t][half] = exists ? call.lse[block.line + row] * kLog2E : 0.0F;
    delta[t][half] = exists ? call.delta[block.line + row] : 0.0F;
  });
  typename Warp::Sums sums = {};
  queries.template fetch<Tile::kOwn>(call.packed(call.qkv, block.at.sample, block.at.head),
                                     block.begin);
  douts.template fetch<Tile::kOwn>(call.output(call.dout, block.at.sample, block.at.head),
                                   block.begin);
  stream_tiles(
      block.tiles,
      [&](int i, int side) {
        const int key = block.first + i * kStreamed;
        Tile::streamed(2 * side).template fetch<kStreamed>(block.keys, key);
        Tile::streamed(2 * side + 1).template fetch<kStreamed>(block.values, key);
      },
      [&](int i, int side) {
        const int key = block.first + i * kStreamed, query = block.begin + warp.first;
        const Sight sight(block.seen, query, Warp::kOwn, key, kStreamed);
        if (!sight.any || query >= block.sequence) return;
        const KeptOfQueries<kTiles, kStreamed> kept(warp, dropout,
                                                    dropout.element(block.mask_line, key));
        typename Warp::Scores scores = {}, dps = {};
        warp.add_scores(scores, queries, Tile::streamed(2 * side));
        if (!sight.all) warp.template hide<true>(scores, block.begin, key, block.seen);
        warp.add_scores(dps, douts, Tile::streamed(2 * side + 1));
        for_each_score(scores, [&](float& score, int t, int j, int n) {
          const float p = power_of_two(fma(score, call.scale * kLog2E, -lse[t][n / 2]));
          score = score_gradient(p, dps[t][j][n], delta[t][n / 2], kept.has(t, j, n),
                                 dropout.at.factor);
        });
        warp.add_weighted(sums, scores, Tile::streamed(2 * side));
      });
  warp.put(sums, call.scale, queries, call.packed(call.dqkv, block.at.sample, block.at.head),
           block.begin);
}

// What a block works on that owns kOwn keys of a head: tiles of queries of each head that shares
// them.
template <int kOwn, int kStreamed>
struct KeyBlock {
  AttentionTile at;
  int begin, sequence, seen, group, tiles;  // tiles: of each query head

  template <typename T, int N>
  explicit __device__ KeyBlock(const AttentionCall<T, N>& call)
      : at(attention_tile(call.shape.kv_heads, call.shape.sequence, kOwn, false)),
        begin(static_cast<int>(at.first)),
        sequence(static_cast<int>(call.shape.sequence)),
        seen(static_cast<int>(call.shape.seen())),
        group(call.shape.heads / call.shape.kv_heads) {
    // The last query that sees one of these keys comes before it.
    const int end = min(begin + kOwn - 1 + seen, sequence);
    tiles = (end - begin + kStreamed - 1) / kStreamed;
  }
  // Of streamed tile i.
  [[nodiscard]] __device__ int64_t head(int i) const { return at.head * group + i / tiles; }
  [[nodiscard]] __device__ int query(int i) const { return begin + i % tiles * kStreamed; }
};

// Starts to copy queries of a head from `query` on, and what comes with them. Behind the sequence
// all is 0, and so are the gradients.
template <typename Tile, typename T, int N>
__device__ void fetch_streamed(const AttentionCall<T, N>& call, int64_t of_sample, int64_t head,
                               int query, int side) {
  constexpr int kStreamed = Tile::kStreamed;
  auto sample = static_cast<uint32_t>(of_sample);
  forget(sample);
  Tile::streamed(2 * side).template fetch<kStreamed>(call.packed(call.qkv, sample, head), query);
  Tile::streamed(2 * side + 1)
      .template fetch<kStreamed>(call.output(call.dout, sample, head), query);
  // The log-sum-exp in the first threads, delta in the next.
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread >= 2 * kStreamed) return;
  const float* from = thread < kStreamed ? call.lse : call.delta;
  const int row = query + thread % kStreamed;
  const bool exists = row < call.shape.sequence;
  start_copy<4>(Tile::lines(side) + thread, from + call.line(sample, head, exists ? row : 0),
                exists);
}

// Keys and values of one key head, over all queries of the heads that share it.
template <typename T, int kDims, bool kKeys, bool kValues>
__global__ void __launch_bounds__(kAttentionThreads, (BackwardTile<T, kDims>::kBlocksAtOnce))
    tile_key_kernel(const AttentionCall<T, kWide<T>> call) {
  using Tile = BackwardTile<T, kDims>;
  using Warp = typename Tile::KeyWarp;
  constexpr int kTiles = Tile::kTiles, kStreamed = Tile::kStreamed;
  const KeyBlock<Tile::kOwn, kStreamed> block(call);
  const int64_t key_head = call.shape.heads + block.at.head,
                value_head = key_head + call.shape.kv_heads;
  const auto keys = Tile::own(0), values = Tile::own(1);
  const Warp warp;
  const TileDropout dropout(call);

  typename Warp::Sums key_sums = {}, value_sums = {};
  keys.template fetch<Tile::kOwn>(call.packed(call.qkv, block.at.sample, key_head), block.begin);
  values.template fetch<Tile::kOwn>(call.packed(call.qkv, block.at.sample, value_head),
                                    block.begin);
  stream_tiles(
      block.group * block.tiles,
      [&](int i, int side) {
        fetch_streamed<Tile>(call, block.at.sample, block.head(i), block.query(i), side);
      },
      [&](int i, int side) {
        const int query = block.query(i), key = block.begin + warp.first;
        const Sight sight(block.seen, query, kStreamed, key, Warp::kOwn);
        if (!sight.any || key >= block.sequence) return;
        const int64_t line = call.mask_line(block.at.sample, block.head(i), query);
        const KeptOfKeys<kTiles, kStreamed> kept(warp, dropout, dropout.element(line, block.begin));
        const auto queries = Tile::streamed(2 * side), douts = Tile::streamed(2 * side + 1);
        const float *lse = Tile::lines(side), *delta = lse + kStreamed;
        typename Warp::Scores p = {}, other = {};
        warp.add_scores(p, keys, queries);
        if (!sight.all) warp.template hide<false>(p, block.begin, query, block.seen);
        for_each_score(p, [&](float& score, int, int j, int n) {
          score = power_of_two(
              fma(score, call.scale * kLog2E, -lse[warp.streamed_row(j, n % 2)] * kLog2E));
        });
        if constexpr (kValues) {
          for_each_score(other, [&](float& weight, int t, int j, int n) {
            weight = kept.has(t, j, n) ? p[t][j][n] : 0.0F;
          });
          warp.add_weighted(value_sums, other, douts);
        }
        if constexpr (kKeys) {
          for_each_score(other, [](float& dp, int, int, int) { dp = 0; });
          warp.add_scores(other, values, douts);
          for_each_score(other, [&](float& dp, int t, int j, int n) {
            dp = score_gradient(p[t][j][n], dp, delta[warp.streamed_row(j, n % 2)],
                                kept.has(t, j, n), dropout.at.factor);
          });
          warp.add_weighted(key_sums, other, queries);
        }
      });
  const auto dqkv = [&](int64_t head) { return call.packed(call.dqkv, block.at.sample, head); };
  if constexpr (kKeys) warp.put(key_sums, call.scale, keys, dqkv(key_head), block.begin);
  if constexpr (kValues) {
    warp.put(value_sums, dropout.at.factor, values, dqkv(value_head), block.begin);
  }
}

}  // namespace

template <typename T>
void attention_tiles_backward(cudaStream_t stream, const AttentionCall<T, kWide<T>>& call) {
  const AttentionShape& shape = call.shape;
  with_dimensions<T>(shape.head_dim, [&](auto dimensions) {
    constexpr int kDims = dimensions();
    using Tile = BackwardTile<T, kDims>;
    launch("attention backward, queries, tensor cores", tile_query_kernel<T, kDims>,
           attention_tiles(shape, shape.heads, Tile::kOwn, Tile::kTileBytes), stream, call);
    const LaunchShape keys =
        attention_tiles(shape, shape.kv_heads, Tile::kOwn, Tile::kTileBytes + Tile::kLineBytes);
    if constexpr (Tile::kSplit) {
      launch("attention backward, values, tensor cores", tile_key_kernel<T, kDims, false, true>,
             keys, stream, call);
      launch("attention backward, keys, tensor cores", tile_key_kernel<T, kDims, true, false>, keys,
             stream, call);
    } else {
      launch("attention backward, keys and values, tensor cores",
             tile_key_kernel<T, kDims, true, true>, keys, stream, call);
    }
  });
}
template void attention_tiles_backward<Bf16>(cudaStream_t, const AttentionCall<Bf16, 8>&);
template void attention_tiles_backward<float>(cudaStream_t, const AttentionCall<float, 4>&);

}  // namespace sluice::cuda
