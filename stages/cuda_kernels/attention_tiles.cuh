// Attention in tiles on tensor cores (Dao 2023, "FlashAttention-2"). A block of four warps owns a
// tile of rows (queries; for the gradients of keys and values: keys), kept in shared memory as it
// is, and streams the rows of the other side past them, two tiles of them at a time; the next two
// arrive meanwhile. Each warp owns kTiles times 16 rows and computes for itself: scores of its rows
// and the streamed ones, then sums of streamed rows weighted by what became of the scores.
//
// Which row of a tile is which row or column of a matmul is free; the orders here give each lane
// the scores of four consecutive keys, whose dropout is one block of Philox.
#pragma once

#include <type_traits>

#include "stages/cuda_kernels/attention_call.cuh"
#include "stages/cuda_kernels/tensor_cores.cuh"

namespace sluice::cuda {

// --- the kernels, for flash_attention.cu; operands and state as there ---
// Whether the kernels here take a call: bf16, or f32 that may be rounded to TF32; heads of a
// multiple of 8 (f32: 4) dimensions, at most 256 (f32: 128).
[[nodiscard]] inline bool takes_attention_tiles(const AttentionShape& shape, DType dtype,
                                                bool tf32) {
  const bool narrow = dtype == DType::kBf16;
  return (narrow || tf32) && shape.head_dim % (narrow ? 8 : 4) == 0 &&
         shape.head_dim <= (narrow ? 256 : 128) && shape.sequence < INT32_MAX / 2;
}
// All tensors start at multiples of 16 bytes. Backward: after `delta` was computed.
template <typename T>
void attention_tiles_forward(cudaStream_t stream, const AttentionCall<T, kWide<T>>& call);
template <typename T>
void attention_tiles_backward(cudaStream_t stream, const AttentionCall<T, kWide<T>>& call);

// Calls body(std::integral_constant) with the dimensions that a head is padded to. Requires:
// takes_attention_tiles().
template <typename T, typename Body>
void with_dimensions(int head_dim, const Body& body) {
  if constexpr (sizeof(T) == 2) {
    with_limit<32, 64, 96, 128, 256>(head_dim, body);
  } else {
    with_limit<32, 64, 96, 128>(head_dim, body);
  }
}

// --- tiles ---
constexpr int kMatmulRows = 16;
constexpr float kLog2E = 1.44269504088896341F;
constexpr float kLn2 = 0.693147180559945309F;

// Rows of a head in shared memory, zeros behind head_dim. The order of a row's chunks of 16 bytes
// depends on the row, so that the lanes of a warp meet in no bank: neither in 8 rows that follow
// each other at a distance of 1, 2 or 4, nor in those of ByFours.
template <typename T, int kDims>
struct SharedRows {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(T));  // of a chunk
  static constexpr int kChunks = kDims / kElements;
  static constexpr int kStride = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;
  static constexpr int kRowBytes = 16 * kStride;

  uint32_t offset;  // in the block's shared memory, a multiple of 512

  [[nodiscard]] static constexpr __device__ uint32_t turn(int row) {
    return static_cast<uint32_t>(row ^ (row >> 2 & 2) ^ (row >> 3 & 1) ^ (row >> 4 & 1)) & 7U;
  }
  // Of a chunk of a row.
  [[nodiscard]] __device__ uint32_t place(int row, int chunk) const {
    return offset + static_cast<uint32_t>(row * kRowBytes) +
           (static_cast<uint32_t>(chunk) ^ turn(row)) * 16;
  }
  // Of chunk `chunk` + `chunks` of row `row` + `rows`, if `place` is that of `chunk` and `row`, and
  // neither addition carries a bit.
  [[nodiscard]] static __device__ uint32_t moved(uint32_t place, int rows, int chunks) {
    return (place ^ (static_cast<uint32_t>(chunks) ^ turn(rows)) * 16) +
           static_cast<uint32_t>(rows * kRowBytes);
  }
  [[nodiscard]] static __device__ unsigned char* at(uint32_t place) {
    return shared_memory<unsigned char>() + place;
  }

