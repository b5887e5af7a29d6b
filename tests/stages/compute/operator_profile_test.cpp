// On a CPU; with SLUICE_ON_A_GPU on a GPU or its emulation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/operators.hpp>

#include "stages/compute/internal_operators.hpp"
#include "tests/gpus/required_gpus.hpp"

namespace sluice {
namespace {

using ::testing::IsEmpty;

#ifdef SLUICE_ON_A_GPU
constexpr DeviceKind kKind = DeviceKind::kCuda;
#else
constexpr DeviceKind kKind = DeviceKind::kCpu;
#endif

class OperatorProfileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (kKind == DeviceKind::kCuda) {
      SLUICE_NEED_A_GPU();
    }
  }
  Tensor make(ComputeContext& ctx, const TensorSpec& spec) {
    Buffer& buffer = memory_.emplace_back(ctx.memory().allocate(spec.bytes()));
    fill_zero_async(buffer.data(), spec.bytes(), ctx.stream());
    return {buffer.data(), spec};
  }

 private:
  std::vector<Buffer> memory_;
};

TEST_F(OperatorProfileTest, CountsCallsBytesAndOperations) {
  ComputeContext ctx({kKind, 0}, 1);
  const Tensor x = make(ctx, {DType::kF32, {6, 32}}), y = make(ctx, {DType::kF32, {6, 16}});
  const Tensor weight = make(ctx, {DType::kF32, {16, 32}});
  linear_forward(ctx, x, weight, {}, y);
  EXPECT_THAT(ctx.operator_times(), IsEmpty());

  constexpr int kCalls = 2100;  // more than are measured at once on a GPU
  ctx.profile_operators(true);
  linear_forward(ctx, x, weight, {}, y);
  for (int i = 0; i < kCalls; ++i) add(ctx, x, x);
  const std::vector<OperatorTime> times = ctx.operator_times();
  ASSERT_EQ(times.size(), 2U);
  for (const OperatorTime& each : times) {
    EXPECT_GE(each.seconds, 0);
    if (each.name == "add") {
      EXPECT_EQ(each.calls, kCalls);
      EXPECT_EQ(each.bytes, kCalls * 3.0 * 6 * 32 * 4);  // y is read and written
      EXPECT_EQ(each.flops, 0);
    } else {
      EXPECT_EQ(each.name, "linear_forward");
      EXPECT_EQ(each.calls, 1);
      EXPECT_EQ(each.bytes, (6.0 * 32 + 6 * 16 + 16 * 32) * 4);
      EXPECT_EQ(each.flops, 2.0 * 6 * 32 * 16);
    }
  }
  EXPECT_GE(times[0].seconds, times[1].seconds);

  ctx.profile_operators(true);  // anew
  EXPECT_THAT(ctx.operator_times(), IsEmpty());
  ctx.profile_operators(false);
  add(ctx, x, x);
  EXPECT_THAT(ctx.operator_times(), IsEmpty());
}

// The bytes of what `call` does, which is one operator's but for sums.
double bytes_of(ComputeContext& ctx, const std::function<void()>& call) {
  ctx.profile_operators(true);
  call();
  double bytes = 0;
  for (const OperatorTime& each : ctx.operator_times()) {
    if (each.name != "sum_of_losses") bytes += each.bytes;
  }
  return bytes;
}

// What a perfect kernel moves: what is read and written counts twice, what is not touched does not.
TEST_F(OperatorProfileTest, CountsWhatIsReadAndWrittenTwice) {
  ComputeContext ctx({kKind, 0}, 1);
  constexpr int kRows = 8, kWidth = 16, kTable = 24;
  const Tensor logits = make(ctx, {DType::kBf16, {kRows, kTable}});
  const Tensor targets = make(ctx, {DType::kI32, {kRows}});
  const Tensor sum = make(ctx, {DType::kF32, {2}});
  for (const bool gradient : {false, true}) {
    EXPECT_EQ(bytes_of(ctx,
                       [&] {
                         softmax_cross_entropy(ctx, logits, targets, 1.0, gradient,
                                               static_cast<double*>(sum.data));
                       }),
              kRows * kTable * (gradient ? 4 : 2) + kRows * 4);
  }

  const Tensor x = make(ctx, {DType::kF32, {kRows, kWidth}});
  const Tensor table = make(ctx, {DType::kF32, {kTable, kWidth}});
  const Tensor dy = make(ctx, {DType::kF32, {kRows, kTable}});
  const Tensor tokens = make(ctx, {DType::kI32, {2, kRows / 2}});
  constexpr double kX = 4.0 * kRows * kWidth, kWhole = 4.0 * kTable * kWidth;
  for (const Write write : {Write::kAdd, Write::kOverwrite}) {
    const bool adds = write == Write::kAdd;
    EXPECT_EQ(bytes_of(ctx, [&] { linear_backward_weight(ctx, x, dy, table, {}, write); }),
              kX + 4.0 * kRows * kTable + (adds ? 2 : 1) * kWhole);
    EXPECT_EQ(bytes_of(ctx, [&] { embedding_backward_weight(ctx, tokens, x, table, {}, write); }),
              4.0 * kRows + kX + (adds ? 2 * kX : kWhole));
  }
  EXPECT_EQ(bytes_of(ctx, [&] { embedding_forward(ctx, tokens, table, {}, x); }),
            4.0 * kRows + kX + kX);
}

// A value, its gradient and two moments; with a copy in bf16.
TEST_F(OperatorProfileTest, CountsAnUpdatesBytes) {
  ComputeContext ctx({kKind, 0}, 1);
  constexpr std::int64_t kCount = 64;
  const auto vector = [&] { return make(ctx, {DType::kF32, {kCount}}).as<float>(); };
  UpdateRun run{
      .value = vector(), .grad = vector(), .first = vector(), .second = vector(), .count = kCount};
  run.bf16_copy = reinterpret_cast<Bf16*>(vector());
  for (const DType moments : {DType::kF32, DType::kBf16}) {
    const AdamWStep step{.moments = moments};
    EXPECT_EQ(bytes_of(ctx,
                       [&] {
                         adamw(ctx, step, {&run, 1});
                       }),
              kCount * (moments == DType::kF32 ? 30 : 22));
  }
}

// Pairs of a query and a key that it sees: a causal half, or a band.
TEST_F(OperatorProfileTest, CountsThePairsThatAttentionSees) {
  ComputeContext ctx({kKind, 0}, 1);
  AttentionShape shape{
      .samples = 2, .sequence = 40, .heads = 2, .kv_heads = 1, .head_dim = 16, .window = 0};
  const Tensor qkv = make(ctx, {DType::kF32, {80, shape.packed_width()}});
  const Tensor out = make(ctx, {DType::kF32, {80, 32}});
  for (const int window : {0, 10}) {
    shape.window = window;
    const Tensor state =
        make(ctx, {DType::kU8,
                   {static_cast<std::int64_t>(attention_state_bytes(kKind, shape, DType::kF32))}});
    ctx.profile_operators(true);
    attention_forward(ctx, shape, qkv, {}, out, static_cast<std::byte*>(state.data));
    const double pairs = window == 0 ? 40 * 40 / 2.0 : 40 * 10 - 10 * 10 / 2.0;
    const std::vector<OperatorTime> times = ctx.operator_times();
    ASSERT_EQ(times.size(), 1U);
    EXPECT_EQ(times[0].flops, 2.0 * 2 * 2 * pairs * 2 * 16) << window;
  }
}

}  // namespace
}  // namespace sluice
