#include <sluice/operators.hpp>

#include "stages/compute/internal_operators.hpp"
#include "tests/stages/operators/operator_tools.hpp"

namespace sluice {
namespace {

using ElementwiseTest = OperatorTest;
SLUICE_OPERATOR_CASES(ElementwiseTest);
using LinearTest = OperatorTest;
SLUICE_OPERATOR_CASES(LinearTest);
using NormTest = OperatorTest;
SLUICE_OPERATOR_CASES(NormTest);
using EmbeddingTest = OperatorTest;
SLUICE_OPERATOR_CASES(EmbeddingTest);

constexpr std::int64_t kSizes[] = {1, 3, 16, 37, 64, 131, 9001};

double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
double exact_gelu(double x) { return 0.5 * x * std::erfc(-x / M_SQRT2); }
double silu(double x) { return x / (1 + std::exp(-x)); }

double slope(const std::function<double(double)>& f, double x) {
  return (f(x + 1e-5) - f(x - 1e-5)) / 2e-5;
}

double logistic(double x) { return 1 / (1 + std::exp(-x)); }
double identity_above_zero(double x) { return std::max(x, 0.0); }
double hyperbolic_tangent(double x) { return std::tanh(x); }

// [Pointwise], in double precision.
constexpr double (*kReferences[])(double) = {identity_above_zero, exact_gelu, gelu, silu,
                                             hyperbolic_tangent,  logistic};
static_assert(std::size(kReferences) == static_cast<std::size_t>(Pointwise::kCount));

void check_pointwise(ComputeContext& ctx, DType dtype, Pointwise function) {
  const auto f = kReferences[static_cast<int>(function)];
  for (const std::int64_t size : kSizes) {
    const Operand x = random_operand(dtype, {size}, 1, 3), dy = random_operand(dtype, {size}, 2);
    const Operand y(dtype, {size}), dx(dtype, {size});
    pointwise_forward(ctx, function, x.tensor, y.tensor);
    pointwise_backward(ctx, function, x.tensor, dy.tensor, dx.tensor);
    Values expected, gradient;
    const Values in = x.values(), out = dy.values();
    for (std::size_t i = 0; i < in.size(); ++i) {
      expected.push_back(f(in[i]));
      gradient.push_back(out[i] * slope(f, in[i]));
    }
    expect_close(y.values(), expected, tolerance(dtype), "y");
    expect_close(dx.values(), gradient, tolerance(dtype), "dx");
    EXPECT_TRUE(y.end_untouched() && dx.end_untouched());
    pointwise_backward(ctx, function, x.tensor, dy.tensor, dy.tensor);
    EXPECT_EQ(dy.values(), dx.values()) << "in place";
  }
}

TEST_P(ElementwiseTest, EachFunctionMatchesItsReference) {
  for (int i = 0; i < static_cast<int>(Pointwise::kCount); ++i) {
    SCOPED_TRACE(i);
    check_pointwise(ctx(), dtype(), static_cast<Pointwise>(i));
  }
}

// The tail too, of numbers that are all but zero.
TEST_P(ElementwiseTest, ExactGeluIsRelativelyExactBelowZero) {
  if (dtype() != DType::kF32) return;
  Values numbers;
  for (double x = -12.5; x < 0; x += 0.01) numbers.push_back(x);
  const auto count = static_cast<std::int64_t>(numbers.size());
  const Operand x(dtype(), {count}, numbers), y(dtype(), {count});
  pointwise_forward(ctx(), Pointwise::kGelu, x.tensor, y.tensor);
  const Values in = x.values(), out = y.values();
  for (std::size_t i = 0; i < in.size(); ++i) {
    const double expected = exact_gelu(in[i]);
    EXPECT_NEAR(out[i], expected, -1e-5 * expected) << in[i];
  }
}

TEST_P(ElementwiseTest, SmoothActivationsKeepTheirLimitsAndNan) {
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::nan("");
  const Operand x(dtype(), {5}, {200, -200, 0, nan, -infinity});
  const Operand y(dtype(), {5});
  pointwise_forward(ctx(), Pointwise::kTanh, x.tensor, y.tensor);
  EXPECT_EQ(y.values()[0], 1);
  EXPECT_EQ(y.values()[1], -1);
  EXPECT_EQ(y.values()[2], 0);
  EXPECT_TRUE(std::isnan(y.values()[3]));
  EXPECT_EQ(y.values()[4], -1);
  pointwise_forward(ctx(), Pointwise::kSigmoid, x.tensor, y.tensor);
  EXPECT_EQ(y.values()[0], 1);
  EXPECT_NEAR(y.values()[1], 0, 1e-30);
  EXPECT_EQ(y.values()[2], 0.5);
  EXPECT_TRUE(std::isnan(y.values()[3]));
  pointwise_forward(ctx(), Pointwise::kSilu, x.tensor, y.tensor);
  EXPECT_EQ(y.values()[0], 200);
  EXPECT_NEAR(y.values()[1], 0, 1e-30);
  EXPECT_TRUE(std::isnan(y.values()[3]));
}

TEST_P(ElementwiseTest, BothGelusKeepTheirLimitsAndNan) {
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::nan("");
  for (const Pointwise function : {Pointwise::kGelu, Pointwise::kGeluTanh}) {
    const Operand x(dtype(), {6}, {200, -200, 0, nan, infinity, -13.5});
    const Operand y(dtype(), {6});
    pointwise_forward(ctx(), function, x.tensor, y.tensor);
    const Values values = y.values();
    EXPECT_EQ(values[0], 200);
    EXPECT_NEAR(values[1], 0, 1e-30);
    EXPECT_EQ(values[2], 0);
    EXPECT_TRUE(std::isnan(values[3]));
    EXPECT_FALSE(std::isfinite(values[4]));
    EXPECT_NEAR(values[5], 0, 1e-30);
  }
  const Operand x(dtype(), {5}, {200, -200, infinity, -infinity, nan});
  const Operand dy(dtype(), {5}, {1, 1, 1, 1, 1}), dx(dtype(), {5});
  pointwise_backward(ctx(), Pointwise::kGelu, x.tensor, dy.tensor, dx.tensor);
  const Values slopes = dx.values();
  for (const std::size_t i : {0U, 2U}) EXPECT_EQ(slopes[i], 1);
  for (const std::size_t i : {1U, 3U}) EXPECT_NEAR(slopes[i], 0, 1e-30);
  EXPECT_TRUE(std::isnan(slopes[4]));
}

TEST_P(ElementwiseTest, SwigluMatchesItsReference) {
  for (const std::int64_t hidden : {1, 16, 37, 96}) {
    const std::int64_t rows = 5;
    const Operand x = random_operand(dtype(), {rows, 2 * hidden}, 3, 2);
    const Operand dy = random_operand(dtype(), {rows, hidden}, 4);
    const Operand y(dtype(), {rows, hidden}), dx(dtype(), {rows, 2 * hidden});
    swiglu_forward(ctx(), x.tensor, y.tensor);
    swiglu_backward(ctx(), x.tensor, dy.tensor, dx.tensor);
    const auto reference = [&](const Values& in) {
      Values out;
      for (std::int64_t i = 0; i < rows * hidden; ++i) {
        const std::int64_t at = i / hidden * 2 * hidden + i % hidden;
        out.push_back(silu(in[index_of(at)]) * in[index_of(at + hidden)]);
      }
      return out;
    };
    expect_close(y.values(), reference(x.values()), tolerance(dtype()), "y");
    const Values out = dy.values();
    expect_close(
        dx.values(),
        numeric_gradient([&](const Values& in) { return dot(reference(in), out); }, x.values()),
        tolerance(dtype()), "dx");
  }
}

TEST_P(ElementwiseTest, AddAndConvertAreExact) {
  for (const std::int64_t size : kSizes) {
    const Operand x = random_operand(dtype(), {size}, 5),
                  y = random_operand(DType::kF32, {size}, 6);
    const Values before = y.values();
    add(ctx(), x.tensor, y.tensor);
    Values expected;
    const Values in = x.values();
    for (std::size_t i = 0; i < in.size(); ++i) {
      expected.push_back(
          static_cast<double>(static_cast<float>(before[i]) + static_cast<float>(in[i])));
    }
    EXPECT_EQ(y.values(), expected);
    // In x's own type: the rounded sum.
    const Operand same = random_operand(dtype(), {size}, 7), rounded(dtype(), {size});
    const Operand sums(DType::kF32, {size}, same.values());
    add(ctx(), x.tensor, sums.tensor);
    add(ctx(), x.tensor, same.tensor);
    convert(ctx(), sums.tensor, rounded.tensor);
    EXPECT_EQ(same.values(), rounded.values());
    const Operand narrow(DType::kBf16, {size}), wide(DType::kF32, {size});
    convert(ctx(), y.tensor, narrow.tensor);
    convert(ctx(), narrow.tensor, wide.tensor);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      expected[i] = static_cast<double>(to_float(to_bf16(static_cast<float>(expected[i]))));
    }
    EXPECT_EQ(wide.values(), expected);
    EXPECT_TRUE(narrow.end_untouched() && wide.end_untouched());
    const Operand again(DType::kBf16, {size}), other(DType::kBf16, {size});
    const std::vector<Conversion> both = {{wide.tensor, other.tensor}, {y.tensor, again.tensor}};
    convert_all(ctx(), both);
    EXPECT_EQ(again.values(), expected);
    EXPECT_EQ(other.values(), expected);
  }
}

TEST_P(ElementwiseTest, DropoutFollowsTheGlobalIndexAlone) {
  constexpr std::int64_t kSize = 5003;
  const Dropout whole = {0.3F, {7, random_site(2, 1), 11}, 0};
  const Operand x = random_operand(dtype(), {kSize}, 7);
  const Operand y(dtype(), {kSize}), part(dtype(), {1000});
  dropout(ctx(), x.tensor, whole, y.tensor);
  const Values in = x.values(), out = y.values();
  int kept = 0;
  for (std::int64_t i = 0; i < kSize; ++i) {
    const bool keep =
        to_unit(philox(whole.key, 0, static_cast<std::uint64_t>(i / 4))[index_of(i % 4)]) >= 0.3F;
    kept += keep ? 1 : 0;
    ASSERT_NEAR(out[index_of(i)], keep ? in[index_of(i)] / 0.7 : 0, tolerance(dtype()) * 3) << i;
  }
  EXPECT_NEAR(kept, 0.7 * kSize, 150);
  for (const std::int64_t first : {1, 2, 255, 1021, 4003}) {
    Dropout moved = whole;
    moved.first_element = static_cast<std::uint64_t>(first);
    const Tensor from = {x.tensor.as<std::byte>() + first * static_cast<int>(size_of(dtype())),
                         part.tensor.spec};
    dropout(ctx(), from, moved, part.tensor);
    const Values piece = part.values();
    for (std::int64_t i = 0; i < 1000; ++i) {
      ASSERT_EQ(piece[index_of(i)], out[index_of(first + i)]) << first << " + " << i;
    }
  }
}

TEST_P(ElementwiseTest, DropoutOfProbabilityZeroIsTheIdentity) {
  const Operand x = random_operand(dtype(), {77}, 8), y(dtype(), {77});
  dropout(ctx(), x.tensor, {}, y.tensor);
  EXPECT_EQ(y.values(), x.values());
  const Operand wide = random_operand(DType::kF32, {77}, 8);
  const Operand rounded(dtype(), {77}), expected(dtype(), {77});
  dropout(ctx(), wide.tensor, {}, rounded.tensor);
  convert(ctx(), wide.tensor, expected.tensor);
  EXPECT_EQ(rounded.values(), expected.values());
}

TEST_P(ElementwiseTest, DropoutToBf16RoundsWhatDropoutInF32Gives) {
  for (const std::int64_t size : {1, 7, 130, 5003}) {
    const Dropout mask = {0.3F, {7, random_site(2, 1), 11}, 4003};
    const Operand x = random_operand(DType::kF32, {size}, 9), dropped(DType::kF32, {size});
    const Operand rounded(dtype(), {size}), expected(dtype(), {size});
    dropout(ctx(), x.tensor, mask, rounded.tensor);
    dropout(ctx(), x.tensor, mask, dropped.tensor);
    convert(ctx(), dropped.tensor, expected.tensor);
    EXPECT_EQ(rounded.values(), expected.values());
    EXPECT_TRUE(rounded.end_untouched());
  }
}

// Against dropout in f32, a sum in f32, and one rounding.
void check_dropout_residual(ComputeContext& ctx, DType dtype, DType stream, float probability) {
  for (const std::int64_t size : {1, 7, 130, 5003}) {
    const Dropout mask = {probability, {7, random_site(2, 1), 11}, 4003};
    const Operand x = random_operand(dtype, {size}, 9),
                  residual = random_operand(stream, {size}, 10),
                  in_place = random_operand(stream, {size}, 10), y(stream, {size});
    const Operand wide(DType::kF32, {size}), sum(DType::kF32, {size}), expected(stream, {size});
    convert(ctx, x.tensor, wide.tensor);
    convert(ctx, residual.tensor, sum.tensor);
    dropout(ctx, wide.tensor, mask, wide.tensor);
    add(ctx, wide.tensor, sum.tensor);
    convert(ctx, sum.tensor, expected.tensor);
    dropout_residual(ctx, x.tensor, mask, residual.tensor, y.tensor);
    dropout_residual(ctx, x.tensor, mask, in_place.tensor, in_place.tensor);
    EXPECT_EQ(y.values(), expected.values());
    EXPECT_EQ(in_place.values(), expected.values());
    EXPECT_TRUE(y.end_untouched() && in_place.end_untouched());
    if (dtype != stream) continue;
    dropout_residual(ctx, x.tensor, mask, residual.tensor, x.tensor);
    EXPECT_EQ(x.values(), expected.values());
  }
}

TEST_P(ElementwiseTest, DropoutToAResidualIsDropoutThenASumRoundedOnce) {
  for (const float probability : {0.0F, 0.3F}) {
    check_dropout_residual(ctx(), dtype(), DType::kF32, probability);
    check_dropout_residual(ctx(), dtype(), dtype(), probability);
  }
}

TEST_P(LinearTest, MatchesItsReference) {
  struct Sizes {
    std::int64_t rows, in, out;
  };
  for (const Sizes& size : {Sizes{5, 7, 9}, {17, 16, 16}, {3, 65, 17}, {1, 3, 2}}) {
    const auto [rows, in, out] = size;
    const Operand x = random_operand(dtype(), {rows, in}, 9),
                  dy = random_operand(dtype(), {rows, out}, 10);
    const Operand w = random_operand(dtype(), {out, in}, 11),
                  b = random_operand(DType::kF32, {out}, 12);
    const Operand y(dtype(), {rows, out}), wide(DType::kF32, {rows, out}), dx(dtype(), {rows, in});
    const Operand dw = random_operand(DType::kF32, {out, in}, 13),
                  db = random_operand(DType::kF32, {out}, 14);
    const auto reference = [&, rows = rows, in = in, out = out](const Values& xs, const Values& ws,
                                                                const Values& bs) {
      Values ys;
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < out; ++j) {
          double sum = bs[index_of(j)];
          for (std::int64_t k = 0; k < in; ++k)
            sum += xs[index_of(i * in + k)] * ws[index_of(j * in + k)];
          ys.push_back(sum);
        }
      }
      return ys;
    };
    const Values xs = x.values(), ws = w.values(), bs = b.values(), dys = dy.values();
    linear_forward(ctx(), x.tensor, w.tensor, b.tensor, y.tensor);
    expect_close(y.values(), reference(xs, ws, bs), tolerance(dtype()), "y");
    linear_forward(ctx(), x.tensor, w.tensor, {}, wide.tensor);
    expect_close(wide.values(), reference(xs, ws, Values(bs.size())), 4e-6, "f32 y, no bias");
    linear_backward_input(ctx(), dy.tensor, w.tensor, dx.tensor);
    expect_close(
        dx.values(),
        numeric_gradient([&](const Values& v) { return dot(reference(v, ws, bs), dys); }, xs),
        tolerance(dtype()), "dx");
    const Values dw_before = dw.values(), db_before = db.values();
    linear_backward_weight(ctx(), x.tensor, dy.tensor, dw.tensor, db.tensor);
    expect_close(
        dw.values(),
        sum_of(dw_before, numeric_gradient(
                              [&](const Values& v) { return dot(reference(xs, v, bs), dys); }, ws)),
        4e-6, "dweight");
    expect_close(
        db.values(),
        sum_of(db_before, numeric_gradient(
                              [&](const Values& v) { return dot(reference(xs, ws, v), dys); }, bs)),
        4e-6, "dbias");
    EXPECT_TRUE(y.end_untouched() && dx.end_untouched() && dw.end_untouched() &&
                db.end_untouched());
  }
}

