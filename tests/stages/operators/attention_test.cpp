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
      const std::int64_t first =
          shape.window == 0 ? 0 : std::max<std::int64_t>(0, i - shape.window + 1);
      for (std::int64_t j = first; j <= i; ++j) {
        double score = 0;
        for (std::int64_t k = 0; k < dim; ++k) score += at(i, head)[k] * at(j, shape.heads + kv)[k];
        p.push_back(std::exp(score / std::sqrt(static_cast<double>(dim))));
        sum += p.back();
      }
      double* to = out.data() + (sample * sequence + i) * shape.heads * dim + head * dim;
      for (std::int64_t j = first; j <= i; ++j) {
        if (!keeps(dropout, (lane * sequence + i) * sequence + j)) continue;
        const double share =
            p[index_of(j - first)] / sum / (1 - static_cast<double>(dropout.probability));
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

// Windows of one position, within a block of 64, of blocks, over several, and of all positions.
TEST_P(AttentionTest, SeesAWindow) {
  for (const int window : {1, 3, 17, 64, 65, 100, 149, 150, 1000}) {
    SCOPED_TRACE(window);
    check(
        ctx(), dtype(),
        {.samples = 1, .sequence = 150, .heads = 2, .kv_heads = 1, .head_dim = 4, .window = window},
        {});
  }
  check(ctx(), dtype(),
        {.samples = 2, .sequence = 11, .heads = 2, .kv_heads = 2, .head_dim = 5, .window = 4}, {});
  const Dropout dropout = {0.25F, {3, random_site(1, 2), 5}, 4321};
  check(ctx(), dtype(),
        {.samples = 2, .sequence = 140, .heads = 2, .kv_heads = 1, .head_dim = 4, .window = 9},
        dropout);
}

TEST_P(AttentionTest, AWindowOfAllPositionsChangesNoBit) {
  AttentionShape shape = {.samples = 1, .sequence = 71, .heads = 2, .kv_heads = 2, .head_dim = 8};
  const Operand qkv = random_operand(dtype(), {shape.rows(), shape.packed_width()}, 3);
  const auto bytes =
      static_cast<std::int64_t>(attention_state_bytes(DeviceKind::kCpu, shape, dtype()));
  std::vector<Values> results;
  for (const int window : {0, 71, 72}) {
    shape.window = window;
    const Operand out(dtype(), {shape.rows(), 16}), dqkv(dtype(), qkv.tensor.shape());
    const Operand state(DType::kU8, {bytes});
    attention_forward(ctx(), shape, qkv.tensor, {}, out.tensor, state.buffer.data());
    attention_backward(ctx(), shape, qkv.tensor, out.tensor, out.tensor, {}, state.buffer.data(),
                       dqkv.tensor);
    results.push_back(sum_of(out.values(), dqkv.values()));
  }
  EXPECT_EQ(results[1], results[0]);
  EXPECT_EQ(results[2], results[0]);
}

// Blocks of 64 positions that no query of a block sees are neither written nor read.
TEST_P(AttentionTest, LeavesOutWhatTheWindowHides) {
  const AttentionShape shape = {
      .samples = 1, .sequence = 256, .heads = 1, .kv_heads = 1, .head_dim = 4, .window = 64};
  const Operand qkv = random_operand(dtype(), {256, 12}, 3), out(dtype(), {256, 4});
  const Operand state(dtype(), {256, 256}), dqkv(dtype(), {256, 12});
  auto* const kept = state.tensor.as<std::byte>();
  attention_forward(ctx(), shape, qkv.tensor, {}, out.tensor, kept);
  attention_backward(ctx(), shape, qkv.tensor, out.tensor, out.tensor, {}, kept, dqkv.tensor);
  const Values p = state.values();
  for (std::int64_t row = 0; row < 256; ++row) {
    for (std::int64_t column = 0; column < 256; ++column) {
      const std::int64_t apart = row / 64 - column / 64;
      ASSERT_EQ(std::isnan(p[index_of(row * 256 + column)]), apart < 0 || apart > 1)
          << row << ", " << column;
    }
  }
  for (const double value : dqkv.values()) ASSERT_TRUE(std::isfinite(value));
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

// As modeling_rope_utils.py of transformers writes it, in wavelengths.
double scaled(double frequency, const RotaryScaling& scaling) {
  if (scaling.kind == RotaryScaling::Kind::kNone) return frequency;
  if (scaling.kind == RotaryScaling::Kind::kLinear) return frequency / scaling.factor;
  const double wavelength = 2 * std::acos(-1.0) / frequency;
  const double low = scaling.low_frequency_factor, high = scaling.high_frequency_factor;
  if (wavelength < scaling.original_context / high) return frequency;
  if (wavelength > scaling.original_context / low) return frequency / scaling.factor;
  const double smooth = (scaling.original_context / wavelength - low) / (high - low);
  return (1 - smooth) * frequency / scaling.factor + smooth * frequency;
}

TEST_P(AttentionTest, RotaryScalesItsFrequencies) {
  using Kind = RotaryScaling::Kind;
  const AttentionShape shape = {
      .samples = 1, .sequence = 40, .heads = 1, .kv_heads = 1, .head_dim = 16};
  const Operand ones(dtype(), {40, 48}, Values(40 * 48, 1));
  for (const RotaryScaling& scaling :
       {RotaryScaling{},
        {.kind = Kind::kLinear, .factor = 2.5F},
        // Wavelengths of 6 to 800: high ones, some between, low ones.
        {.kind = Kind::kLlama3, .factor = 8, .original_context = 200},
        {.kind = Kind::kLlama3,
        .factor = 32,
        .low_frequency_factor = 2,
        .high_frequency_factor = 3,
        .original_context = 64}}) {
    SCOPED_TRACE(static_cast<int>(scaling.kind));
    Values expected(40 * 48, 1);
    for (std::int64_t i = 0; i < 40 * 2 * 8; ++i) {
      const std::int64_t row = i / 16, head = i / 8 % 2, pair = i % 8;
      const double angle = static_cast<double>(row) *
                           scaled(std::pow(260.0, -static_cast<double>(pair) / 8), scaling);
      const std::size_t low = index_of(row * 48 + head * 16 + pair);
      expected[low] = std::cos(angle) - std::sin(angle);
      expected[low + 8] = std::cos(angle) + std::sin(angle);
    }
    const Operand qkv(dtype(), {40, 48}, ones.values());
    rotary(ctx(), shape, {260, scaling}, qkv.tensor, false);
    expect_close(qkv.values(), expected, tolerance(dtype()), "rotated");
  }
}

struct QueryKeyNormCase {
  AttentionShape shape;
  [[nodiscard]] std::int64_t heads() const { return shape.heads + shape.kv_heads; }
  // The packed rows after the norm; gains [2, head_dim].
  [[nodiscard]] Values reference(Values qkv, const Values& gains, double epsilon) const {
    const std::int64_t dim = shape.head_dim;
    for (std::int64_t line = 0; line < shape.rows() * heads(); ++line) {
      const std::int64_t head = line % heads();
      double* const x = qkv.data() + line / heads() * shape.packed_width() + head * dim;
      double square = 0;
      for (std::int64_t i = 0; i < dim; ++i) square += x[i] * x[i] / static_cast<double>(dim);
      const double* const gain = gains.data() + (head < shape.heads ? 0 : dim);
      for (std::int64_t i = 0; i < dim; ++i) x[i] *= gain[i] / std::sqrt(square + epsilon);
    }
    return qkv;
  }
};

TEST_P(AttentionTest, QueryKeyNormMatchesItsReference) {
  constexpr float kEpsilon = 0.02F;
  for (const AttentionShape& shape :
       {AttentionShape{.samples = 2, .sequence = 3, .heads = 4, .kv_heads = 2, .head_dim = 5},
        {.samples = 1, .sequence = 1, .heads = 1, .kv_heads = 1, .head_dim = 1},
        {.samples = 1, .sequence = 2, .heads = 1, .kv_heads = 1, .head_dim = 70},
        {.samples = 2, .sequence = 71, .heads = 1, .kv_heads = 1, .head_dim = 2}}) {
    const QueryKeyNormCase norm{shape};
    const std::int64_t dim = shape.head_dim;
    const Shape packed = {shape.rows(), shape.packed_width()};
    const Operand qkv = random_operand(dtype(), packed, 1),
                  dqkv = random_operand(dtype(), packed, 2);
    const Operand query = random_operand(DType::kF32, {dim}, 3);
    const Operand key = random_operand(DType::kF32, {dim}, 4);
    const Operand raw(dtype(), {shape.rows(), norm.heads() * dim});
    const Operand stats(DType::kF32, {shape.rows(), norm.heads()}), dgains(DType::kF32, {2, dim});
    const Values before = qkv.values(), direction = dqkv.values();
    Values gains = query.values();
    const Values key_gain = key.values();
    gains.insert(gains.end(), key_gain.begin(), key_gain.end());

    query_key_norm_forward(ctx(), shape, qkv.tensor, query.tensor, key.tensor, kEpsilon, raw.tensor,
                           stats.tensor);
    expect_close(qkv.values(), norm.reference(before, gains, kEpsilon), tolerance(dtype()), "y");
    query_key_norm_backward(ctx(), shape, raw.tensor, query.tensor, key.tensor, stats.tensor,
                            dqkv.tensor, dgains.tensor);
    const auto result = [&](const Values& x, const Values& g) {
      return dot(norm.reference(x, g, kEpsilon), direction);
    };
    expect_close(dqkv.values(),
                 numeric_gradient([&](const Values& x) { return result(x, gains); }, before),
                 3 * tolerance(dtype()), "dqkv");
    expect_close(dgains.values(),
                 numeric_gradient([&](const Values& g) { return result(before, g); }, gains),
                 3 * tolerance(dtype()), "dgains");
    for (const Operand* each : {&qkv, &dqkv, &raw, &stats, &dgains}) {
      EXPECT_TRUE(each->end_untouched());
    }
  }
}

TEST(QueryKeyNormTest, ThreadsChangeNoBitOfTheSums) {
  const AttentionShape shape = {
      .samples = 3, .sequence = 77, .heads = 3, .kv_heads = 1, .head_dim = 6};
  const auto gradients = [&](int threads) {
    ComputeContext ctx({}, threads);
    const Shape packed = {shape.rows(), shape.packed_width()};
    const Operand qkv = random_operand(DType::kF32, packed, 1);
    const Operand dqkv = random_operand(DType::kF32, packed, 2);
    const Operand gain = random_operand(DType::kF32, {6}, 3), dgains(DType::kF32, {2, 6});
    const Operand raw(DType::kF32, {shape.rows(), 24}), stats(DType::kF32, {shape.rows(), 4});
    query_key_norm_forward(ctx, shape, qkv.tensor, gain.tensor, gain.tensor, 1e-6F, raw.tensor,
                           stats.tensor);
    query_key_norm_backward(ctx, shape, raw.tensor, gain.tensor, gain.tensor, stats.tensor,
                            dqkv.tensor, dgains.tensor);
    return dgains.values();
  };
  EXPECT_EQ(gradients(3), gradients(1));
}

}  // namespace
}  // namespace sluice
