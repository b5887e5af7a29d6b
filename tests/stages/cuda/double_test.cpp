// Operators on a GPU against references in double precision, at odd shapes: matmuls, LayerNorm,
// attention, activations, cross-entropy. double_rows_test.cpp has those that work on rows,
// double_elements_test.cpp those that draw random numbers. The sizes of GPT-2 124M come with
// SLUICE_REAL_SHAPES.
#include <array>

#include "stages/compute/internal_operators.hpp"
#include "tests/stages/cuda/double_tools.hpp"

namespace sluice {
namespace {

// [rows, columns], row-major.
struct Matrix {
  std::int64_t rows, columns;
  Values values;
  [[nodiscard]] double at(std::int64_t row, std::int64_t column) const {
    return values[index_of(row * columns + column)];
  }
};

Matrix transposed(const Matrix& m) {
  Matrix t{m.columns, m.rows, Values(m.values.size())};
  for (std::int64_t r = 0; r < m.rows; ++r) {
    for (std::int64_t c = 0; c < m.columns; ++c) t.values[index_of(c * m.rows + r)] = m.at(r, c);
  }
  return t;
}

// a bᵀ: both operands are read along their rows.
Matrix matmul(const Matrix& a, const Matrix& b) {
  Matrix result{a.rows, b.rows, Values(index_of(a.rows * b.rows))};
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t j = 0; j < b.rows; ++j) {
      double sum = 0;
      for (std::int64_t k = 0; k < a.columns; ++k) sum += a.at(i, k) * b.at(j, k);
      result.values[index_of(i * b.rows + j)] = sum;
    }
  }
  return result;
}

TEST_F(CudaDoubleTest, MatmulsOfALayer) {
  std::vector<std::array<std::int64_t, 3>> shapes = {{37, 29, 53}, {5, 1, 3}, {130, 65, 33}};
  if (real_shapes()) shapes.insert(shapes.end(), {{256, 768, 2304}, {256, 3072, 768}});
  for (const DType dtype : kTypes) {
    for (const auto& [rows, in, out] : shapes) {
      SCOPED_TRACE(fmt::format("{} [{}, {}] to {}", name_of(dtype), rows, in, out));
      const Operand x = random_operand(dtype, {rows, in}, 1),
                    w = random_operand(dtype, {out, in}, 2);
      const Operand bias = random_operand(DType::kF32, {out}, 3);
      const Operand dy = random_operand(dtype, {rows, out}, 4);
      const Matrix mx{rows, in, x.values()}, mw{out, in, w.values()}, mdy{rows, out, dy.values()};
      Values y = matmul(mx, mw).values, dbias(index_of(out)), dweight;
      const Values added = bias.values();
      for (std::size_t i = 0; i < y.size(); ++i) y[i] += added[i % index_of(out)];
      for (std::size_t i = 0; i < mdy.values.size(); ++i) dbias[i % index_of(out)] += mdy.values[i];
      dweight = matmul(transposed(mdy), transposed(mx)).values;

      const OnGpu gx(x), gw(w), gbias(bias), gdy(dy);
      const OnGpu gy(Operand(dtype, {rows, out})), gdx(Operand(dtype, {rows, in}));
      const OnGpu gdw(Operand(DType::kF32, {out, in}, Values(index_of(out * in))));
      const OnGpu gdb(Operand(DType::kF32, {out}, Values(index_of(out))));
      linear_forward(gpu(), gx.tensor(), gw.tensor(), gbias.tensor(), gy.tensor());
      linear_backward_input(gpu(), gdy.tensor(), gw.tensor(), gdx.tensor());
      linear_backward_weight(gpu(), gx.tensor(), gdy.tensor(), gdw.tensor(), gdb.tensor());
      expect_close(gy, y, allowed(dtype), "y");
      expect_close(gdx, matmul(mdy, transposed(mw)).values, allowed(dtype), "dx");
      expect_close(gdw, dweight, 2e-6, "dweight");
      expect_close(gdb, dbias, 2e-6, "dbias");
    }
  }
}