// More rows than one block of the matmuls, and a rest.
TEST_P(LinearTest, CutsManyRowsIntoBlocks) {
  const std::int64_t rows = 1037, in = 24, out = 40;
  const Operand x = random_operand(dtype(), {rows, in}, 30);
  const Operand dy = random_operand(dtype(), {rows, out}, 31);
  const Operand w = random_operand(dtype(), {out, in}, 32);
  const Operand y(DType::kF32, {rows, out}), dx(dtype(), {rows, in});
  const Operand dw(DType::kF32, {out, in}, Values(index_of(out * in), 1.0));
  const Operand db(DType::kF32, {out}, Values(index_of(out), 2.0));
  linear_forward(ctx(), x.tensor, w.tensor, {}, y.tensor);
  linear_backward_input(ctx(), dy.tensor, w.tensor, dx.tensor);
  linear_backward_weight(ctx(), x.tensor, dy.tensor, dw.tensor, db.tensor);
  const Values xs = x.values(), dys = dy.values(), ws = w.values();
  Values y_expected(index_of(rows * out)), dx_expected(index_of(rows * in));
  Values dw_expected(index_of(out * in), 1.0), db_expected(index_of(out), 2.0);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < out; ++j) {
      const double gradient = dys[index_of(i * out + j)];
      db_expected[index_of(j)] += gradient;
      for (std::int64_t k = 0; k < in; ++k) {
        const double weight = ws[index_of(j * in + k)], value = xs[index_of(i * in + k)];
        y_expected[index_of(i * out + j)] += value * weight;
        dx_expected[index_of(i * in + k)] += gradient * weight;
        dw_expected[index_of(j * in + k)] += gradient * value;
      }
    }
  }
  expect_close(y.values(), y_expected, 4e-6, "y");
  expect_close(dx.values(), dx_expected, tolerance(dtype()), "dx");
  expect_close(dw.values(), dw_expected, 4e-6, "dweight");
  expect_close(db.values(), db_expected, 4e-6, "dbias");
  EXPECT_TRUE(y.end_untouched() && dx.end_untouched() && dw.end_untouched() && db.end_untouched());
}