  // Starts to copy kRows rows of `from`, from row `first` on; zeros where there is none.
  template <int kRows, int N>
  __device__ void fetch(const HeadRows<const T, N>& from, int first) const {
    constexpr int kAtOnce = kAttentionThreads / kStride;  // rows
    static_assert(kRows % kAtOnce == 0);
    uint32_t thread = threadIdx.x;
    forget(thread);
    const int chunk = static_cast<int>(thread) % kStride, element = chunk * kElements;
    int row = static_cast<int>(thread) / kStride;
    if (chunk >= kChunks) return;
    const T* data = from.data + (first + row) * from.stride + element;
    const bool inside = element < from.dimensions;
#pragma unroll
    for (int i = 0; i < kRows / kAtOnce; ++i) {
      const bool exists = inside && first + row < from.count;
      start_copy<16>(at(place(row, chunk)), exists ? data : from.data, exists);
      row += kAtOnce;
      data += kAtOnce * from.stride;
    }
  }
};

// Orders of rows. own(): of row `index` of the warp's matmul `tile`, of 16 rows each; streamed():
// of column `index` of matmul `tile`, of 8 columns each.
struct InOrder {
  static constexpr __device__ int own(int tile, int index) { return kMatmulRows * tile + index; }
  static constexpr __device__ int streamed(int tile, int index) { return 8 * tile + index; }
};
// Columns 2 p and 2 p + 1 of two matmuls follow each other.
struct ByFours {
  static constexpr __device__ int streamed(int tile, int index) {
    return 8 * (tile & ~1) + 4 * (index / 2) + index % 2 + 2 * (tile % 2);
  }
};
// Rows p and p + 8 of kTiles matmuls follow each other.
template <int kTiles>
struct ByLanes {
  static constexpr __device__ int own(int tile, int index) {
    return 2 * kTiles * (index % 8) + index / 8 + 2 * tile;
  }
};

// What a block works on that owns kOwn queries of a head, and the tiles of keys that they see.
template <int kOwn, int kStreamed, typename T, int N>
struct QueryBlock {
  AttentionTile at;
  int64_t line, mask_line;  // of the first own query
  HeadRows<const T, N> keys, values;
  int begin, sequence, seen, first, tiles;  // first: streamed row

  explicit __device__ QueryBlock(const AttentionCall<T, N>& call)
      : at(attention_tile(call.shape.heads, call.shape.sequence, kOwn, true)),
        line(call.line(at.sample, at.head, at.first)),
        mask_line(call.mask_line(at.sample, at.head, at.first)),
        begin(static_cast<int>(at.first)),
        sequence(static_cast<int>(call.shape.sequence)),
        seen(static_cast<int>(call.shape.seen())) {
    const int64_t kv = call.shape.heads + at.head / (call.shape.heads / call.shape.kv_heads);
    keys = call.packed(call.qkv, at.sample, kv);
    values = call.packed(call.qkv, at.sample, kv + call.shape.kv_heads);
    first = max(begin + 1 - seen, 0) / kStreamed * kStreamed;
    tiles = (min(begin + kOwn, sequence) - first + kStreamed - 1) / kStreamed;
  }
};

// Whether queries see keys: any of them any, all of them all.
struct Sight {
  bool any, all;
  __device__ Sight(int seen, int query, int queries, int key, int keys)
      : any(key <= query + queries - 1 && query - (key + keys - 1) < seen),
        all(key + keys - 1 <= query && query + queries - 1 - key < seen) {}
};

// Runs work(i, i % 2) for i = 0 to count - 1, each once fetch(i, i % 2) has brought what it needs;
// meanwhile the next fetch runs.
template <typename Fetch, typename Work>
__device__ void stream_tiles(int count, const Fetch& fetch, const Work& work) {
  fetch(0, 0);
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    finish_copies();
    __syncthreads();  // all have what was copied, and none needs the place of the next any more
    if (i + 1 < count) fetch(i + 1, (i + 1) % 2);
    work(i, i % 2);
  }
}

// body(score, tile, j, i) for all of a warp's scores.
template <int kTiles, int kMatmuls, typename Body>
__device__ __forceinline__ void for_each_score(float (&scores)[kTiles][kMatmuls][4],
                                               const Body& body) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int j = 0; j < kMatmuls; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) body(scores[t][j][i], t, j, i);
    }
  }
}

