// Causal self-attention in blocks of query rows: only the scores from the first block of columns
// that a row of the block sees up to the block's last column are computed. Matmuls run directly on
// the packed queries, keys and values, one sample at a time, batched over the key heads; query
// heads that share a key head are separate matmuls whose key and value gradients accumulate.
//
// Matrices of scores are [heads, sequence, ld] per sample, ld a multiple of 16; what lies outside a
// block's columns is never written or read. Key and value gradients go by blocks of columns: one
// matmul over all query rows that see one of them.
#include <cmath>

#include "stages/compute/call_arguments.hpp"
#include "stages/cpu/cpu_backend.hpp"
#include "stages/cpu/parallel.hpp"
#include "stages/tensor/bump_allocator.hpp"

namespace sluice::cpu {

namespace {

constexpr std::int64_t kBlock = 64;

// Where things are, in elements.
struct Places {
  explicit Places(const AttentionShape& shape)
      : sequence(shape.sequence),
        heads(shape.heads),
        first_head(shape.first_head),
        all_heads(shape.all_heads > 0 ? shape.all_heads : shape.heads),
        kv_heads(shape.kv_heads),
        group(shape.heads / shape.kv_heads),
        head_dim(shape.head_dim),
        seen(shape.seen()),
        packed(shape.packed_width()),
        width(heads * head_dim),
        ld((sequence + 15) / 16 * 16),
        keys(width),
        values(width + kv_heads * head_dim) {}

  std::int64_t sequence, heads, first_head, all_heads, kv_heads, group, head_dim;
  std::int64_t seen;           // the most columns that a row sees
  std::int64_t packed, width;  // leading dimensions of qkv and of out
  std::int64_t ld;             // of scores
  std::int64_t keys, values;   // columns of qkv

  [[nodiscard]] std::int64_t matrix() const { return sequence * ld; }  // one head's scores
  // Columns [begin, end) of row's block.
  [[nodiscard]] std::int64_t begin(std::int64_t row) const {
    const std::int64_t first = row / kBlock * kBlock;
    return first < seen ? 0 : (first + 1 - seen) / kBlock * kBlock;
  }
  [[nodiscard]] std::int64_t end(std::int64_t row) const {
    return std::min(row / kBlock * kBlock + kBlock, sequence);
  }
  // The rows that see a column of the block that starts at `column` end here.
  [[nodiscard]] std::int64_t last_row(std::int64_t column) const {
    return std::min(column + kBlock - 1 + seen, sequence);
  }
  [[nodiscard]] std::int64_t rows(std::int64_t row) const {  // in the block that starts at row
    return std::min(kBlock, sequence - row);
  }
  // Batched over key heads: element strides from one key head to the next.
  [[nodiscard]] MatmulLayout query() const { return {packed, 1, group * head_dim}; }
  [[nodiscard]] MatmulLayout key() const { return {packed, 1, head_dim}; }
  [[nodiscard]] MatmulLayout key_transposed() const { return {1, packed, head_dim}; }
  [[nodiscard]] MatmulLayout output() const { return {width, 1, group * head_dim}; }
};

// A matrix of scores per head: all rows of the sequence, or those of one block.
struct Scores {
  std::byte* data;
  DType dtype;
  std::int64_t ld, head;  // elements from one head to the next

  [[nodiscard]] std::byte* at(std::int64_t h, std::int64_t row, std::int64_t column = 0) const {
    return data + (h * head + row * ld + column) * static_cast<std::int64_t>(size_of(dtype));
  }
  [[nodiscard]] float* floats(std::int64_t h, std::int64_t row) const {
    return reinterpret_cast<float*>(at(h, row));
  }
  [[nodiscard]] MatmulLayout layout(std::int64_t group) const { return {ld, 1, group * head}; }
  [[nodiscard]] MatmulLayout transposed(std::int64_t group) const { return {1, ld, group * head}; }
};

// work(head, row, rows) over rows [0, count) of every head.
template <typename Work>
void for_head_rows(const ComputeContext& ctx, std::int64_t heads, std::int64_t count,
                   const Work& work) {
  parallel_range(ctx, heads * count, 1, [&](std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const std::int64_t head = begin / count, row = begin % count;
      const std::int64_t rows = std::min(count - row, end - begin);
      work(head, row, rows);
      begin += rows;
    }
  });
}

// One call of forward or backward.
class Attention {
 public:
  Attention(ComputeContext& ctx, const AttentionShape& shape, const Dropout& dropout, DType dtype)
      : ctx_(ctx),
        places_(shape),
        dropout_(dropout),
        dtype_(dtype),
        kernels_(kernels_for(ctx, dtype)),
        scale_(static_cast<float>(1 / std::sqrt(static_cast<double>(shape.head_dim)))) {}