// Sums without terms are 0; every output is written, and the bias's gradient has its rows.
TEST_P(LinearTest, WritesTheBiasWhereAWidthIsZero) {
  const std::int64_t rows = 37, out = 5;
  const Operand x(dtype(), {1, rows, 0}), weight(dtype(), {out, 0}), dweight(DType::kF32, {out, 0}),
      dx(dtype(), {rows, 0});
  const Operand bias = random_operand(dtype(), {out}, 1),
                residual(dtype(), {rows, out}, Values(185, 1));
  const Operand wide_bias(DType::kF32, {out}, bias.values());
  const Values row = bias.values();
  for (const bool biased : {false, true}) {
    const Tensor given = biased ? wide_bias.tensor : Tensor{};
    const auto value = [&](std::size_t i) { return biased ? row[i % row.size()] : 0.0; };
    for (const DType result : {DType::kF32, dtype()}) {
      const Operand y(result, {1, rows, out});
      linear_forward(ctx(), x.tensor, weight.tensor, given, y.tensor);
      for (std::size_t i = 0; i < 185; ++i) ASSERT_EQ(y.values()[i], value(i)) << i;
      EXPECT_TRUE(y.end_untouched());
    }
    const Operand y(dtype(), {1, rows, out}), raised(dtype(), {1, rows, out}),
        expected(dtype(), {rows, out});
    linear_activation_forward(ctx(), Activation::kGelu, x.tensor, weight.tensor, given,
                              raised.tensor, y.tensor);
    for (std::size_t i = 0; i < 185; ++i) ASSERT_EQ(raised.values()[i], value(i)) << i;
    pointwise_forward(ctx(), Pointwise::kGeluTanh, raised.tensor, expected.tensor);
    EXPECT_EQ(y.values(), expected.values());
    linear_residual_forward(ctx(), {x.tensor.data, {dtype(), {rows, 0}}}, weight.tensor, given,
                            residual.tensor, expected.tensor);
    for (std::size_t i = 0; i < 185; ++i) EXPECT_NEAR(expected.values()[i], 1 + value(i), 0.02);
  }
  const Operand dy = random_operand(dtype(), {rows, out}, 2), dbias(DType::kF32, {out}),
                sums(DType::kF32, {out}), one(dtype(), {rows, 1}, Values(37, 1)),
                unused(DType::kF32, {out, 1});
  linear_backward_weight(ctx(), dx.tensor, dy.tensor, dweight.tensor, dbias.tensor,
                         Write::kOverwrite);
  linear_backward_weight(ctx(), one.tensor, dy.tensor, unused.tensor, sums.tensor,
                         Write::kOverwrite);
  EXPECT_EQ(dbias.values(), sums.values());
  linear_backward_input(ctx(), dy.tensor, weight.tensor, dx.tensor);

  const Operand none(dtype(), {rows, 0}), down(dtype(), {0, out}), dhidden(dtype(), {rows, out});
  linear_backward_input(ctx(), none.tensor, down.tensor, dhidden.tensor);
  EXPECT_EQ(dhidden.values(), Values(185, 0));
  const Operand draised(dtype(), {rows, out});
  linear_activation_backward_input(ctx(), Activation::kGelu, none.tensor, down.tensor, dy.tensor,
                                   draised.tensor);
  EXPECT_EQ(draised.values(), Values(185, 0));
  EXPECT_TRUE(dhidden.end_untouched() && draised.end_untouched() && dx.end_untouched());
}

