// What operators refuse besides operands that do not fit each other: pointers, counts and sizes.
// Also: a check that passes allocates nothing.
#include <gmock/gmock.h>

#include <span>
#include <vector>

#include "comm/base/byte_sums.hpp"
#include "stages/compute/internal_operators.hpp"
#include "tests/allocation_counter.hpp"
#include "tests/stages/operators/operand_tools.hpp"

// The address sanitizer ends a program that asks for too much, unless set to answer as malloc
// does.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(OperandChecksTest, OfNoElementsNeedNoData) {
  ComputeContext ctx(Device{}, 1);
  std::vector<float> weight(12, 1);
  linear_forward(ctx, {nullptr, {kF32, {0, 4}}}, {weight.data(), {kF32, {3, 4}}}, {},
                 {nullptr, {kF32, {0, 3}}});
  double sum = -1;
  softmax_cross_entropy(ctx, {nullptr, {kF32, {0, 5}}}, {nullptr, {kI32, {0}}}, 1.0, true, &sum);
  EXPECT_EQ(sum, 0);
}

TEST(OperandChecksTest, WhoseProductIsNoShapeAreRefused) {
  ComputeContext ctx(Device{}, 1);
  const std::int64_t many = std::int64_t{1} << 50;
  std::vector<float> y(4, 1);
  expect_usage(HasSubstr("y is f32 [1, 4]; legal with x f32 [1125899906842624, 0] and weight f32 "
                         "[1125899906842624, 0]: f32 [1125899906842624, 1125899906842624]"),
               [&] {
                 linear_forward(ctx, {nullptr, {kF32, {many, 0}}}, {nullptr, {kF32, {many, 0}}}, {},
                                {y.data(), {kF32, {1, 4}}});
               });
  EXPECT_EQ(y, std::vector<float>(4, 1));
}

TEST(OperandChecksTest, SumsAndStateMustBeSomewhere) {
  ComputeContext ctx(Device{}, 1);
  const Operands operands({{kF32, {6, 40}}, {kF32, {6, 20}}, {kI32, {6}}});
  const Tensors& at = operands.tensors();
  expect_usage(HasSubstr("attention_forward: state is null; legal: memory of attention_state_"),
               [&] { attention_forward(ctx, kAttention, at[0], {}, at[1], nullptr); });
  expect_usage(
      HasSubstr("attention_backward: state is null; legal: memory of attention_state_"),
      [&] { attention_backward(ctx, kAttention, at[0], at[1], at[1], {}, nullptr, at[0]); });
  expect_usage(HasSubstr("softmax_cross_entropy: sum is null"),
               [&] { softmax_cross_entropy(ctx, at[0], at[2], 1.0, true, nullptr); });
  expect_usage(HasSubstr("row_cross_entropy: losses is null"),
               [&] { row_cross_entropy(ctx, at[0], at[2], 1.0, true, nullptr); });
  double losses[1] = {2}, sum = -1;
  expect_usage(HasSubstr("sum_of_losses: sum is null"),
               [&] { sum_of_losses(ctx, losses, 1, nullptr); });
  expect_usage(HasSubstr("sum_of_losses: losses is null"),
               [&] { sum_of_losses(ctx, nullptr, 1, &sum); });
  sum_of_losses(ctx, nullptr, 0, &sum);
  EXPECT_EQ(sum, 0);
  expect_usage(HasSubstr("mean_squared_error: sum is null"),
               [&] { mean_squared_error(ctx, at[0], at[0], 1.0, true, nullptr); });
  EXPECT_TRUE(operands.untouched());
}

TEST(OperandChecksTest, SumsOverShardsNeedAllOfTheirShards) {
  ComputeContext ctx(Device{}, 1);
  const Operands operands({{kF32, {2, 5}}, {kF32, {3, 5}}, {kF32, {2, 3}}, {kF32, {3}}});
  const Tensors& at = operands.tensors();
  const std::int64_t sizes[] = {2, 0, 2};
  expect_usage(HasSubstr("sum_of_shards: x f32 [2, 5] and weight f32 [3, 5] with y f32 [2, 3]; "
                         "legal: 4 columns in all, of one type, with data"),
               [&] { sum_of_shards(ctx, at[0], at[1], sizes, false, {}, {}, at[2]); });
  expect_usage(HasSubstr("sum_of_shards: bias is f32 [2, 3]; legal with y f32 [2, 3]: f32 [3]"),
               [&] { sum_of_shards(ctx, at[0], at[1], sizes, false, at[2], {}, at[2]); });
  expect_usage(HasSubstr("finish_sum: y is f32 [2, 5]; legal with sum f32 [2, 3]"),
               [&] { finish_sum(ctx, at[2], at[3], {}, at[0]); });
  EXPECT_TRUE(operands.untouched());
}