// The end of a branch, with a stream of either type. A bf16 sum is rounded once; where rows are no
// whole packs of 8 numbers, cuBLASLt 13.1 on an H200 was seen to round more than once. Biases are
// bf16's numbers: a bf16 sum takes them so.
TEST_F(CudaDoubleTest, MatmulsThatAddToTheResidual) {
  std::vector<std::array<std::int64_t, 3>> shapes = {{37, 29, 53}, {5, 1, 3}, {130, 65, 33}};
  if (real_shapes()) shapes.insert(shapes.end(), {{256, 768, 768}, {256, 3072, 768}});
  for (const auto& [dtype, stream] : kStreams) {
    for (const auto& [rows, in, out] : shapes) {
      for (const bool has_bias : {true, false}) {
        SCOPED_TRACE(fmt::format("{}, {} [{}, {}] to {}, bias {}", name_of(dtype), name_of(stream),
                                 rows, in, out, has_bias));
        const Operand x = random_operand(dtype, {rows, in}, 1),
                      w = random_operand(dtype, {out, in}, 2);
        const Operand residual = random_operand(stream, {rows, out}, 3);
        const Operand bias(DType::kF32, {out}, random_values(out, 4, DType::kBf16));
        Values y = matmul({rows, in, x.values()}, {out, in, w.values()}).values;
        const Values before = residual.values(), added = bias.values();
        for (std::size_t i = 0; i < y.size(); ++i) {
          y[i] += before[i] + (has_bias ? added[i % index_of(out)] : 0);
        }
        const OnGpu gx(x), gw(w), gbias(bias), gresidual(residual),
            gy(Operand(stream, {rows, out}));
        linear_residual_forward(gpu(), gx.tensor(), gw.tensor(),
                                has_bias ? gbias.tensor() : Tensor{}, gresidual.tensor(),
                                gy.tensor());
        const double rounded = in % 8 == 0 && out % 8 == 0 ? 0x1.01p-8 : 0x1.01p-7;
        expect_within(gy, y, stream == DType::kBf16 ? rounded : 4e-6, "y");
        expect_equal(gresidual, before, "the residual");
      }
    }
  }
}

// LayerNorm of one row and its gradients, from the definitions.
struct Norm {
  Values y, dx, dgamma, dbeta;
};
Norm layer_norm(const Matrix& x, const Values& gamma, const Values& beta, const Matrix& dy,
                double epsilon) {
  const auto width = static_cast<double>(x.columns);
  Norm result{Values(x.values.size()), Values(x.values.size()), Values(gamma.size()),
              Values(gamma.size())};
  for (std::int64_t r = 0; r < x.rows; ++r) {
    double mean = 0, variance = 0, sum = 0, weighted = 0;
    for (std::int64_t c = 0; c < x.columns; ++c) mean += x.at(r, c) / width;
    for (std::int64_t c = 0; c < x.columns; ++c) {
      variance += (x.at(r, c) - mean) * (x.at(r, c) - mean) / width;
    }
    const double scale = 1 / std::sqrt(variance + epsilon);
    const auto unit = [&](std::int64_t c) { return (x.at(r, c) - mean) * scale; };
    for (std::int64_t c = 0; c < x.columns; ++c) {
      const double g = dy.at(r, c) * gamma[index_of(c)];
      sum += g / width;
      weighted += g * unit(c) / width;
      result.dgamma[index_of(c)] += dy.at(r, c) * unit(c);
      result.dbeta[index_of(c)] += dy.at(r, c);
      result.y[index_of(r * x.columns + c)] = unit(c) * gamma[index_of(c)] + beta[index_of(c)];
    }
    for (std::int64_t c = 0; c < x.columns; ++c) {
      result.dx[index_of(r * x.columns + c)] =
          scale * (dy.at(r, c) * gamma[index_of(c)] - sum - unit(c) * weighted);
    }
  }
  return result;
}

// With a residual stream of either type that the operands allow.
TEST_F(CudaDoubleTest, LayerNorm) {
  std::vector<std::pair<std::int64_t, std::int64_t>> shapes = {{5, 37}, {3, 1}, {67, 136}};
  if (real_shapes()) shapes.emplace_back(1024, 768);
  for (const auto& [dtype, stream] : kStreams) {
    for (const auto& [rows, width] : shapes) {
      if (width == 1) continue;  // its variance is 0
      SCOPED_TRACE(fmt::format("{}, {} [{}, {}]", name_of(dtype), name_of(stream), rows, width));
      const Operand x = random_operand(stream, {rows, width}, 1),
                    dy = random_operand(dtype, {rows, width}, 2);
      const Operand gamma = random_operand(DType::kF32, {width}, 3),
                    beta = random_operand(DType::kF32, {width}, 4);
      const Norm expected = layer_norm({rows, width, x.values()}, gamma.values(), beta.values(),
                                       {rows, width, dy.values()}, 1e-5);
      const Values none(index_of(width));
      const OnGpu gx(x), ggamma(gamma), gbeta(beta), gdy(dy), gy(Operand(dtype, {rows, width}));
      const OnGpu stats(Operand(DType::kF32, {rows, 2}));
      const OnGpu gdx(Operand(stream, {rows, width}));
      const OnGpu gdgamma(Operand(DType::kF32, {width}, none)),
          gdbeta(Operand(DType::kF32, {width}, none));
      layer_norm_forward(gpu(), gx.tensor(), ggamma.tensor(), gbeta.tensor(), 1e-5F, gy.tensor(),
                         stats.tensor());
      layer_norm_backward(
          gpu(), gdy.tensor(), gx.tensor(), ggamma.tensor(), stats.tensor(),
          {.dx = gdx.tensor(), .dgamma = gdgamma.tensor(), .dbeta = gdbeta.tensor()});
      expect_close(gy, expected.y, allowed(dtype), "y");
      expect_close(gdx, expected.dx, stream == DType::kF32 ? 1e-5 : allowed(stream), "dx");
      expect_close(gdgamma, expected.dgamma, 1e-5, "dgamma");
      expect_close(gdbeta, expected.dbeta, 1e-5, "dbeta");
    }
  }
}