// Blocks of rows in f32 and in bf16, and a shorter last one.
TEST_P(LinearTest, ResidualMatmulHasTheBitsOfAMatmulAndASum) {
  const std::int64_t rows = 700, in = 9, out = 13;
  const Operand x = random_operand(dtype(), {rows, in}, 40),
                weight = random_operand(dtype(), {out, in}, 41),
                bias = random_operand(DType::kF32, {out}, 42);
  for (const DType stream : {DType::kF32, dtype()}) {
    const Operand residual = random_operand(stream, {rows, out}, 43);
    const Operand y(stream, {rows, out}), expected(stream, {rows, out});
    for (const Tensor& added : {bias.tensor, Tensor{}}) {
      linear_residual_forward(ctx(), x.tensor, weight.tensor, added, residual.tensor, y.tensor);
      linear_forward(ctx(), x.tensor, weight.tensor, added, expected.tensor);
      add(ctx(), residual.tensor, expected.tensor);
      EXPECT_EQ(y.values(), expected.values());
      EXPECT_TRUE(y.end_untouched());
    }
  }
}

TEST_P(LinearTest, FusedActivationsHaveTheBitsOfSeparateCalls) {
  const std::int64_t rows = 1037, in = 24, hidden = 40;
  for (const Activation activation : {Activation::kGelu, Activation::kSwiglu}) {
    const std::int64_t wide = activation == Activation::kGelu ? hidden : 2 * hidden;
    const Operand x = random_operand(dtype(), {rows, in}, 33);
    const Operand dy = random_operand(dtype(), {rows, in}, 34);
    const Operand up = random_operand(dtype(), {wide, in}, 35);
    const Operand down = random_operand(dtype(), {in, hidden}, 36);
    const Operand bias = random_operand(DType::kF32, {wide}, 37);
    const Operand raised(dtype(), {rows, wide}), other(dtype(), {rows, wide});
    const Operand y(dtype(), {rows, hidden}), other_y(dtype(), {rows, hidden});
    const Operand draised(dtype(), {rows, wide}), other_draised(dtype(), {rows, wide});
    const Operand dhidden(dtype(), {rows, hidden});
    linear_activation_forward(ctx(), activation, x.tensor, up.tensor, bias.tensor, raised.tensor,
                              y.tensor);
    linear_activation_backward_input(ctx(), activation, dy.tensor, down.tensor, raised.tensor,
                                     draised.tensor);
    linear_forward(ctx(), x.tensor, up.tensor, bias.tensor, other.tensor);
    linear_backward_input(ctx(), dy.tensor, down.tensor, dhidden.tensor);
    if (activation == Activation::kGelu) {
      pointwise_forward(ctx(), Pointwise::kGeluTanh, other.tensor, other_y.tensor);
      pointwise_backward(ctx(), Pointwise::kGeluTanh, other.tensor, dhidden.tensor,
                         other_draised.tensor);
    } else {
      swiglu_forward(ctx(), other.tensor, other_y.tensor);
      swiglu_backward(ctx(), other.tensor, dhidden.tensor, other_draised.tensor);
    }
    EXPECT_EQ(raised.values(), other.values());
    EXPECT_EQ(y.values(), other_y.values());
    EXPECT_EQ(draised.values(), other_draised.values());
    EXPECT_TRUE(raised.end_untouched() && y.end_untouched() && draised.end_untouched());
  }
}

