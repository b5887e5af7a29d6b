#include "stages/compute/call_arguments.hpp"
#include "stages/compute/internal_operators.hpp"
#include "tests/stages/operators/operator_tools.hpp"

namespace sluice {
namespace {

class LossTest : public OperatorTest {
 protected:
  [[nodiscard]] double entropy_of(const Operand& logits, const Operand& targets, double scale,
                                  bool gradient) {
    double sum = -1;
    softmax_cross_entropy(ctx(), logits.tensor, targets.tensor, scale, gradient, &sum);
    return sum;
  }
};
SLUICE_OPERATOR_CASES(LossTest);
using UpdateTest = OperatorTest;
SLUICE_OPERATOR_CASES(UpdateTest);

double cross_entropy(const Values& logits, const Operand& targets, std::int64_t width) {
  double loss = 0;
  for (std::int64_t row = 0; row < targets.tensor.elements(); ++row) {
    const std::int32_t target = targets.tensor.as<std::int32_t>()[row];
    if (target < 0) continue;
    double sum = 0;
    for (std::int64_t i = 0; i < width; ++i) sum += std::exp(logits[index_of(row * width + i)]);
    loss += std::log(sum) - logits[index_of(row * width + target)];
  }
  return loss;
}

TEST_P(LossTest, CrossEntropyMatchesItsReference) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const std::int64_t width : {2, 16, 37, 256}) {
      const std::int64_t rows = 7;
      const Operand targets(DType::kI32, {rows},
                            {0, 1, -1, static_cast<double>(width - 1), 0, -100, 1});
      const Operand logits = random_operand(dtype, {rows, width}, 1, 4);
      const Values before = logits.values();
      const double expected = cross_entropy(before, targets, width);
      EXPECT_NEAR(entropy_of(logits, targets, 0.25, false), expected, 1e-5 * expected);
      EXPECT_EQ(logits.values(), before);
      EXPECT_NEAR(entropy_of(logits, targets, 0.25, true), expected, 1e-5 * expected);
      expect_close(
          logits.values(),
          numeric_gradient([&](const Values& v) { return 0.25 * cross_entropy(v, targets, width); },
                           before),
          dtype == DType::kF32 ? 4e-6 : 2e-3, "dlogits");  // bf16: rounded once
      EXPECT_TRUE(logits.end_untouched());
    }
  }
}

TEST_P(LossTest, CrossEntropySurvivesLargeLogitsAndShowsNan) {
  const Operand targets(DType::kI32, {2}, {0, 1});
  const Operand large(DType::kF32, {2, 3}, {1e4, -1e4, 0, 3e38, 3e38, -3e38});
  EXPECT_NEAR(entropy_of(large, targets, 1, true), std::log(2.0), 1e-6);
  const Operand broken(DType::kF32, {2, 3}, {1, 2, 3, 1, std::nan(""), 2});
  EXPECT_TRUE(std::isnan(entropy_of(broken, targets, 1, true)));
}

TEST_P(LossTest, SquaredErrorMatchesItsReference) {
  for (const std::int64_t size : {1, 5, 16384, 40000}) {
    const Operand outputs = random_operand(DType::kF32, {size}, 2),
                  targets = random_operand(DType::kF32, {size}, 3);
    const Values y = outputs.values(), t = targets.values();
    double expected = 0;
    Values gradient;
    for (std::size_t i = 0; i < y.size(); ++i) {
      expected += (y[i] - t[i]) * (y[i] - t[i]);
      gradient.push_back(2 * 0.5 * (y[i] - t[i]));
    }
    double sum = -1;
    mean_squared_error(ctx(), outputs.tensor, targets.tensor, 0.5, true, &sum);
    EXPECT_NEAR(sum, expected, 1e-6 * expected);
    expect_close(outputs.values(), gradient, 1e-6, "doutputs");
  }
}