// One head of one sample: columns of a packed [sequence, packed width].
Matrix part(const Values& packed, std::int64_t first_row, std::int64_t rows, std::int64_t width,
            std::int64_t first, std::int64_t columns) {
  Matrix m{rows, columns, {}};
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto begin = packed.begin() + (first_row + r) * width + first;
    m.values.insert(m.values.end(), begin, begin + columns);
  }
  return m;
}

void add_part(Values& packed, const Matrix& m, std::int64_t first_row, std::int64_t width,
              std::int64_t first) {
  for (std::int64_t r = 0; r < m.rows; ++r) {
    for (std::int64_t c = 0; c < m.columns; ++c) {
      packed[index_of((first_row + r) * width + first + c)] += m.at(r, c);
    }
  }
}

struct Attention {
  Values out, dqkv;
};
Attention attention(const AttentionShape& shape, const Values& qkv, const Values& dout) {
  const std::int64_t d = shape.head_dim, t = shape.sequence, packed = shape.packed_width();
  const std::int64_t width = shape.heads * d;
  const double scale = 1 / std::sqrt(static_cast<double>(d));
  Attention result{Values(index_of(shape.rows() * width)), Values(qkv.size())};
  for (std::int64_t sample = 0; sample < shape.samples; ++sample) {
    for (int head = 0; head < shape.heads; ++head) {
      const std::int64_t row = sample * t, shared = head / (shape.heads / shape.kv_heads);
      const std::int64_t at_q = head * d, at_k = width + shared * d;
      const std::int64_t at_v = width + (shape.kv_heads + shared) * d;
      const Matrix q = part(qkv, row, t, packed, at_q, d), k = part(qkv, row, t, packed, at_k, d),
                   v = part(qkv, row, t, packed, at_v, d), go = part(dout, row, t, width, at_q, d);
      Matrix p = matmul(q, k), ds = matmul(go, v);
      for (std::int64_t i = 0; i < t; ++i) {
        double largest = -1e300, sum = 0, mean = 0;
        for (std::int64_t j = 0; j <= i; ++j) largest = std::max(largest, scale * p.at(i, j));
        for (std::int64_t j = 0; j < t; ++j) {
          double& each = p.values[index_of(i * t + j)];
          each = j <= i ? std::exp(scale * each - largest) : 0;
          sum += each;
        }
        for (std::int64_t j = 0; j < t; ++j) p.values[index_of(i * t + j)] /= sum;
        for (std::int64_t j = 0; j < t; ++j) mean += p.at(i, j) * ds.at(i, j);
        for (std::int64_t j = 0; j < t; ++j) {
          double& each = ds.values[index_of(i * t + j)];
          each = scale * p.at(i, j) * (each - mean);
        }
      }
      add_part(result.out, matmul(p, transposed(v)), row, width, at_q);
      add_part(result.dqkv, matmul(ds, transposed(k)), row, packed, at_q);
      add_part(result.dqkv, matmul(transposed(ds), transposed(q)), row, packed, at_k);
      add_part(result.dqkv, matmul(transposed(p), transposed(go)), row, packed, at_v);
    }
  }
  return result;
}