void check_embedding(ComputeContext& ctx, DType stream) {
  const std::int64_t samples = 3, sequence = 5, width = 1131, vocabulary = 7;
  const Operand tokens(DType::kI32, {samples, sequence},
                       {0, 1, 2, 3, 4, 5, 6, 6, 6, 6, 1, 3, 3, 0, 2});
  const Operand table = random_operand(DType::kF32, {vocabulary, width}, 15);
  const Operand positions = random_operand(DType::kF32, {sequence + 2, width}, 16);
  const Operand out(stream, {samples * sequence, width});
  const Operand dout = random_operand(stream, {samples * sequence, width}, 17);
  const Operand dtable(DType::kF32, {vocabulary, width}, Values(index_of(vocabulary * width), 1.0));
  const Operand dpositions(DType::kF32, {sequence + 2, width},
                           Values(index_of((sequence + 2) * width), 2.0));
  embedding_forward(ctx, tokens.tensor, table.tensor, positions.tensor, out.tensor);
  embedding_backward_weight(ctx, tokens.tensor, dout.tensor, dtable.tensor, dpositions.tensor);
  Values expected, table_gradient(index_of(vocabulary * width), 1.0),
      position_gradient(index_of((sequence + 2) * width), 2.0);
  const Values rows = table.values(), places = positions.values(), gradient = dout.values();
  for (std::int64_t i = 0; i < samples * sequence * width; ++i) {
    const std::int64_t row = i / width, column = i % width;
    const std::size_t from = index_of(tokens.tensor.as<std::int32_t>()[row] * width + column);
    const std::size_t place = index_of(row % sequence * width + column);
    expected.push_back(rows[from] + places[place]);
    table_gradient[from] += gradient[index_of(i)];
    position_gradient[place] += gradient[index_of(i)];
  }
  expect_close(out.values(), expected, stream == DType::kF32 ? 1e-6 : tolerance(stream), "out");
  expect_close(dtable.values(), table_gradient, 1e-6, "dtable");
  expect_close(dpositions.values(), position_gradient, 1e-6, "dpositions");
}