// body(tile, half) for all of a lane's rows.
template <int kTiles, typename Body>
__device__ __forceinline__ void for_each_row(const Body& body) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) body(t, half);
  }
}

// The matmuls of one warp. A score's lane and number i: row lane / 4 + 8 (i / 2), column
// 2 (lane % 4) + i % 2 of its matmul.
template <typename T, int kDims, int kTiles, int kStreamed, typename Own, typename Streamed>
struct WarpMatmuls {
  static_assert(kStreamed % 16 == 0 && kDims % 16 == 0);
  using Rows = SharedRows<T, kDims>;
  using Scores = float[kTiles][kStreamed / 8][4];
  using Sums = float[kTiles][kDims / 8][4];
  static constexpr int kOwn = kMatmulRows * kTiles;  // rows
  static constexpr bool kNarrow = sizeof(T) == 2;

  int lane, group, place, first;  // first: of the own rows within the block's

  __device__ WarpMatmuls()
      : lane(static_cast<int>(threadIdx.x) % kWarpThreads),
        group(lane / 4),
        place(lane % 4),
        first(static_cast<int>(threadIdx.x) / kWarpThreads * kOwn) {}

  // Of a number's row and column, within the block's own and the streamed rows.
  [[nodiscard]] __device__ int own_row(int tile, int half) const {
    return first + Own::own(tile, group + 8 * half);
  }
  [[nodiscard]] __device__ int streamed_row(int tile, int side) const {
    return Streamed::streamed(tile, 2 * place + side);
  }

  // scores += own rows times streamed rows.
  __device__ void add_scores(Scores& scores, const Rows& own, const Rows& streamed) const {
    uint32_t rows = own.place(first + Own::own(0, lane % 16), lane / 16);
    uint32_t columns = streamed.place(Streamed::streamed(lane / 16, lane % 8), lane / 8 % 2);
    forget(rows);
    forget(columns);
#pragma unroll
    for (int chunk = 0; chunk < Rows::kChunks; chunk += 2) {
      uint32_t a[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        load_matrices(a[t], Rows::at(Rows::moved(rows, Own::own(t, 0), chunk)));
        round(a[t]);
      }
#pragma unroll
      for (int j = 0; j < kStreamed / 8; j += 2) {
        uint32_t b[4];
        load_matrices(b, Rows::at(Rows::moved(columns, Streamed::streamed(j, 0), chunk)));
        round(b);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          multiply(scores[t][j], a[t], b[0], b[1]);
          multiply(scores[t][j + 1], a[t], b[2], b[3]);
        }
      }
    }
  }

  // sums += weights times streamed rows.
  __device__ void add_weighted(Sums& sums, const Scores& weights, const Rows& streamed) const {
    if constexpr (kNarrow) {
      uint32_t rows = streamed.place(Streamed::streamed(lane / 8 % 2, lane % 8), lane / 16);
      forget(rows);
#pragma unroll
      for (int j = 0; j < kStreamed / 8; j += 2) add_narrow(sums, weights, j, rows);
    } else {
      uint32_t rows[2];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        rows[side] =
            streamed.place(streamed_row(0, side), group / 4) + static_cast<uint32_t>(group % 4 * 4);
        forget(rows[side]);
      }
#pragma unroll
      for (int j = 0; j < kStreamed / 8; ++j) add_tf32(sums, weights, j, rows);
    }
  }

  // score = minus infinity where the query does not see the key. `own`, `other`: position of the
  // block's first own row, of the first streamed row.
  template <bool kOwnsQueries>
  __device__ void hide(Scores& scores, int own, int other, int seen) const {
    for_each_score(scores, [&](float& score, int t, int j, int i) {
      const int mine = own + own_row(t, i / 2), theirs = other + streamed_row(j, i % 2);
      const int ahead = kOwnsQueries ? mine - theirs : theirs - mine;
      if (ahead < 0 || ahead >= seen) score = -INFINITY;
    });
  }

  // Own rows of `to`, the block's first at `begin`, = factor * sums, by way of the own rows of
  // `staged`, which no lane of the warp reads any more. A factor of each row: factors[tile][half].
  template <int N>
  __device__ void put(const Sums& sums, float factor, const Rows& staged, const HeadRows<T, N>& to,
                      int begin) const {
    float factors[kTiles][2];
    for (auto& tile : factors) tile[0] = tile[1] = factor;
    put(sums, factors, staged, to, begin);
  }
  template <int N>
  __device__ void put(const Sums& sums, const float (&factors)[kTiles][2], const Rows& staged,
                      const HeadRows<T, N>& to, int begin) const {
    __syncwarp();
    constexpr int kBytes = static_cast<int>(sizeof(T));
    uint32_t place_of_first = staged.place(own_row(0, 0), 2 * place / Rows::kElements) +
                              static_cast<uint32_t>(2 * place % Rows::kElements * kBytes);
    forget(place_of_first);
    for_each_row<kTiles>([&](int t, int half) {
#pragma unroll
      for (int d = 0; d < kDims / 8; ++d) {
        stage(Rows::at(Rows::moved(place_of_first, Own::own(t, 8 * half), 8 * d / Rows::kElements)),
              sums[t][d][2 * half] * factors[t][half], sums[t][d][2 * half + 1] * factors[t][half]);
      }
    });
    __syncwarp();
#pragma unroll 4
    for (int i = lane; i < kOwn * Rows::kChunks; i += kWarpThreads) {
      const int row = first + i / Rows::kChunks, chunk = i % Rows::kChunks,
                element = chunk * Rows::kElements;
      if (begin + row < to.count && element < to.dimensions) {
        __stwb(reinterpret_cast<uint4*>(to.data + (begin + row) * to.stride + element),
               *reinterpret_cast<const uint4*>(Rows::at(staged.place(row, chunk))));
      }
    }
  }

 private:
  static __device__ void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                  uint32_t b1) {
    if constexpr (kNarrow) {
      multiply_bf16(sums, a, b0, b1);
    } else {
      multiply_tf32(sums, a, b0, b1);
    }
  }
  static __device__ void round([[maybe_unused]] uint32_t (&words)[4]) {
    if constexpr (!kNarrow) {
#pragma unroll
      for (uint32_t& word : words) word = round_to_tf32(word);
    }
  }
  static __device__ void stage(unsigned char* to, float low, float high) {
    if constexpr (kNarrow) {
      *reinterpret_cast<uint32_t*>(to) = narrow_pair(low, high);
    } else {
      *reinterpret_cast<float2*>(to) = make_float2(low, high);
    }
  }

  // Of matmuls j and j + 1 of the scores, whose sums are laid out as the next matmul's operand.
  __device__ void add_narrow(Sums& sums, const Scores& weights, int j, uint32_t rows) const {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&from)[4] = weights[t][j + i / 2];
        a[t][i] = narrow_pair(from[2 * (i % 2)], from[2 * (i % 2) + 1]);
      }
    }