TEST_F(CudaDoubleTest, Attention) {
  std::vector<AttentionShape> shapes = {
      {.samples = 2, .sequence = 13, .heads = 3, .kv_heads = 3, .head_dim = 5},
      {.samples = 1, .sequence = 41, .heads = 4, .kv_heads = 2, .head_dim = 16},
      {.samples = 1, .sequence = 1, .heads = 1, .kv_heads = 1, .head_dim = 8}};
  if (real_shapes()) {
    shapes.push_back({.samples = 1, .sequence = 512, .heads = 4, .kv_heads = 4, .head_dim = 64});
  }
  for (const DType dtype : kTypes) {
    for (const AttentionShape& shape : shapes) {
      SCOPED_TRACE(fmt::format("{}, sequence {}, heads {} of {}", name_of(dtype), shape.sequence,
                               shape.heads, shape.head_dim));
      const Shape packed = {shape.rows(), shape.packed_width()};
      const Shape width = {shape.rows(), std::int64_t{shape.heads} * shape.head_dim};
      const Operand qkv = random_operand(dtype, packed, 1), dout = random_operand(dtype, width, 2);
      const struct Attention expected = attention(shape, qkv.values(), dout.values());
      const std::size_t bytes = attention_state_bytes(DeviceKind::kCuda, shape, dtype);
      const OnGpu state(Operand(DType::kU8, {static_cast<std::int64_t>(bytes)}));
      const OnGpu gqkv(qkv), gdout(dout), out(Operand(dtype, width)), dqkv(Operand(dtype, packed));
      auto* kept = static_cast<std::byte*>(state.data());
      attention_forward(gpu(), shape, gqkv.tensor(), {}, out.tensor(), kept);
      attention_backward(gpu(), shape, gqkv.tensor(), out.tensor(), gdout.tensor(), {}, kept,
                         dqkv.tensor());
      expect_close(out, expected.out, 2 * allowed(dtype), "out");
      expect_close(dqkv, expected.dqkv, 2 * allowed(dtype), "dqkv");
    }
  }
}

TEST_F(CudaDoubleTest, Activations) {
  const std::int64_t rows = 7, width = real_shapes() ? 3072 : 53;
  for (const DType dtype : kTypes) {
    SCOPED_TRACE(name_of(dtype));
    const Operand x = random_operand(dtype, {rows, width}, 1, 2),
                  dy = random_operand(dtype, {rows, width}, 2);
    const Operand pairs = random_operand(dtype, {rows, 2 * width}, 3, 2);
    const Values vx = x.values(), vdy = dy.values(), vp = pairs.values();
    Values y(vx.size()), dx(vx.size()), glu(vx.size()), dpairs(vp.size());
    const double c = std::sqrt(2 / std::acos(-1.0));
    for (std::size_t i = 0; i < vx.size(); ++i) {
      const double inner = c * (vx[i] + 0.044715 * vx[i] * vx[i] * vx[i]), t = std::tanh(inner);
      y[i] = 0.5 * vx[i] * (1 + t);
      dx[i] = vdy[i] *
              (0.5 * (1 + t) + 0.5 * vx[i] * (1 - t * t) * c * (1 + 3 * 0.044715 * vx[i] * vx[i]));
      const std::size_t row = i / index_of(width), column = i % index_of(width);
      const std::size_t g = row * 2 * index_of(width) + column, u = g + index_of(width);
      const double sigmoid = 1 / (1 + std::exp(-vp[g])), silu = vp[g] * sigmoid;
      glu[i] = silu * vp[u];
      dpairs[g] = vdy[i] * vp[u] * (sigmoid + silu * (1 - sigmoid));
      dpairs[u] = vdy[i] * silu;
    }
    const OnGpu gx(x), gdy(dy), gpairs(pairs), gy(Operand(dtype, {rows, width})),
        gdx(Operand(dtype, {rows, width}));
    const OnGpu gglu(Operand(dtype, {rows, width})), gdpairs(Operand(dtype, {rows, 2 * width}));
    pointwise_forward(gpu(), Pointwise::kGeluTanh, gx.tensor(), gy.tensor());
    pointwise_backward(gpu(), Pointwise::kGeluTanh, gx.tensor(), gdy.tensor(), gdx.tensor());
    swiglu_forward(gpu(), gpairs.tensor(), gglu.tensor());
    swiglu_backward(gpu(), gpairs.tensor(), gdy.tensor(), gdpairs.tensor());
    expect_close(gy, y, allowed(dtype), "gelu");
    expect_close(gdx, dx, allowed(dtype), "gelu's gradient");
    expect_close(gglu, glu, allowed(dtype), "swiglu");
    expect_close(gdpairs, dpairs, allowed(dtype), "swiglu's gradient");
  }
}