  void forward(std::int64_t sample, const Tensor& qkv, const Tensor& out, std::byte* state);
  void backward(std::int64_t sample, const Tensor& qkv, const Tensor& out, const Tensor& dout,
                std::byte* state, const Tensor& dqkv);
  // Hands out the scratch of forward (backward); returns the bytes it takes.
  std::size_t take_forward(std::byte* base);
  std::size_t take_backward(std::byte* base);

 private:
  [[nodiscard]] Scores whole(std::byte* data) const {
    return {data, dtype_, places_.ld, places_.matrix()};
  }
  [[nodiscard]] Scores block(std::byte* data, DType dtype) const {
    return {data, dtype, places_.ld, kBlock * places_.ld};
  }
  [[nodiscard]] Scores probabilities(std::byte* state, std::int64_t sample) const {
    return whole(state + sample * places_.heads * places_.matrix() *
                             static_cast<std::int64_t>(size_of(dtype_)));
  }
  // Address of (row, column) of a sample's matrix.
  [[nodiscard]] std::byte* packed_at(const Tensor& qkv, std::int64_t sample, std::int64_t row,
                                     std::int64_t column) const {
    return element(qkv, (sample * places_.sequence + row) * places_.packed + column);
  }
  [[nodiscard]] std::byte* output_at(const Tensor& out, std::int64_t sample,
                                     std::int64_t row) const {
    return element(out, (sample * places_.sequence + row) * places_.width);
  }
  // Of so many heads of a row.
  [[nodiscard]] std::int64_t head_bytes(std::int64_t heads) const {
    return heads * places_.head_dim * static_cast<std::int64_t>(size_of(dtype_));
  }
  [[nodiscard]] bool drops() const { return dropout_.probability != 0; }
  // Dropout of rows of one head's scores, from one place to another (or the same).
  void drop(const TypedKernels& kernels, std::int64_t sample, std::int64_t head, std::int64_t row,
            std::int64_t rows, const Scores& from, std::int64_t from_row, const Scores& to,
            std::int64_t to_row) const;
  // Of the block of rows at `row`. multiply(): scores = `rows` (queries, or gradients of the
  // output) times `keys` (keys or values). weight(): `to` gets sums of `keys`, weighted by scores.
  // `layout`: of `rows` and of `to`.
  void multiply(std::int64_t row, const std::byte* rows, const MatmulLayout& layout,
                const std::byte* keys, const Scores& to, std::int64_t to_row);
  void weight(std::int64_t row, const Scores& scores, std::int64_t scores_row,
              const std::byte* keys, std::byte* to, const MatmulLayout& layout);
  void gradient_of_scores(std::int64_t sample, std::int64_t row, const Tensor& qkv,
                          const Tensor& dout, const Scores& p);
  void key_gradients(std::int64_t sample, std::int64_t first, const Tensor& qkv, const Tensor& dout,
                     const Scores& dropped, const Tensor& dqkv);
  void store_key_gradients(std::int64_t sample, const Tensor& dqkv) const;
  // Key gradients sum over a group in f32 before they are rounded.
  [[nodiscard]] bool sums_in_f32() const { return places_.group > 1 && dtype_ == DType::kBf16; }

