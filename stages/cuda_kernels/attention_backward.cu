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
  using QueryWarp = WarpProducts<T, kDims, kTiles, kStreamed, InOrder, ByFours>;
  using KeyWarp = WarpProducts<T, kDims, kTiles, kStreamed, ByLanes<kTiles>, InOrder>;
  static constexpr int kOwn = kAttentionWarps * QueryWarp::kOwn;
  static constexpr std::size_t kTileBytes = (2 * kOwn + 4 * kStreamed) * Rows::kRowBytes;
  // Of the log-sum-exp and delta of streamed queries, twice.
  static constexpr std::size_t kLineBytes = 4 * kStreamed * sizeof(float);
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
  using Rows = typename Tile::Rows;
  using Warp = typename Tile::QueryWarp;
  constexpr int kTiles = Tile::kTiles, kStreamed = Tile::kStreamed;
  const AttentionShape& shape = call.shape;
  const AttentionTile at = attention_tile(shape.heads, shape.sequence, Tile::kOwn, true);
  const int64_t kv = shape.heads + at.head / (shape.heads / shape.kv_heads);
  const auto keys = call.packed(call.qkv, at.sample, kv);
  const auto values = call.packed(call.qkv, at.sample, kv + shape.kv_heads);
  const int begin = static_cast<int>(at.first), sequence = static_cast<int>(shape.sequence),
            seen = static_cast<int>(shape.seen());

  const Rows queries{0};
  const auto tile = [&](int row) { return Rows{static_cast<uint32_t>(row * Rows::kRowBytes)}; };
  const Rows douts = tile(Tile::kOwn);
  const auto streamed = [&](int place) { return tile(2 * Tile::kOwn + place * kStreamed); };
  const Warp warp;
  const TileDropout dropout(call);
  const int64_t line = call.line(at.sample, at.head, begin);

  float lse[kTiles][2], delta[kTiles][2];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp.own_row(t, half);
      const bool exists = begin + row < sequence;
      lse[t][half] = exists ? call.lse[line + row] * kLog2E : 0.0F;
      delta[t][half] = exists ? call.delta[line + row] : 0.0F;
    }
  }
  typename Warp::Sums sums = {};
  const float scale = call.scale * kLog2E;
  queries.template fetch<Tile::kOwn>(call.packed(call.qkv, at.sample, at.head), begin);
  douts.template fetch<Tile::kOwn>(call.output(call.dout, at.sample, at.head), begin);
  const int first = max(begin + 1 - seen, 0) / kStreamed * kStreamed;
  const int end = min(begin + Tile::kOwn, sequence);
  stream_tiles((end - first + kStreamed - 1) / kStreamed,
               [&](int i, int side) {
                 streamed(2 * side).template fetch<kStreamed>(keys, first + i * kStreamed);
                 streamed(2 * side + 1).template fetch<kStreamed>(values, first + i * kStreamed);
               },
               [&](int i, int side) {
                 const int key = first + i * kStreamed, query = begin + warp.first;
                 const Sight sight(seen, query, Warp::kOwn, key, kStreamed);
                 if (!sight.any || query >= sequence) return;
                 const KeptOfQueries<kTiles, kStreamed> kept(warp, dropout,
                                                             dropout.element(line, key));
                 typename Warp::Scores scores = {}, dps = {};
                 warp.add_scores(scores, queries, streamed(2 * side));
                 if (!sight.all) warp.template hide<true>(scores, begin, key, seen);
                 warp.add_scores(dps, douts, streamed(2 * side + 1));
                 for_each_score(scores, [&](float& score, int t, int j, int n) {
                   const float p = power_of_two(fma(score, scale, -lse[t][n / 2]));
                   score = score_gradient(p, dps[t][j][n], delta[t][n / 2], kept.has(t, j, n),
                                          dropout.at.factor);
                 });
                 warp.add_weighted(sums, scores, streamed(2 * side));
               });
  float factors[kTiles][2];
  for (auto& factor : factors) factor[0] = factor[1] = call.scale;
  warp.put(sums, factors, queries, call.packed(call.dqkv, at.sample, at.head), begin);
}