TEST_F(CudaDoubleTest, CrossEntropy) {
  // With 12,288 numbers in fp32 and 24,576 in bf16, a row takes 48 KiB of shared memory.
  std::vector<std::int64_t> vocabularies = {2, 37, 1001, 12288, 24576};
  if (real_shapes()) vocabularies.push_back(50257);
  for (const DType dtype : kTypes) {
    for (const std::int64_t vocabulary : vocabularies) {
      SCOPED_TRACE(fmt::format("{}, vocabulary {}", name_of(dtype), vocabulary));
      constexpr std::int64_t kRows = 5;
      const Operand logits = random_operand(dtype, {kRows, vocabulary}, 1, 3);
      const Operand targets(DType::kI32, {kRows},
                            {0, 1, -1, static_cast<double>(vocabulary - 1), 1});
      const Values z = logits.values(), wanted = {0, 1, -1, static_cast<double>(vocabulary - 1), 1};
      Values gradient(z.size());
      double loss = 0;
      for (std::size_t r = 0; r < index_of(kRows); ++r) {
        const std::size_t first = r * index_of(vocabulary);
        double sum = 0;
        for (std::size_t c = 0; c < index_of(vocabulary); ++c) sum += std::exp(z[first + c]);
        if (wanted[r] < 0) continue;
        const auto target = static_cast<std::size_t>(wanted[r]);
        loss += std::log(sum) - z[first + target];
        for (std::size_t c = 0; c < index_of(vocabulary); ++c) {
          gradient[first + c] = 0.25 * (std::exp(z[first + c]) / sum - (c == target ? 1 : 0));
        }
      }
      const OnGpu glogits(logits), gtargets(targets);
      const HostBuffer memory(kGpu, sizeof(double));
      auto* found = reinterpret_cast<double*>(memory.data());
      softmax_cross_entropy(gpu(), glogits.tensor(), gtargets.tensor(), 0.25, true, found);
      expect_close(glogits, gradient, allowed(dtype), "gradient");
      EXPECT_NEAR(*found, loss, 1e-5 * loss);
    }
  }
}

// Rows of which a column alone is at the top, 80 above the others, as the target and as another
// column, and one whose every second column is 80 below the top, its target too.
Operand steep_logits(DType dtype, std::int64_t vocabulary) {
  Values z = random_values(3 * vocabulary, 1, dtype, 0.5);
  for (std::size_t i = 0; i < z.size(); ++i) {
    const std::size_t row = i / index_of(vocabulary), column = i % index_of(vocabulary);
    const bool high = row < 2 ? column == 2 : column % 2 == 0;
    z[i] = row < 2 && high ? 16 : z[i] + (high ? 16 : -64);
  }
  return {dtype, {3, vocabulary}, z};
}

// Each probability keeps its own precision down to fp32's smallest normal number; the target's
// difference from 1 has that of fp32 beside 1.
TEST_F(CudaDoubleTest, CrossEntropyFarBelowTheTop) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t vocabulary : {5, 1001, 8192, 50257}) {
      SCOPED_TRACE(fmt::format("{}, vocabulary {}", name_of(dtype), vocabulary));
      const Operand logits = steep_logits(dtype, vocabulary);
      const Values z = logits.values();
      const std::array<std::size_t, 3> wanted = {2, 1, 3};
      const OnGpu glogits(logits), gtargets(Operand(DType::kI32, {3}, {2, 1, 3}));
      const Buffer memory(kGpu, 3 * sizeof(double));
      row_cross_entropy(gpu(), glogits.tensor(), gtargets.tensor(), 1, true,
                        reinterpret_cast<double*>(memory.data()));
      const Values found = glogits.values(gpu());
      std::array<double, 3> losses = {};
      copy_now(kGpu, losses.data(), memory.data(), memory.size());
      const double own = dtype == DType::kBf16 ? 0x1.02p-8 : 1.5e-5;
      for (std::size_t row = 0; row < 3; ++row) {
        const std::size_t first = row * index_of(vocabulary);
        double sum = 0, worst = 0;
        for (std::size_t c = 0; c < index_of(vocabulary); ++c) sum += std::exp(z[first + c] - 16);
        for (std::size_t c = 0; c < index_of(vocabulary); ++c) {
          const bool target = c == wanted[row];
          const double p = std::exp(z[first + c] - 16) / sum, gradient = target ? p - 1 : p;
          const double most = own * std::abs(gradient) + (target ? 0x1p-23 : 0x1p-126);
          worst = std::max(worst, std::abs(found[first + c] - gradient) / most);
        }
        EXPECT_LE(worst, 1) << "gradient of row " << row;
        const double loss = std::log(sum) + 16 - z[first + wanted[row]];
        EXPECT_NEAR(losses[row], loss, 2e-6 * std::max(1.0, loss)) << "row " << row;
      }
    }
  }
}

}  // namespace
}  // namespace sluice