  ComputeContext& ctx_;
  Places places_;
  Dropout dropout_;
  DType dtype_;
  const TypedKernels& kernels_;
  float scale_;
  // Scratch, for one sample at a time.
  Scores block_scores_ = {};   // f32, one block of rows; bf16 only
  Scores block_dropped_ = {};  // probabilities after dropout, one block of rows
  Scores dscores_ = {};        // gradient of the scores
  Scores dropped_ = {};        // probabilities after dropout
  float* delta_ = nullptr;     // [heads, sequence]: dot(dout, out)
  float* dkeys_ = nullptr;     // f32 [sequence, 2 * kv_heads * head_dim], where sums_in_f32()
};

std::size_t Attention::take_forward(std::byte* base) {
  BumpAllocator allocator(base);
  const std::int64_t block_elements = places_.heads * kBlock * places_.ld;
  if (dtype_ == DType::kBf16) {
    block_scores_ = block(allocator.take(block_elements, DType::kF32), DType::kF32);
  }
  if (drops()) block_dropped_ = block(allocator.take(block_elements, dtype_), dtype_);
  return allocator.used();
}

std::size_t Attention::take_backward(std::byte* base) {
  BumpAllocator allocator(base);
  const Places& at = places_;
  if (dtype_ == DType::kBf16) {
    const std::int64_t block_elements = at.heads * kBlock * at.ld;
    block_scores_ = block(allocator.take(block_elements, DType::kF32), DType::kF32);
  }
  dscores_ = whole(allocator.take(at.heads * at.matrix(), dtype_));
  if (drops()) dropped_ = whole(allocator.take(at.heads * at.matrix(), dtype_));
  delta_ = allocator.take<float>(at.heads * at.sequence);
  if (sums_in_f32()) {
    dkeys_ = allocator.take<float>(at.sequence * 2 * at.kv_heads * at.head_dim);
  }
  return allocator.used();
}

void Attention::drop(const TypedKernels& kernels, std::int64_t sample, std::int64_t head,
                     std::int64_t row, std::int64_t rows, const Scores& from, std::int64_t from_row,
                     const Scores& to, std::int64_t to_row) const {
  const std::int64_t begin = places_.begin(row), end = places_.end(row);
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t of_all = sample * places_.all_heads + places_.first_head + head;
    const std::int64_t line = of_all * places_.sequence + row + i;
    const DropoutArguments arguments = dropout_arguments(dropout_, line * places_.sequence + begin);
    kernels.dropout(&arguments, from.at(head, from_row + i, begin), to.at(head, to_row + i, begin),
                    end - begin);
  }
}

void Attention::multiply(std::int64_t row, const std::byte* rows, const MatmulLayout& layout,
                         const std::byte* keys, const Scores& to, std::int64_t to_row) {
  const Places& at = places_;
  const std::int64_t begin = at.begin(row);
  for (std::int64_t j = 0; j < at.group; ++j) {
    matmuls_of(ctx_).run({.batches = at.kv_heads,
                          .m = at.rows(row),
                          .n = at.end(row) - begin,
                          .k = at.head_dim,
                          .a = layout,
                          .b = at.key_transposed(),
                          .c = to.layout(at.group),
                          .operands = dtype_},
                         rows + head_bytes(j), keys, nullptr, to.at(j, to_row, begin));
  }
}

void Attention::weight(std::int64_t row, const Scores& scores, std::int64_t scores_row,
                       const std::byte* keys, std::byte* to, const MatmulLayout& layout) {
  const Places& at = places_;
  const std::int64_t begin = at.begin(row);
  for (std::int64_t j = 0; j < at.group; ++j) {
    matmuls_of(ctx_).run({.batches = at.kv_heads,
                          .m = at.rows(row),
                          .n = at.head_dim,
                          .k = at.end(row) - begin,
                          .a = scores.layout(at.group),
                          .b = at.key(),
                          .c = layout,
                          .operands = dtype_,
                          .result = dtype_},
                         scores.at(j, scores_row, begin), keys, nullptr, to + head_bytes(j));
  }
}