TEST_P(EmbeddingTest, AddsTokenAndPosition) {
  check_embedding(ctx(), DType::kF32);
  check_embedding(ctx(), DType::kBf16);
}

TEST_P(EmbeddingTest, WithoutPositionsCopiesTheTable) {
  const Operand tokens(DType::kI32, {1, 2}, {1, 0});
  const Operand table(DType::kF32, {2, 1}, {5, 6}), out(DType::kF32, {2, 1});
  embedding_forward(ctx(), tokens.tensor, table.tensor, {}, out.tensor);
  EXPECT_EQ(out.values(), (Values{6, 5}));
}

struct NormReference {
  std::int64_t width;
  bool centred;
  [[nodiscard]] Values operator()(const Values& x, const Values& gamma, const Values& beta) const {
    Values y;
    const auto n = static_cast<double>(width);
    for (std::size_t row = 0; row < x.size() / index_of(width); ++row) {
      const double* v = x.data() + row * index_of(width);
      double mean = 0, square = 0;
      for (std::int64_t i = 0; i < width && centred; ++i) mean += v[i] / n;
      for (std::int64_t i = 0; i < width; ++i) square += (v[i] - mean) * (v[i] - mean) / n;
      for (std::int64_t i = 0; i < width; ++i) {
        const std::size_t at = index_of(i);
        y.push_back((v[i] - mean) / std::sqrt(square + 1e-5) * gamma[at] +
                    (centred ? beta[at] : 0));
      }
    }
    return y;
  }
};