#pragma unroll
    for (int d = 0; d < kDims / 8; d += 2) {
      uint32_t b[4];
      load_transposed(b, Rows::at(Rows::moved(rows, Streamed::streamed(j, 0), d)));
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        multiply(sums[t][d], a[t], b[0], b[1]);
        multiply(sums[t][d + 1], a[t], b[2], b[3]);
      }
    }
  }

  // Of matmul j: its columns 2 p and 2 p + 1 become columns p and p + 4 of the operand.
  __device__ void add_tf32(Sums& sums, const Scores& weights, int j,
                           const uint32_t (&rows)[2]) const {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float(&from)[4] = weights[t][j];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[t][i] = __float_as_uint(from[i % 2 * 2 + i / 2]);
      round(a[t]);
    }
#pragma unroll
    for (int d = 0; d < kDims / 8; ++d) {
      uint32_t b[2];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        b[side] = round_to_tf32(*reinterpret_cast<const uint32_t*>(
            Rows::at(Rows::moved(rows[side], Streamed::streamed(j, 0), 2 * d))));
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) multiply(sums[t][d], a[t], b[0], b[1]);
    }
  }
};

// --- dropout ---
// Of a call, as its kernels need it.
struct TileDropout {
  DropoutArguments at;  // of the step; factor is 1 without dropout
  uint64_t sequence;
  bool drops;
  bool in_fours;  // each query's elements start at a multiple of 4, and with them a tile's fours

