#include <cstdint>

#include "stages/cuda_kernels/attention_tiles.cuh"

namespace sluice::cuda {

namespace {

// Chosen so that sums stay in registers and two blocks fit a multiprocessor.
template <typename T, int kDims>
struct ForwardTile {
  using Rows = SharedRows<T, kDims>;
  static constexpr int kTiles = Rows::kRowBytes <= 256 ? 2 : 1;
  static constexpr int kStreamed = 32;
  static constexpr int kBlocksAtOnce = kDims <= 64 ? 3 : 2;
  using Warp = WarpMatmuls<T, kDims, kTiles, kStreamed, InOrder, ByFours>;
  static constexpr int kOwn = kAttentionWarps * Warp::kOwn;
  static constexpr std::size_t kBytes = (kOwn + 4 * kStreamed) * Rows::kRowBytes;
};

// Of a warp's own rows, in each lane. Probabilities are 2^(score * scale - base), and sums relative
// to them. A row's base is raised to its largest exponent only when that is kFar above it: so sums
// are seldom scaled, and a probability is at most 2^kFar, which neither f32 sums nor bf16 mind.
template <typename Warp, int kTiles, int kStreamed, int kDims>
struct RunningSoftmax {
  static constexpr float kFar = 8;
  float base[kTiles][2];
  float total[kTiles][2];  // of probabilities, over the columns of the lane

  __device__ RunningSoftmax() : total{} {
    for (auto& tile : base) tile[0] = tile[1] = -INFINITY;  // until a row sees a key
  }

  // Makes probabilities of the scores. `scale` includes log2 e.
  __device__ void take(typename Warp::Scores& scores, typename Warp::Sums& sums, float scale) {
    raise(scores, sums, scale);
    for_each_score(scores, [&](float& score, int t, int, int i) {
      const float from = base[t][i / 2] == -INFINITY ? 0.0F : base[t][i / 2];
      score = power_of_two(fma(score, scale, -from));
      total[t][i / 2] += score;
    });
  }

  // Over all columns, in each lane.
  [[nodiscard]] __device__ float sum(int t, int half) const {
    float all = total[t][half];
    all += __shfl_xor_sync(0xFFFFFFFFU, all, 1);
    return all + __shfl_xor_sync(0xFFFFFFFFU, all, 2);
  }

 private:
  __device__ void raise(const typename Warp::Scores& scores, typename Warp::Sums& sums,
                        float scale) {
    float shrink[kTiles][2];
    bool raised = false;
    for_each_row<kTiles>([&](int t, int half) {
      float highest = -INFINITY;
#pragma unroll
      for (int j = 0; j < kStreamed / 8; ++j) {
        highest = fmaxf(highest, fmaxf(scores[t][j][2 * half], scores[t][j][2 * half + 1]));
      }
      highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFU, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFU, highest, 2)) * scale;
      const bool far = highest > base[t][half] + kFar;
      shrink[t][half] = far ? power_of_two(base[t][half] - highest) : 1.0F;
      base[t][half] = far ? highest : base[t][half];
      raised = raised || far;
    });
    if (__any_sync(0xFFFFFFFFU, raised ? 1 : 0) == 0) return;
    for_each_row<kTiles>([&](int t, int half) {
      total[t][half] *= shrink[t][half];
#pragma unroll
      for (int d = 0; d < kDims / 8; ++d) {
        sums[t][d][2 * half] *= shrink[t][half];
        sums[t][d][2 * half + 1] *= shrink[t][half];
      }
    });
  }
};

template <typename T, int kDims>
__global__ void __launch_bounds__(kAttentionThreads, (ForwardTile<T, kDims>::kBlocksAtOnce))
    tile_forward_kernel(const AttentionCall<T, kWide<T>> call) {
  using Tile = ForwardTile<T, kDims>;
  using Rows = typename Tile::Rows;
  using Warp = typename Tile::Warp;
  constexpr int kTiles = Tile::kTiles, kStreamed = Tile::kStreamed;
  const QueryBlock<Tile::kOwn, kStreamed, T, kWide<T>> block(call);
  const Rows queries{0};
  const auto streamed = [&](int place) {
    return Rows{static_cast<uint32_t>((Tile::kOwn + place * kStreamed) * Rows::kRowBytes)};
  };
  const Warp warp;
  const TileDropout dropout(call);

  typename Warp::Sums sums = {};
  RunningSoftmax<Warp, kTiles, kStreamed, kDims> softmax;
  queries.template fetch<Tile::kOwn>(call.packed(call.qkv, block.at.sample, block.at.head),
                                     block.begin);
  stream_tiles(
      block.tiles,
      [&](int i, int side) {
        streamed(2 * side).template fetch<kStreamed>(block.keys, block.first + i * kStreamed);
        streamed(2 * side + 1).template fetch<kStreamed>(block.values, block.first + i * kStreamed);
      },
      [&](int i, int side) {
        const int key = block.first + i * kStreamed, query = block.begin + warp.first;
        const Sight sight(block.seen, query, Warp::kOwn, key, kStreamed);
        if (!sight.any || query >= block.sequence) return;
        const KeptOfQueries<kTiles, kStreamed> kept(warp, dropout,
                                                    dropout.element(block.mask_line, key));
        typename Warp::Scores scores = {};
        warp.add_scores(scores, queries, streamed(2 * side));
        if (!sight.all) warp.template hide<true>(scores, block.begin, key, block.seen);
        softmax.take(scores, sums, call.scale * kLog2E);
        if (dropout.drops) {
          for_each_score(scores, [&](float& score, int t, int j, int n) {
            score = kept.has(t, j, n) ? score : 0.0F;
          });
        }
        warp.add_weighted(sums, scores, streamed(2 * side + 1));
      });

  float factors[kTiles][2];
  for_each_row<kTiles>([&](int t, int half) {
    const float total = softmax.sum(t, half);
    factors[t][half] = dropout.at.factor / total;
    const int row = warp.own_row(t, half);
    if (warp.place == 0 && block.begin + row < block.sequence) {
      call.lse[block.line + row] = fma(softmax.base[t][half], kLn2, ::logf(total));
    }
  });
  warp.put(sums, factors, queries, call.output(call.out, block.at.sample, block.at.head),
           block.begin);
}

}  // namespace

template <typename T>
void attention_tiles_forward(cudaStream_t stream, const AttentionCall<T, kWide<T>>& call) {
  with_dimensions<T>(call.shape.head_dim, [&](auto dimensions) {
    using Tile = ForwardTile<T, dimensions()>;
    launch("attention forward, tensor cores", tile_forward_kernel<T, dimensions()>,
           attention_tiles(call.shape, call.shape.heads, Tile::kOwn, Tile::kBytes), stream, call);
  });
}
template void attention_tiles_forward<Bf16>(cudaStream_t, const AttentionCall<Bf16, 8>&);
template void attention_tiles_forward<float>(cudaStream_t, const AttentionCall<float, 4>&);

}  // namespace sluice::cuda