// `stream`: the type of x and dx.
void check_norm(ComputeContext& ctx, DType dtype, bool centred, DType stream) {
  const double close = stream == DType::kF32 ? 1e-5 : tolerance(stream);
  for (const std::int64_t width : {3, 16, 37, 128}) {
    const std::int64_t rows = 5;
    const NormReference reference = {width, centred};
    const Operand x = random_operand(stream, {rows, width}, 18, 2);
    const Operand gamma = random_operand(DType::kF32, {width}, 20),
                  beta = random_operand(DType::kF32, {width}, 21);
    const Operand y(dtype, {rows, width}), stats(DType::kF32, {rows, centred ? 2 : 1});
    const Operand dy = random_operand(dtype, {rows, width}, 22),
                  residual = random_operand(stream, {rows, width}, 23), dx(stream, {rows, width});
    const Operand dgamma = random_operand(DType::kF32, {width}, 24),
                  dbeta = random_operand(DType::kF32, {width}, 25);
    const Values dg_before = dgamma.values(), db_before = dbeta.values();
    const NormGradients wanted = {.dx = dx.tensor,
                                  .residual = residual.tensor,
                                  .dgamma = dgamma.tensor,
                                  .dbeta = centred ? dbeta.tensor : Tensor{}};
    if (centred) {
      layer_norm_forward(ctx, x.tensor, gamma.tensor, beta.tensor, 1e-5F, y.tensor, stats.tensor);
      layer_norm_backward(ctx, dy.tensor, x.tensor, gamma.tensor, stats.tensor, wanted);
    } else {
      rms_norm_forward(ctx, x.tensor, gamma.tensor, 1e-5F, y.tensor, stats.tensor);
      rms_norm_backward(ctx, dy.tensor, x.tensor, gamma.tensor, stats.tensor, wanted);
    }
    const Values xs = x.values(), gs = gamma.values(), bs = beta.values(), dys = dy.values();
    const auto gradient = [&](const auto& values, const Values& at) {
      return numeric_gradient([&](const Values& v) { return dot(values(v), dys); }, at);
    };
    expect_close(y.values(), reference(xs, gs, bs), tolerance(dtype), "y");
    expect_close(
        dx.values(),
        sum_of(residual.values(), gradient([&](auto& v) { return reference(v, gs, bs); }, xs)),
        close, "dx");
    expect_close(dgamma.values(),
                 sum_of(dg_before, gradient([&](auto& v) { return reference(xs, v, bs); }, gs)),
                 1e-5, "dgamma");
    if (centred) {
      expect_close(dbeta.values(),
                   sum_of(db_before, gradient([&](auto& v) { return reference(xs, gs, v); }, bs)),
                   1e-5, "dbeta");
    }
    EXPECT_TRUE(x.end_untouched() && y.end_untouched() && stats.end_untouched() &&
                dx.end_untouched() && dgamma.end_untouched());
  }
}

