// Weight gradients with Write::kOverwrite: over NaN, the values of adding to zeros.
#include <sluice/operators.hpp>

#include "tests/stages/operators/operator_tools.hpp"

namespace sluice {
namespace {

using OverwriteTest = OperatorTest;
SLUICE_OPERATOR_CASES(OverwriteTest);

Operand zeros(const Shape& shape) {
  return {DType::kF32, shape, Values(index_of(shape.elements()), 0)};
}

// No row; one; a part of a block of the matmul, and of two.
constexpr std::int64_t kRows[] = {0, 1, 37, 700};

TEST_P(OverwriteTest, LinearLeavesWhatItAddsToZeros) {
  for (const std::int64_t rows : kRows) {
    for (const bool bias : {false, true}) {
      SCOPED_TRACE(rows);
      const Operand x = random_operand(dtype(), {rows, 37}, 1);
      const Operand dy = random_operand(dtype(), {rows, 45}, 2);
      const Operand added = zeros({45, 37}), added_bias = zeros({45});
      const Operand over(DType::kF32, {45, 37}), over_bias(DType::kF32, {45});
      const auto of = [&](const Operand& each) { return bias ? each.tensor : Tensor{}; };
      linear_backward_weight(ctx(), x.tensor, dy.tensor, added.tensor, of(added_bias));
      linear_backward_weight(ctx(), x.tensor, dy.tensor, over.tensor, of(over_bias),
                             Write::kOverwrite);
      EXPECT_EQ(over.values(), added.values());
      if (bias) {
        EXPECT_EQ(over_bias.values(), added_bias.values());
      }
      EXPECT_TRUE(over.end_untouched() && over_bias.end_untouched());
    }
  }
}

TEST_P(OverwriteTest, NormsLeaveWhatTheyAddToZeros) {
  for (const std::int64_t rows : kRows) {
    SCOPED_TRACE(rows);
    const Operand dy = random_operand(dtype(), {rows, 45}, 1);
    const Operand x = random_operand(DType::kF32, {rows, 45}, 2);
    const Operand stats = random_operand(DType::kF32, {rows, 2}, 3);
    const Operand scale = random_operand(DType::kF32, {rows, 1}, 4);
    const Operand dgamma = zeros({45}), dbeta = zeros({45}), rms = zeros({45});
    const Operand over(DType::kF32, {45}), over_beta(DType::kF32, {45}),
        over_rms(DType::kF32, {45});
    const Operand gamma = random_operand(DType::kF32, {45}, 5);
    const auto layer = [&](const Operand& to, const Operand& beta, Write write) {
      layer_norm_backward(ctx(), dy.tensor, x.tensor, gamma.tensor, stats.tensor,
                          {.dgamma = to.tensor, .dbeta = beta.tensor, .write = write});
    };
    const auto root_mean_square = [&](const Operand& to, Write write) {
      rms_norm_backward(ctx(), dy.tensor, x.tensor, gamma.tensor, scale.tensor,
                        {.dgamma = to.tensor, .write = write});
    };
    layer(dgamma, dbeta, Write::kAdd);
    layer(over, over_beta, Write::kOverwrite);
    root_mean_square(rms, Write::kAdd);
    root_mean_square(over_rms, Write::kOverwrite);
    EXPECT_EQ(over.values(), dgamma.values());
    EXPECT_EQ(over_beta.values(), dbeta.values());
    EXPECT_EQ(over_rms.values(), rms.values());
    EXPECT_TRUE(over.end_untouched() && over_beta.end_untouched() && over_rms.end_untouched());
  }
}

// Tokens and positions that no place has, too.
TEST_P(OverwriteTest, EmbeddingLeavesWhatItAddsToZeros) {
  for (const std::int64_t samples : {0, 1, 3}) {
    SCOPED_TRACE(samples);
    const Values all = {4, 0, 4, 9, 9, 9, 1, 0, 4, 2, 2, 7};
    const Operand tokens(DType::kI32, {samples, 4}, Values(all.begin(), all.begin() + 4 * samples));
    const Operand dout = random_operand(DType::kF32, {4 * samples, 45}, 1);
    const Operand table = zeros({11, 45}), positions = zeros({6, 45});
    const Operand over(DType::kF32, {11, 45}), over_positions(DType::kF32, {6, 45});
    embedding_backward_weight(ctx(), tokens.tensor, dout.tensor, table.tensor, positions.tensor);
    embedding_backward_weight(ctx(), tokens.tensor, dout.tensor, over.tensor, over_positions.tensor,
                              Write::kOverwrite);
    EXPECT_EQ(over.values(), table.values());
    EXPECT_EQ(over_positions.values(), positions.values());
    EXPECT_TRUE(over.end_untouched() && over_positions.end_untouched());
    const Operand alone(DType::kF32, {11, 45});
    embedding_backward_weight(ctx(), tokens.tensor, dout.tensor, alone.tensor, {},
                              Write::kOverwrite);
    EXPECT_EQ(alone.values(), table.values());
  }
}

}  // namespace
}  // namespace sluice
