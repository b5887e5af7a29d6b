#include "tests/stages/operators/operator_tools.hpp"

namespace sluice {
namespace {

using AttentionTest = OperatorTest;
SLUICE_OPERATOR_CASES(AttentionTest);

bool keeps(const Dropout& dropout, std::int64_t element) {
  const std::uint64_t at = dropout.first_element + static_cast<std::uint64_t>(element);
  return dropout.probability == 0 ||
         to_unit(philox(dropout.key, 0, at / 4)[at % 4]) >= dropout.probability;
}

Values reference(const AttentionShape& shape, const Dropout& dropout, const Values& qkv) {
  const std::int64_t packed = shape.packed_width(), dim = shape.head_dim, sequence = shape.sequence;
  Values out(index_of(shape.rows() * shape.heads * dim));
  for (std::int64_t lane = 0; lane < shape.samples * shape.heads; ++lane) {
    const std::int64_t sample = lane / shape.heads, head = lane % shape.heads;
    const std::int64_t kv = head / (shape.heads / shape.kv_heads);
    const auto at = [&](std::int64_t row, std::int64_t column) {
      return qkv.data() + (sample * sequence + row) * packed + column * dim;
    };
    for (std::int64_t i = 0; i < sequence; ++i) {
      Values p;
      double sum = 0;
      for (std::int64_t j = 0; j <= i; ++j) {
        double score = 0;
        for (std::int64_t k = 0; k < dim; ++k) score += at(i, head)[k] * at(j, shape.heads + kv)[k];
        p.push_back(std::exp(score / std::sqrt(static_cast<double>(dim))));
        sum += p.back();
      }
      double* to = out.data() + (sample * sequence + i) * shape.heads * dim + head * dim;
      for (std::int64_t j = 0; j <= i; ++j) {
        if (!keeps(dropout, (lane * sequence + i) * sequence + j)) continue;
        const double share = p[index_of(j)] / sum / (1 - static_cast<double>(dropout.probability));
        for (std::int64_t k = 0; k < dim; ++k)
          to[k] += share * at(j, shape.heads + shape.kv_heads + kv)[k];
      }
    }
  }
  return out;
}

// Directional derivatives: d/dt of dot(reference(qkv + t v), dout) is dot(dqkv, v).
void check(ComputeContext& ctx, DType dtype, const AttentionShape& shape, const Dropout& dropout) {
  const Shape packed = {shape.rows(), shape.packed_width()};
  const Shape width = {shape.rows(), static_cast<std::int64_t>(shape.heads) * shape.head_dim};
  const Operand qkv = random_operand(dtype, packed, 1, 1.5), dout = random_operand(dtype, width, 2);
  const Operand out(dtype, width), dqkv(dtype, packed);
  const auto bytes =
      static_cast<std::int64_t>(attention_state_bytes(DeviceKind::kCpu, shape, dtype));
  const Operand state(DType::kU8, {bytes});
  attention_forward(ctx, shape, qkv.tensor, dropout, out.tensor, state.buffer.data());
  const Values in = qkv.values(), direction = dout.values();
  expect_close(out.values(), reference(shape, dropout, in), tolerance(dtype), "out");
  attention_backward(ctx, shape, qkv.tensor, out.tensor, dout.tensor, dropout, state.buffer.data(),
                     dqkv.tensor);
  EXPECT_TRUE(out.end_untouched() && dqkv.end_untouched() && state.end_untouched());
  const Values gradient = dqkv.values();
  double scale = 0;
  for (const double value : gradient) scale = std::max(scale, std::abs(value));
  ASSERT_TRUE(std::isfinite(scale));
  if (in.size() < 600) {
    expect_close(
        gradient,
        numeric_gradient(
            [&](const Values& v) { return dot(reference(shape, dropout, v), direction); }, in),
        3 * tolerance(dtype), "dqkv");
  }
  for (unsigned seed = 10; seed < 16; ++seed) {
    Values along = random_values(static_cast<std::int64_t>(in.size()), seed, DType::kF32);
    // Each direction moves queries, keys and values of one head only, so that none is hidden.
    const std::int64_t columns = shape.heads + 2 * shape.kv_heads;
    for (std::size_t i = 0; i < along.size(); ++i) {
      const auto column = static_cast<std::int64_t>(i) / shape.head_dim % columns;
      if (column != static_cast<std::int64_t>(seed * 7) % columns) along[i] = 0;
    }
    const auto moved = [&](double t) {
      Values v = in;
      for (std::size_t i = 0; i < v.size(); ++i) v[i] += t * along[i];
      return dot(reference(shape, dropout, v), direction);
    };
    const double expected = (moved(1e-5) - moved(-1e-5)) / 2e-5;
    const double size = std::sqrt(dot(along, along)) * scale;
    EXPECT_NEAR(dot(gradient, along), expected, 3 * tolerance(dtype) * size)
        << "direction " << seed;
  }
}

TEST_P(AttentionTest, MatchesItsReference) {
  check(ctx(), dtype(), {.samples = 2, .sequence = 9, .heads = 2, .kv_heads = 2, .head_dim = 5},
        {});
  check(ctx(), dtype(), {.samples = 2, .sequence = 64, .heads = 2, .kv_heads = 2, .head_dim = 16},
        {});
  check(ctx(), dtype(), {.samples = 1, .sequence = 1, .heads = 1, .kv_heads = 1, .head_dim = 8},
        {});
}

TEST_P(AttentionTest, MatchesItsReferenceAcrossBlocks) {
  check(ctx(), dtype(), {.samples = 2, .sequence = 150, .heads = 3, .kv_heads = 3, .head_dim = 8},
        {});
}

TEST_P(AttentionTest, SharesKeysBetweenGroupsOfQueries) {
  check(ctx(), dtype(), {.samples = 1, .sequence = 10, .heads = 4, .kv_heads = 2, .head_dim = 6},
        {});
  check(ctx(), dtype(), {.samples = 2, .sequence = 79, .heads = 6, .kv_heads = 2, .head_dim = 8},
        {});
}

TEST_P(AttentionTest, DropsProbabilitiesByTheirGlobalIndex) {
  const Dropout dropout = {0.25F, {3, random_site(1, 2), 5}, 4321};
  check(ctx(), dtype(), {.samples = 2, .sequence = 13, .heads = 2, .kv_heads = 1, .head_dim = 4},
        dropout);
  check(ctx(), dtype(), {.samples = 2, .sequence = 70, .heads = 2, .kv_heads = 2, .head_dim = 8},
        dropout);
}

TEST_P(AttentionTest, ASampleDoesNotDependOnItsNeighbours) {
  const AttentionShape pair = {
      .samples = 2, .sequence = 71, .heads = 2, .kv_heads = 2, .head_dim = 8};
  AttentionShape one = pair;
  one.samples = 1;
  const Operand qkv = random_operand(dtype(), {pair.rows(), pair.packed_width()}, 3);
  const Operand both(dtype(), {pair.rows(), 16}), second(dtype(), {one.rows(), 16});
  const Operand state(
      DType::kU8,
      {static_cast<std::int64_t>(attention_state_bytes(DeviceKind::kCpu, pair, dtype()))});
  Dropout dropout = {0.5F, {1, 2, 3}, 0};
  attention_forward(ctx(), pair, qkv.tensor, dropout, both.tensor, state.buffer.data());
  const auto offset = static_cast<std::ptrdiff_t>(qkv.tensor.spec.bytes() / 2);
  const Tensor half = {qkv.tensor.as<std::byte>() + offset,
                       {dtype(), {one.rows(), one.packed_width()}}};
  dropout.first_element = 2 * 71 * 71;
  attention_forward(ctx(), one, half, dropout, second.tensor, state.buffer.data());
  const Values all = both.values();
  EXPECT_EQ(second.values(), Values(all.begin() + 71 * 16, all.end()));
}

TEST_P(AttentionTest, RotaryTurnsPairsByTheirPosition) {
  const AttentionShape shape = {
      .samples = 2, .sequence = 5, .heads = 2, .kv_heads = 1, .head_dim = 6};
  const Operand qkv = random_operand(dtype(), {shape.rows(), shape.packed_width()}, 4);
  const Values before = qkv.values();
  Values expected = before;
  for (std::int64_t row = 0; row < shape.rows(); ++row) {
    for (std::int64_t head = 0; head < 3; ++head) {
      for (std::int64_t i = 0; i < 3; ++i) {
        const double angle =
            static_cast<double>(row % 5) * std::pow(100.0, -2.0 * static_cast<double>(i) / 6);
        const std::size_t low = index_of(row * 24 + head * 6 + i), high = low + 3;
        expected[low] = before[low] * std::cos(angle) - before[high] * std::sin(angle);
        expected[high] = before[high] * std::cos(angle) + before[low] * std::sin(angle);
      }
    }
  }
  rotary(ctx(), shape, {100}, qkv.tensor, false);
  expect_close(qkv.values(), expected, tolerance(dtype()), "rotated");
  rotary(ctx(), shape, {100}, qkv.tensor, true);
  expect_close(qkv.values(), before, tolerance(dtype()), "rotated back");
}

}  // namespace
}  // namespace sluice