TEST_P(UpdateTest, AdamWMatchesItsReference) {
  const std::int64_t size = 9001;
  const Operand value = random_operand(DType::kF32, {size}, 4),
                grad = random_operand(DType::kF32, {size}, 5);
  const Operand first = random_operand(DType::kF32, {size}, 6),
                second(DType::kF32, {size}, Values(index_of(size), 0.3));
  const AdamWStep step = {.learning_rate = 0.01F,
                          .weight_decay = 0.1F,
                          .correction1 = 0.19F,
                          .correction2 = 0.0975F,
                          .grad_scale = 0.5F};
  Values w = value.values(), m = first.values(), v = second.values();
  const Values g = grad.values();
  for (std::size_t i = 0; i < w.size(); ++i) {
    m[i] = 0.9 * m[i] + 0.1 * 0.5 * g[i];
    v[i] = 0.95 * v[i] + 0.05 * 0.25 * g[i] * g[i];
    w[i] = w[i] * (1 - 0.01 * 0.1) - 0.01 * (m[i] / 0.19) / (std::sqrt(v[i] / 0.0975) + 1e-8);
  }
  const UpdateRun run = {.value = value.tensor.as<float>(),
                         .grad = grad.tensor.as<float>(),
                         .first = first.tensor.as<float>(),
                         .second = second.tensor.as<float>(),
                         .count = size};
  adamw(ctx(), step, {&run, 1});
  expect_close(value.values(), w, 1e-6, "value");
  expect_close(first.values(), m, 1e-6, "first moment");
  expect_close(second.values(), v, 1e-6, "second moment");
  EXPECT_TRUE(value.end_untouched() && first.end_untouched() && second.end_untouched());
}

TEST_P(UpdateTest, SgdMatchesItsReference) {
  const std::int64_t size = 77;
  const Operand value = random_operand(DType::kF32, {size}, 7),
                grad = random_operand(DType::kF32, {size}, 8);
  const Operand velocity = random_operand(DType::kF32, {size}, 9);
  Values w = value.values(), u = velocity.values();
  const Values g = grad.values();
  for (std::size_t i = 0; i < w.size(); ++i) {
    u[i] = 0.9 * u[i] + 2 * g[i] + 0.1 * w[i];
    w[i] -= 0.01 * u[i];
  }
  UpdateRun run = {.value = value.tensor.as<float>(),
                   .grad = grad.tensor.as<float>(),
                   .first = velocity.tensor.as<float>(),
                   .count = size};
  sgd(ctx(), {0.01F, 0.9F, 0.1F, 2}, {&run, 1});
  expect_close(velocity.values(), u, 1e-6, "velocity");
  expect_close(value.values(), w, 1e-6, "value");
  for (std::size_t i = 0; i < w.size(); ++i) w[i] -= 0.5 * g[i];
  run.first = nullptr;
  sgd(ctx(), {0.5F, 0, 0, 1}, {&run, 1});
  expect_close(value.values(), w, 1e-6, "value without momentum");
  run.decay = false;
  for (std::size_t i = 0; i < w.size(); ++i) w[i] -= 0.5 * g[i];
  sgd(ctx(), {0.5F, 0, 0.1F, 1}, {&run, 1});
  expect_close(value.values(), w, 1e-6, "value that does not decay");
}

TEST_P(UpdateTest, SumOfSquaresIsExactToDouble) {
  for (const std::int64_t size : {0, 1, 15, 16384, 50001}) {
    const Operand one = random_operand(DType::kF32, {size}, 10),
                  other = random_operand(DType::kF32, {size / 2}, 11);
    const std::vector<std::span<const float>> vectors = {
        one.tensor.floats(), {}, other.tensor.floats()};
    std::vector<double> expected;
    for (const Values& values : {one.values(), other.values()}) {
      for (std::size_t first = 0; first < values.size(); first += kSumBlock) {
        const auto begin = values.begin() + static_cast<std::ptrdiff_t>(first);
        const Values block(begin, begin + std::min(kSumBlock, values.end() - begin));
        expected.push_back(dot(block, block));
      }
    }
    std::vector<double> sums(expected.size() + 1, -1);
    sums_of_squares(ctx(), vectors, sums.data());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(sums[i], expected[i], 1e-12 * expected[i]) << size << " block " << i;
    }
    EXPECT_EQ(sums.back(), -1) << "a number per block";
  }
}

TEST_P(UpdateTest, SumsOfSquaresOfPartsAreThoseOfTheWholeToTheBit) {
  const Operand values = random_operand(DType::kF32, {50001}, 12);
  const std::span<const float> whole = values.tensor.floats();
  std::vector<double> expected(4), sums(4);
  sums_of_squares(ctx(), {&whole, 1}, expected.data());
  const std::vector<std::span<const float>> parts = {whole.first(kSumBlock),
                                                     whole.subspan(kSumBlock, 2 * kSumBlock),
                                                     {},
                                                     whole.subspan(3 * kSumBlock)};
  sums_of_squares(ctx(), parts, sums.data());
  EXPECT_EQ(sums, expected);
}

}  // namespace
}  // namespace sluice