void Attention::forward(std::int64_t sample, const Tensor& qkv, const Tensor& out,
                        std::byte* state) {
  const Places& at = places_;
  const Scores p = probabilities(state, sample);
  for (std::int64_t row = 0; row < at.sequence; row += kBlock) {
    const std::int64_t rows = at.rows(row), begin = at.begin(row), end = at.end(row);
    const bool in_f32 = dtype_ == DType::kBf16;
    const Scores& scores = in_f32 ? block_scores_ : p;
    const std::int64_t scores_row = in_f32 ? 0 : row;
    multiply(row, packed_at(qkv, sample, row, 0), at.query(),
             packed_at(qkv, sample, begin, at.keys), scores, scores_row);
    for_head_rows(ctx_, at.heads, rows, [&](std::int64_t head, std::int64_t i, std::int64_t count) {
      kernels_.causal_softmax(scores.floats(head, scores_row + i), at.ld, row + i, count, at.seen,
                              begin, end, scale_, p.at(head, row + i));
      if (drops()) {
        drop(kernels_, sample, head, row + i, count, p, row + i, block_dropped_, i);
      }
    });
    const Scores& used = drops() ? block_dropped_ : p;
    const std::int64_t used_row = drops() ? 0 : row;
    weight(row, used, used_row, packed_at(qkv, sample, begin, at.values),
           output_at(out, sample, row), at.output());
  }
}

// Rows of the block at `row`: dscores_ and, with dropout, dropped_.
void Attention::gradient_of_scores(std::int64_t sample, std::int64_t row, const Tensor& qkv,
                                   const Tensor& dout, const Scores& p) {
  const Places& at = places_;
  const std::int64_t rows = at.rows(row), begin = at.begin(row), end = at.end(row);
  const bool in_f32 = dtype_ == DType::kBf16;
  const Scores& dp = in_f32 ? block_scores_ : dscores_;
  const std::int64_t dp_row = in_f32 ? 0 : row;
  multiply(row, output_at(dout, sample, row), at.output(), packed_at(qkv, sample, begin, at.values),
           dp, dp_row);
  for_head_rows(ctx_, at.heads, rows, [&](std::int64_t head, std::int64_t i, std::int64_t count) {
    if (drops()) {
      drop(kernels_of(ctx_).f32, sample, head, row + i, count, dp, dp_row + i, dp, dp_row + i);
      drop(kernels_, sample, head, row + i, count, p, row + i, dropped_, row + i);
    }
    kernels_.causal_softmax_backward(p.at(head, row + i), dp.floats(head, dp_row + i),
                                     delta_ + head * at.sequence + row + i, at.ld, row + i, count,
                                     at.seen, begin, end, scale_, dscores_.at(head, row + i));
  });
}

// Keys and values [first, first + block): sums over all query rows that see one of them.
void Attention::key_gradients(std::int64_t sample, std::int64_t first, const Tensor& qkv,
                              const Tensor& dout, const Scores& dropped, const Tensor& dqkv) {
  const Places& at = places_;
  const std::int64_t columns = at.rows(first), sums_width = 2 * at.kv_heads * at.head_dim;
  MatmulSpec spec = {.batches = at.kv_heads,
                     .m = columns,
                     .n = at.head_dim,
                     .k = at.last_row(first) - first,
                     .a = dscores_.transposed(at.group),
                     .b = at.query(),
                     .c = at.key(),
                     .operands = dtype_,
                     .result = dtype_};
  std::byte* dkey = packed_at(dqkv, sample, first, at.keys);
  std::byte* dvalue = packed_at(dqkv, sample, first, at.values);
  if (sums_in_f32()) {
    spec.c = {sums_width, 1, at.head_dim};
    spec.result = DType::kF32;
    float* place = dkeys_ + first * sums_width;
    dkey = reinterpret_cast<std::byte*>(place);
    dvalue = reinterpret_cast<std::byte*>(place + at.kv_heads * at.head_dim);
  }
  for (std::int64_t j = 0; j < at.group; ++j) {
    spec.accumulate = j > 0;
    spec.b = at.query();
    matmuls_of(ctx_).run(spec, dscores_.at(j, first, first),
                         packed_at(qkv, sample, first, j * at.head_dim), nullptr, dkey);
    spec.b = at.output();
    matmuls_of(ctx_).run(spec, dropped.at(j, first, first),
                         output_at(dout, sample, first) + head_bytes(j), nullptr, dvalue);
  }
}

