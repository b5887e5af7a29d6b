// Operators on a GPU that work on rows of the residual stream, or of queries and keys, against
// references in double precision: RMSNorm, embedding, rotary positions, the norm of queries and
// keys. Every bound is relative to the largest number of the result.
#include <cstdint>

#include "tests/stages/cuda/double_tools.hpp"

namespace sluice {
namespace {

// y = x gamma / rms(x) of rows of one width, and its gradients.
struct RmsNorm {
  Values y, dx, dgamma;
};
RmsNorm rms_norm(const Values& x, const Values& gamma, const Values& dy, double epsilon) {
  const std::size_t width = gamma.size();
  RmsNorm result{Values(x.size()), Values(x.size()), Values(width)};
  for (std::size_t first = 0; first < x.size(); first += width) {
    double square = 0, dot = 0;
    for (std::size_t c = 0; c < width; ++c) square += x[first + c] * x[first + c];
    const double rstd = 1 / std::sqrt(square / static_cast<double>(width) + epsilon);
    for (std::size_t c = 0; c < width; ++c) dot += dy[first + c] * gamma[c] * x[first + c];
    const double slope = rstd * rstd * rstd * dot / static_cast<double>(width);
    for (std::size_t c = 0; c < width; ++c) {
      const std::size_t i = first + c;
      result.y[i] = x[i] * rstd * gamma[c];
      result.dx[i] = rstd * dy[i] * gamma[c] - slope * x[i];
      result.dgamma[c] += dy[i] * x[i] * rstd;
    }
  }
  return result;
}

// Gradients of the weights are added to what is there, or replace it: then NaN is there.
TEST_F(CudaDoubleTest, RmsNorm) {
  std::vector<std::pair<std::int64_t, std::int64_t>> shapes = {{5, 37}, {3, 1}, {67, 136}};
  if (real_shapes()) shapes.emplace_back(1024, 768);
  for (const auto& [dtype, stream] : kStreams) {
    for (const auto& [rows, width] : shapes) {
      SCOPED_TRACE(fmt::format("{}, {} [{}, {}]", name_of(dtype), name_of(stream), rows, width));
      const Operand x = random_operand(stream, {rows, width}, 1),
                    dy = random_operand(dtype, {rows, width}, 2),
                    gamma = random_operand(DType::kF32, {width}, 3),
                    residual = random_operand(stream, {rows, width}, 4),
                    sums = random_operand(DType::kF32, {width}, 5);
      const struct RmsNorm expected = rms_norm(x.values(), gamma.values(), dy.values(), 1e-5);
      const Values dx = sum_of(expected.dx, residual.values());
      const OnGpu gx(x), ggamma(gamma), gdy(dy), gresidual(residual);
      const OnGpu gy(Operand(dtype, {rows, width})), stats(Operand(DType::kF32, {rows, 1}));
      const OnGpu gdx(Operand(stream, {rows, width})), added(sums),
          over(Operand(DType::kF32, {width})), rounded(Operand(DType::kBf16, {rows, width}));
      const bool rounds = stream == DType::kF32;
      rms_norm_forward(gpu(), gx.tensor(), ggamma.tensor(), 1e-5F, gy.tensor(), stats.tensor());
      rms_norm_backward(gpu(), gdy.tensor(), gx.tensor(), ggamma.tensor(), stats.tensor(),
                        {.dx = gdx.tensor(),
                         .residual = gresidual.tensor(),
                         .rounded = rounds ? rounded.tensor() : Tensor{},
                         .dgamma = added.tensor()});
      rms_norm_backward(gpu(), gdy.tensor(), gx.tensor(), ggamma.tensor(), stats.tensor(),
                        {.dgamma = over.tensor(), .write = Write::kOverwrite});
      expect_within(gy, expected.y, allowed_once(dtype), "y");
      expect_within(gdx, dx, stream == DType::kF32 ? 4e-6 : allowed_once(stream), "dx");
      if (rounds) expect_within(rounded, dx, allowed_once(DType::kBf16), "dx rounded");
      expect_within(added, sum_of(expected.dgamma, sums.values()), 4e-6, "dgamma, added");
      expect_within(over, expected.dgamma, 4e-6, "dgamma, overwritten");
    }
  }
}

struct EmbeddingCase {
  std::int64_t samples, sequence, vocabulary, width;
};

// Few tokens of many, some often: the last one is never there.
Values tokens_of(const EmbeddingCase& shape) {
  Values tokens(index_of(shape.samples * shape.sequence));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] =
        static_cast<double>(i * i % index_of(std::max<std::int64_t>(shape.vocabulary - 1, 1)));
  }
  return tokens;
}