  template <typename T, int N>
  explicit __device__ TileDropout(const AttentionCall<T, N>& call)
      : at(call.drops ? at_step(call.dropout) : call.dropout),
        sequence(static_cast<uint64_t>(call.shape.sequence)),
        drops(call.drops),
        in_fours(at.first % 4 == 0 && sequence % 4 == 0) {
    if (!drops) at.factor = 1;
  }
  // In the mask. `line`: mask_line() of the query.
  [[nodiscard]] __device__ uint64_t element(int64_t line, int key) const {
    return at.first + static_cast<uint64_t>(line) * sequence + static_cast<uint64_t>(key);
  }
  // Calls draw(std::bool_constant: in fours, i) for i = 0 to kCount - 1, if there is dropout.
  // `at_once`: how many do not wait for each other.
  template <int kCount, int kAtOnce, typename Draw>
  __device__ void draw(const Draw& draw) const {
    if (!drops) return;
    if (in_fours) {
#pragma unroll kAtOnce
      for (int i = 0; i < kCount; ++i) draw(std::true_type{}, i);
    } else {
#pragma unroll 1
      for (int i = 0; i < kCount; ++i) draw(std::false_type{}, i);
    }
  }
};

// What dropout keeps of a warp's scores, where it owns queries.
template <int kTiles, int kStreamed>
struct KeptOfQueries {
  uint32_t bits[kTiles][2];  // [tile][half]: bit 4 (j / 2) + 2 (j % 2) + i % 2

  // `element`: of the block's first own query and the first streamed key.
  template <typename Warp>
  __device__ KeptOfQueries(const Warp& warp, const TileDropout& dropout, uint64_t element) {
    DropoutArguments at = dropout.at;
    forget(at.key[0]);
    forget(at.key[1]);
    for (auto& tile : bits) tile[0] = tile[1] = dropout.drops ? 0 : ~0U;
    dropout.draw<kStreamed / 16, 1>([&](auto in_fours, int four) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint64_t row =
              element + static_cast<uint64_t>(warp.own_row(t, half)) * dropout.sequence;
          const auto key = static_cast<uint64_t>(16 * four + 4 * warp.place);
          bits[t][half] |= kept_of_four<in_fours()>(at, row + key) << 4 * four;
        }
      }
    });
  }
  [[nodiscard]] __device__ bool has(int t, int j, int i) const {
    return (bits[t][i / 2] >> (4 * (j / 2) + 2 * (j % 2) + i % 2) & 1U) != 0;
  }
};

// The same, where it owns keys in the order ByLanes.
template <int kTiles, int kStreamed>
struct KeptOfKeys {
  static_assert(kStreamed <= 64);
  uint32_t bits[2];  // [i % 2]: bit 4 j + 2 tile + i / 2

  // `element`: of the first streamed query and the block's first own key.
  template <typename Warp>
  __device__ KeptOfKeys(const Warp& warp, const TileDropout& dropout, uint64_t element) {
    DropoutArguments at = dropout.at;
    forget(at.key[0]);
    forget(at.key[1]);
    bits[0] = bits[1] = dropout.drops ? 0 : ~0U;
    // A lane with two keys draws for one query, for itself and for the lane with the other two.
    element +=
        static_cast<uint64_t>(warp.first + (kTiles == 2 ? 4 * warp.group : warp.group / 2 * 4));
    dropout.draw<kStreamed / 8, 2>([&](auto in_fours, int j) {
#pragma unroll
      for (int side = 0; side < kTiles; ++side) {
        const int query = warp.streamed_row(j, kTiles == 2 ? side : warp.group % 2);
        const uint64_t row = element + static_cast<uint64_t>(query) * dropout.sequence;
        bits[side] |= kept_of_four<in_fours()>(at, row) << 4 * j;
      }
    });
    if constexpr (kTiles == 1) {
      const bool odd = warp.group % 2 != 0;
      const uint32_t other = __shfl_xor_sync(0xFFFFFFFFU, bits[0], 4);
      bits[1] = (odd ? bits[0] : other) >> (odd ? 2 : 0);
      bits[0] = (odd ? other : bits[0]) >> (odd ? 2 : 0);
    }
  }
  [[nodiscard]] __device__ bool has(int t, int j, int i) const {
    return (bits[i % 2] >> (4 * j + 2 * t + i / 2) & 1U) != 0;
  }
};

}  // namespace sluice::cuda