void Attention::store_key_gradients(std::int64_t sample, const Tensor& dqkv) const {
  const std::int64_t width = 2 * places_.kv_heads * places_.head_dim;
  parallel_range(ctx_, places_.sequence, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      kernels_.from_float(dkeys_ + row * width, packed_at(dqkv, sample, row, places_.keys), width);
    }
  });
}

void Attention::backward(std::int64_t sample, const Tensor& qkv, const Tensor& out,
                         const Tensor& dout, std::byte* state, const Tensor& dqkv) {
  const Places& at = places_;
  const Scores p = probabilities(state, sample);
  for_head_rows(ctx_, at.heads, at.sequence,
                [&](std::int64_t head, std::int64_t row, std::int64_t rows) {
                  const std::int64_t column = head_bytes(head);
                  kernels_.row_dots(output_at(out, sample, row) + column,
                                    output_at(dout, sample, row) + column, at.width, rows,
                                    at.head_dim, delta_ + head * at.sequence + row);
                });
  for (std::int64_t row = 0; row < at.sequence; row += kBlock) {
    const std::int64_t begin = at.begin(row);
    gradient_of_scores(sample, row, qkv, dout, p);
    weight(row, dscores_, row, packed_at(qkv, sample, begin, at.keys),
           packed_at(dqkv, sample, row, 0), at.query());
  }
  const Scores& dropped = drops() ? dropped_ : p;
  for (std::int64_t first = 0; first < at.sequence; first += kBlock) {
    key_gradients(sample, first, qkv, dout, dropped, dqkv);
  }
  if (sums_in_f32()) store_key_gradients(sample, dqkv);
}

// Only whether it drops anything matters.
Dropout any_dropout(bool drops) { return {drops ? 0.5F : 0.0F, {}}; }

}  // namespace

std::size_t attention_state_bytes(DeviceKind /*device*/, const AttentionShape& shape, DType dtype) {
  const Places at(shape);
  return bytes_of_all(size_of(dtype), {shape.samples, at.heads, at.sequence, at.ld});
}

std::size_t attention_forward_workspace(ComputeContext& ctx, const AttentionShape& shape,
                                        DType dtype, bool drops) {
  return Attention(ctx, shape, any_dropout(drops), dtype).take_forward(nullptr);
}

std::size_t attention_backward_workspace(ComputeContext& ctx, const AttentionShape& shape,
                                         DType dtype, bool drops) {
  return Attention(ctx, shape, any_dropout(drops), dtype).take_backward(nullptr);
}

std::string attention_engine(ComputeContext& /*ctx*/, const AttentionShape& /*shape*/,
                             DType /*dtype*/, bool /*drops*/) {
  return {};
}

void attention_forward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                       const Dropout& dropout, const Tensor& out, std::byte* state) {
  Attention attention(ctx, shape, dropout, qkv.spec.dtype);
  attention.take_forward(ctx.workspace(attention.take_forward(nullptr)));
  for (std::int64_t sample = 0; sample < shape.samples; ++sample) {
    attention.forward(sample, qkv, out, state);
  }
}

void attention_backward(ComputeContext& ctx, const AttentionShape& shape, const Tensor& qkv,
                        const Tensor& out, const Tensor& dout, const Dropout& dropout,
                        const std::byte* state, const Tensor& dqkv) {
  Attention attention(ctx, shape, dropout, qkv.spec.dtype);
  attention.take_backward(ctx.workspace(attention.take_backward(nullptr)));
  for (std::int64_t sample = 0; sample < shape.samples; ++sample) {
    // The state is only read; its places are shared with forward, which writes.
    attention.backward(sample, qkv, out, dout, const_cast<std::byte*>(state), dqkv);
  }
}

}  // namespace sluice::cpu