// Of the table and of the positions; dout [places, width].
std::pair<Values, Values> embedding_gradients(const EmbeddingCase& shape, const Values& tokens,
                                              const Values& dout) {
  const std::size_t width = index_of(shape.width);
  std::pair<Values, Values> sums = {zeros(shape.vocabulary * shape.width),
                                    zeros((shape.sequence + 2) * shape.width)};
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::size_t row = static_cast<std::size_t>(tokens[i]) * width;
    const std::size_t place = i % index_of(shape.sequence) * width;
    for (std::size_t c = 0; c < width; ++c) {
      sums.first[row + c] += dout[i * width + c];
      sums.second[place + c] += dout[i * width + c];
    }
  }
  return sums;
}

// GPT-2's vocabulary with a part of its width: the host compares every row.
TEST_F(CudaDoubleTest, Embedding) {
  std::vector<EmbeddingCase> shapes = {{3, 5, 7, 131}, {1, 1, 2, 1}, {2, 37, 211, 12}};
  if (real_shapes()) shapes.push_back({4, 1024, 50257, 96});
  for (const DType stream : kTypes) {
    for (const EmbeddingCase& shape : shapes) {
      SCOPED_TRACE(fmt::format("{} [{}, {}], vocabulary {}, width {}", name_of(stream),
                               shape.samples, shape.sequence, shape.vocabulary, shape.width));
      const std::int64_t places = shape.samples * shape.sequence, width = shape.width;
      const Values tokens = tokens_of(shape);
      const Operand table = random_operand(DType::kF32, {shape.vocabulary, width}, 1),
                    positions = random_operand(DType::kF32, {shape.sequence + 2, width}, 2),
                    dout = random_operand(stream, {places, width}, 3);
      Values out(index_of(places * width));
      for (std::size_t i = 0; i < out.size(); ++i) {
        const std::size_t place = i / index_of(width), column = i % index_of(width);
        out[i] = table.tensor
                     .floats()[static_cast<std::size_t>(tokens[place]) * index_of(width) + column] +
                 static_cast<double>(
                     positions.tensor
                         .floats()[place % index_of(shape.sequence) * index_of(width) + column]);
      }
      const auto [dtable, dpositions] = embedding_gradients(shape, tokens, dout.values());
      const OnGpu gtokens(Operand(DType::kI32, {shape.samples, shape.sequence}, tokens)),
          gtable(table), gpositions(positions), gdout(dout);
      const OnGpu gout(Operand(stream, {places, width})), added(table), places_added(positions),
          over(Operand(table.tensor.spec)), places_over(Operand(positions.tensor.spec));
      embedding_forward(gpu(), gtokens.tensor(), gtable.tensor(), gpositions.tensor(),
                        gout.tensor());
      embedding_backward_weight(gpu(), gtokens.tensor(), gdout.tensor(), added.tensor(),
                                places_added.tensor());
      embedding_backward_weight(gpu(), gtokens.tensor(), gdout.tensor(), over.tensor(),
                                places_over.tensor(), Write::kOverwrite);
      expect_within(gout, out, allowed_once(stream), "out");
      expect_within(added, sum_of(dtable, table.values()), 4e-6, "dtable, added");
      expect_within(over, dtable, 4e-6, "dtable, overwritten");
      expect_within(places_added, sum_of(dpositions, positions.values()), 4e-6,
                    "dpositions, added");
      expect_within(places_over, dpositions, 4e-6, "dpositions, overwritten");
    }
  }
}

std::vector<AttentionShape> head_shapes() {
  std::vector<AttentionShape> shapes = {
      {.samples = 2, .sequence = 13, .heads = 3, .kv_heads = 3, .head_dim = 6},
      {.samples = 1, .sequence = 41, .heads = 4, .kv_heads = 2, .head_dim = 16},
      {.samples = 1, .sequence = 1, .heads = 1, .kv_heads = 1, .head_dim = 2}};
  if (real_shapes()) {  // of Llama 3.2 1B, with fewer heads
    shapes.push_back({.samples = 1, .sequence = 2048, .heads = 8, .kv_heads = 2, .head_dim = 64});
  }
  return shapes;
}

// Queries and keys of a packed row turned by its position; pairs are halves of a head apart.
Values rotated(const AttentionShape& shape, Values packed, double base, double direction) {
  const auto half = index_of(shape.head_dim / 2);
  for (std::int64_t row = 0; row < shape.rows(); ++row) {
    for (int head = 0; head < shape.heads + shape.kv_heads; ++head) {
      const auto first = index_of(row * shape.packed_width() + head * shape.head_dim);
      for (std::size_t i = 0; i < half; ++i) {
        const double frequency =
            std::pow(base, -static_cast<double>(i) / static_cast<double>(half));
        const double angle = static_cast<double>(row % shape.sequence) * frequency;
        const double c = std::cos(angle), s = direction * std::sin(angle);
        const double low = packed[first + i], high = packed[first + half + i];
        packed[first + i] = low * c - high * s;
        packed[first + half + i] = high * c + low * s;
      }
    }
  }
  return packed;
}