TEST_P(NormTest, LayerNormMatchesItsReference) {
  check_norm(ctx(), dtype(), true, DType::kF32);
  check_norm(ctx(), dtype(), true, dtype());
}

TEST_P(NormTest, RmsNormMatchesItsReference) {
  check_norm(ctx(), dtype(), false, DType::kF32);
  check_norm(ctx(), dtype(), false, dtype());
}

// A call for one result has the bits of a call for all; in place, without a residual, and rounded.
void check_norm_parts(ComputeContext& ctx, DType dtype, DType stream,
                      decltype(layer_norm_backward)& backward, std::int64_t terms) {
  const std::int64_t rows = 7, width = 53;
  const auto any = [&](DType type, const Shape& shape, unsigned seed) {
    return random_operand(type, shape, seed);
  };
  const Operand x = any(stream, {rows, width}, 30), dy = any(dtype, {rows, width}, 31);
  const Operand gamma = any(DType::kF32, {width}, 32);
  const Operand stats(DType::kF32, {rows, terms}, Values(index_of(rows * terms), 0.75));
  const auto run = [&](const NormGradients& wanted) {
    backward(ctx, dy.tensor, x.tensor, gamma.tensor, stats.tensor, wanted);
  };
  const auto dbeta_of = [&](const Operand& dbeta) { return terms == 2 ? dbeta.tensor : Tensor{}; };
  const Operand residual = any(stream, {rows, width}, 33), dx(stream, {rows, width}),
                in_place = any(stream, {rows, width}, 33), bare(stream, {rows, width}),
                zeros(stream, {rows, width}, Values(index_of(rows * width))),
                rounded(DType::kBf16, {rows, width}), expected(DType::kBf16, {rows, width});
  const Operand dgamma = any(DType::kF32, {width}, 34), dbeta = any(DType::kF32, {width}, 35);
  const Operand other = any(DType::kF32, {width}, 34), other_beta = any(DType::kF32, {width}, 35);
  const bool rounds = stream == DType::kF32;
  run({.dx = dx.tensor,
       .residual = residual.tensor,
       .rounded = rounds ? rounded.tensor : Tensor{},
       .dgamma = dgamma.tensor,
       .dbeta = dbeta_of(dbeta)});
  run({.dx = in_place.tensor, .residual = in_place.tensor});
  run({.dgamma = other.tensor, .dbeta = dbeta_of(other_beta)});
  EXPECT_EQ(in_place.values(), dx.values());
  EXPECT_EQ(other.values(), dgamma.values());
  EXPECT_EQ(other_beta.values(), dbeta.values());
  run({.dx = bare.tensor});
  run({.dx = zeros.tensor, .residual = zeros.tensor});
  EXPECT_EQ(bare.values(), zeros.values());
  if (!rounds) return;
  convert(ctx, dx.tensor, expected.tensor);
  EXPECT_EQ(rounded.values(), expected.values());
}

TEST_P(NormTest, ResultsOfABackwardDoNotDependOnWhichAreWanted) {
  for (const DType stream : {DType::kF32, dtype()}) {
    check_norm_parts(ctx(), dtype(), stream, layer_norm_backward, 2);
    check_norm_parts(ctx(), dtype(), stream, rms_norm_backward, 1);
  }
}

}  // namespace
}  // namespace sluice