TEST(OperandChecksTest, OfAttentionWithoutAShapeAreRefused) {
  ComputeContext ctx(Device{}, 1);
  AttentionShape uneven = kAttention, headless = kAttention, behind = kAttention,
                 outside = kAttention;
  uneven.kv_heads = 3;
  headless.kv_heads = 0;
  behind.window = -1;
  outside.first_head = 1;
  outside.all_heads = outside.heads;
  for (const AttentionShape& shape : {uneven, headless, behind, outside}) {
    const auto message = AllOf(HasSubstr(": shape of "), HasSubstr(" heads over "),
                               HasSubstr("; legal: heads that are a multiple"));
    expect_usage(message, [&] { attention_forward(ctx, shape, {}, {}, {}, nullptr); });
    expect_usage(message, [&] { attention_backward(ctx, shape, {}, {}, {}, {}, nullptr, {}); });
    expect_usage(message, [&] { rotary(ctx, shape, {100}, {}, false); });
    expect_usage(message, [&] { query_key_norm_forward(ctx, shape, {}, {}, {}, 1, {}, {}); });
    expect_usage(message, [&] { query_key_norm_backward(ctx, shape, {}, {}, {}, {}, {}, {}); });
    expect_usage(message, [&] { (void)query_key_norm_backward_workspace(ctx, shape); });
    expect_usage(message, [&] { (void)attention_state_bytes(DeviceKind::kCpu, shape, kF32); });
    expect_usage(message, [&] { (void)attention_engine(ctx, shape, kF32, false); });
    expect_usage(message, [&] { (void)attention_forward_workspace(ctx, shape, kF32, false); });
    expect_usage(message, [&] { (void)attention_backward_workspace(ctx, shape, kF32, false); });
  }
}

TEST(OperandChecksTest, StateThatNoMemoryHasDoesNotWrap) {
  AttentionShape shape = kAttention;
  shape.samples = shape.sequence = std::int64_t{1} << 31;
  EXPECT_EQ(attention_state_bytes(DeviceKind::kCpu, shape, kF32), kTooManyBytes);
  shape.samples = 0;
  EXPECT_EQ(attention_state_bytes(DeviceKind::kCpu, shape, kF32), 0U);
}

TEST(OperandChecksTest, OfAnUpdateAreGiven) {
  ComputeContext ctx(Device{}, 1);
  std::vector<float> v(4, 1);
  const UpdateRun right = {v.data(), v.data(), v.data(), v.data(), 4};
  UpdateRun without_grad = right, without_second = right, without_state = right;
  without_grad.grad = nullptr;
  without_second.second = nullptr;
  without_state.first = without_state.second = nullptr;
  const auto refused = [&](const UpdateRun& wrong, bool by_sgd) {
    const UpdateRun runs[] = {right, wrong};
    expect_usage(HasSubstr("adamw: run 1 has a null pointer; legal: memory for value, grad, first, "
                           "second"),
                 [&] { adamw(ctx, {}, runs); });
    if (!by_sgd) return;
    expect_usage(HasSubstr("sgd: run 1 has a null pointer; legal: memory for value, grad, first"),
                 [&] { sgd(ctx, {.momentum = 0.9F}, runs); });
  };
  refused(without_grad, true);
  refused(without_second, false);
  refused(without_state, true);
  EXPECT_EQ(v, std::vector<float>(4, 1));
  sgd(ctx, {}, {&without_state, 1});  // no momentum, no velocity
  const UpdateRun empty;
  adamw(ctx, {}, {&empty, 1});
  const std::span<const float> none;
  const std::span<const float> some(v);
  expect_usage(HasSubstr("sums_of_squares: sums is null; legal: a number per block"), [&] {
    sums_of_squares(ctx, {&some, 1}, nullptr);
  });
  sums_of_squares(ctx, {}, nullptr);
  sums_of_squares(ctx, {&none, 1}, nullptr);
  const std::span<const float> nowhere(static_cast<const float*>(nullptr), 3);
  double sum = -1;
  expect_usage(HasSubstr("sums_of_squares: a vector is null; legal: memory for its numbers"), [&] {
    sums_of_squares(ctx, {&nowhere, 1}, &sum);
  });
  EXPECT_EQ(sum, -1);
}

TEST(OperandChecksTest, RotaryTablesHaveSizesThatCanBeCounted) {
  ComputeContext ctx(Device{}, 1);
  expect_usage(HasSubstr("more than 2^60 elements"),
               [&] { (void)ctx.rotary_table(std::int64_t{1} << 61, 4, {}); });
  expect_usage(HasSubstr("a dimension of -1"), [&] { (void)ctx.rotary_table(-1, 4, {}); });
  EXPECT_THROW((void)ctx.rotary_table(std::int64_t{1} << 56, 4, {}), OutOfMemory);
  EXPECT_EQ(ComputeContext::rotary_table_bytes(5, 6), 5 * 3 * 3 * sizeof(float));
  EXPECT_EQ(*ctx.rotary_table(2, 4, {}), 1.0F) << "after a refusal";
}

TEST(OperandChecksTest, ThatPassAllocateNothing) {
  ComputeContext ctx(Device{}, 1);
  const Operands memory({{kF32, {16, 10}}, {kF32, {16}}, {kF32, {2, 16}}});
  const Tensor &weight = memory.tensors()[0], &bias = memory.tensors()[1];
  const Tensor& y = memory.tensors()[2];
  const Tensor no_x = {nullptr, {kF32, {0, 10}}}, no_y = {nullptr, {kF32, {0, 16}}};
  const std::size_t before = sluice::testing::allocations_of_this_thread();
  linear_forward(ctx, no_x, weight, bias, no_y);  // without rows the backend has nothing to do
  pointwise_backward(ctx, Pointwise::kRelu, y, y, y);
  const std::size_t after = sluice::testing::allocations_of_this_thread();
  EXPECT_EQ(after, before);
}

}  // namespace
}  // namespace sluice