TEST_F(CudaDoubleTest, RotaryPositions) {
  for (const DType dtype : kTypes) {
    for (const AttentionShape& shape : head_shapes()) {
      SCOPED_TRACE(fmt::format("{}, sequence {}, heads of {}", name_of(dtype), shape.sequence,
                               shape.head_dim));
      const Operand qkv = random_operand(dtype, {shape.rows(), shape.packed_width()}, 1);
      const Values before = qkv.values();
      const OnGpu forward(qkv), backward(qkv);
      rotary(gpu(), shape, {.base = 10000}, forward.tensor(), /*backward=*/false);
      rotary(gpu(), shape, {.base = 10000}, backward.tensor(), /*backward=*/true);
      expect_within(forward, rotated(shape, before, 10000, 1), allowed_once(dtype), "forward");
      expect_within(backward, rotated(shape, before, 10000, -1), allowed_once(dtype), "backward");
    }
  }
}

// The heads `first` to `first + count` of every row, one after the other.
Values heads_of(const AttentionShape& shape, const Values& packed, int first, int count) {
  Values result;
  for (std::int64_t row = 0; row < shape.rows(); ++row) {
    const auto begin = packed.begin() + row * shape.packed_width() + first * shape.head_dim;
    result.insert(result.end(), begin, begin + count * shape.head_dim);
  }
  return result;
}

void put_heads(const AttentionShape& shape, Values& packed, int first, int count,
               const Values& heads) {
  const std::int64_t width = std::int64_t{count} * shape.head_dim;
  for (std::int64_t row = 0; row < shape.rows(); ++row) {
    std::copy_n(heads.begin() + row * width, width,
                packed.begin() + row * shape.packed_width() + first * shape.head_dim);
  }
}

// Values, which the norm does not see, keep their bits.
TEST_F(CudaDoubleTest, NormOfQueriesAndKeys) {
  for (const DType dtype : kTypes) {
    for (const AttentionShape& shape : head_shapes()) {
      SCOPED_TRACE(fmt::format("{}, sequence {}, heads of {}", name_of(dtype), shape.sequence,
                               shape.head_dim));
      const int heads = shape.heads + shape.kv_heads;
      const Operand qkv = random_operand(dtype, {shape.rows(), shape.packed_width()}, 1),
                    dqkv = random_operand(dtype, {shape.rows(), shape.packed_width()}, 2),
                    query = random_operand(DType::kF32, {shape.head_dim}, 3),
                    key = random_operand(DType::kF32, {shape.head_dim}, 4);
      Values y = qkv.values(), dx = dqkv.values(), dgains;
      const Values raw = heads_of(shape, y, 0, heads);
      for (const bool of_keys : {false, true}) {
        const int first = of_keys ? shape.heads : 0, count = of_keys ? shape.kv_heads : shape.heads;
        const RmsNorm norm =
            rms_norm(heads_of(shape, y, first, count), (of_keys ? key : query).values(),
                     heads_of(shape, dx, first, count), 1e-5);
        put_heads(shape, y, first, count, norm.y);
        put_heads(shape, dx, first, count, norm.dx);
        dgains.insert(dgains.end(), norm.dgamma.begin(), norm.dgamma.end());
      }
      const OnGpu gqkv(qkv), gdqkv(dqkv), gquery(query), gkey(key);
      const OnGpu kept(Operand(dtype, {shape.rows(), std::int64_t{heads} * shape.head_dim})),
          stats(Operand(DType::kF32, {shape.rows(), heads})),
          gdgains(Operand(DType::kF32, {2, shape.head_dim}));
      query_key_norm_forward(gpu(), shape, gqkv.tensor(), gquery.tensor(), gkey.tensor(), 1e-5F,
                             kept.tensor(), stats.tensor());
      query_key_norm_backward(gpu(), shape, kept.tensor(), gquery.tensor(), gkey.tensor(),
                              stats.tensor(), gdqkv.tensor(), gdgains.tensor());
      expect_equal(kept, raw, "what was there before");
      expect_within(gqkv, y, allowed_once(dtype), "queries and keys");
      expect_within(gdqkv, dx, dtype == DType::kF32 ? 4e-6 : allowed_once(dtype), "gradients");
      expect_within(gdgains, dgains, 4e-6, "gradients of the gains");
    }
  }
}

}  // namespace
}  // namespace sluice