// Keys and values of one key head, over all queries of the heads that share it.
template <typename T, int kDims, bool kKeys, bool kValues>
__global__ void __launch_bounds__(kAttentionThreads, (BackwardTile<T, kDims>::kBlocksAtOnce))
    tile_key_kernel(const AttentionCall<T, kWide<T>> call) {
  using Tile = BackwardTile<T, kDims>;
  using Rows = typename Tile::Rows;
  using Warp = typename Tile::KeyWarp;
  constexpr int kTiles = Tile::kTiles, kStreamed = Tile::kStreamed;
  const AttentionShape& shape = call.shape;
  const AttentionTile at = attention_tile(shape.kv_heads, shape.sequence, Tile::kOwn, false);
  const int group = shape.heads / shape.kv_heads;
  const int64_t kv = shape.heads + at.head;
  const int begin = static_cast<int>(at.first), sequence = static_cast<int>(shape.sequence),
            seen = static_cast<int>(shape.seen());

  const Rows keys{0};
  const auto tile = [&](int row) { return Rows{static_cast<uint32_t>(row * Rows::kRowBytes)}; };
  const Rows values = tile(Tile::kOwn);
  const auto streamed = [&](int place) { return tile(2 * Tile::kOwn + place * kStreamed); };
  auto* lines = reinterpret_cast<float*>(Rows::at(Tile::kTileBytes));
  const Warp warp;
  const TileDropout dropout(call);

  typename Warp::Sums key_sums = {}, value_sums = {};
  const float scale = call.scale * kLog2E;
  keys.template fetch<Tile::kOwn>(call.packed(call.qkv, at.sample, kv), begin);
  values.template fetch<Tile::kOwn>(call.packed(call.qkv, at.sample, kv + shape.kv_heads), begin);
  // The last query that sees one of these keys comes before it.
  const int end = min(begin + Tile::kOwn - 1 + seen, sequence);
  const int tiles = (end - begin + kStreamed - 1) / kStreamed;
  const auto head_of = [&](int i) { return at.head * group + i / tiles; };
  const auto query_of = [&](int i) { return begin + i % tiles * kStreamed; };
  stream_tiles(
      group * tiles,
      [&](int i, int side) {
        const int64_t head = head_of(i);
        const int query = query_of(i);
        auto sample = static_cast<uint32_t>(at.sample);
        forget(sample);
        streamed(2 * side).template fetch<kStreamed>(call.packed(call.qkv, sample, head), query);
        streamed(2 * side + 1)
            .template fetch<kStreamed>(call.output(call.dout, sample, head), query);
        // Behind the sequence they are 0, as queries and dout are, and so are the gradients.
        const int row = static_cast<int>(threadIdx.x) % kStreamed;
        if (threadIdx.x < 2 * kStreamed) {
          const float* from = static_cast<int>(threadIdx.x) < kStreamed ? call.lse : call.delta;
          const bool exists = query + row < sequence;
          start_copy<4>(lines + 2 * kStreamed * side + threadIdx.x,
                        from + call.line(sample, head, exists ? query + row : 0), exists);
        }
      },
      [&](int i, int side) {
        const int query = query_of(i), key = begin + warp.first;
        const Sight sight(seen, query, kStreamed, key, Warp::kOwn);
        if (!sight.any || key >= sequence) return;
        const KeptOfKeys<kTiles, kStreamed> kept(
            warp, dropout, dropout.element(call.line(at.sample, head_of(i), query), begin));
        const float *lse = lines + 2 * kStreamed * side, *delta = lse + kStreamed;
        typename Warp::Scores p = {};
        warp.add_scores(p, keys, streamed(2 * side));
        if (!sight.all) warp.template hide<false>(p, begin, query, seen);
        for_each_score(p, [&](float& score, int, int j, int n) {
          score = power_of_two(fma(score, scale, -lse[warp.streamed_row(j, n % 2)] * kLog2E));
        });
        if constexpr (kValues) {
          typename Warp::Scores weights;
          for_each_score(weights, [&](float& weight, int t, int j, int n) {
            weight = kept.has(t, j, n) ? p[t][j][n] : 0.0F;
          });
          warp.add_weighted(value_sums, weights, streamed(2 * side + 1));
        }
        if constexpr (kKeys) {
          typename Warp::Scores dps = {};
          warp.add_scores(dps, values, streamed(2 * side + 1));
          for_each_score(dps, [&](float& dp, int t, int j, int n) {
            dp = score_gradient(p[t][j][n], dp, delta[warp.streamed_row(j, n % 2)],
                                kept.has(t, j, n), dropout.at.factor);
          });
          warp.add_weighted(key_sums, dps, streamed(2 * side));
        }
      });
  float factors[kTiles][2];
  if constexpr (kKeys) {
    for (auto& factor : factors) factor[0] = factor[1] = call.scale;
    warp.put(key_sums, factors, keys, call.packed(call.dqkv, at.sample, kv), begin);
  }
  if constexpr (kValues) {
    for (auto& factor : factors) factor[0] = factor[1] = dropout.at.factor;
    warp.put(value_sums, factors, values, call.packed(call.dqkv, at.sample, kv + shape.kv_heads),
             begin);
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
