// Which gradients a replayed call leaves as numbers of the step.
#include "runtime/engine/recorded_calls.hpp"

#include <gtest/gtest.h>

#include <span>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/operators.hpp>
#include <sluice/parameter.hpp>
#include <sluice/stage.hpp>

#include "stages/tensor/stale_gradients.hpp"
#include "tests/gpus/required_gpus.hpp"

namespace sluice::testing {
namespace {

constexpr Device kGpu = {DeviceKind::kCuda, 0};

// Its forward does what a loss does that adds to gradients: it zeroes stale ones, and adds to the
// first. Both are of a stage that asks.
class ZeroingStage : public Stage {
 public:
  explicit ZeroingStage(ComputeContext& compute) : addend_(kGpu, 4 * sizeof(float)) {
    for (const char* name : {"added", "zeroed"}) set_.add(name, {4}, Init::constant(1));
    set_.allocate(compute.memory(), 0);
    for (Parameter* each : set_.all()) each->asks_next_write = true;
    const std::vector<float> ones(4, 1);
    copy_now(kGpu, addend_.data(), ones.data(), addend_.size());
  }
  StageDescription describe(std::span<const TensorSpec>, ComputeContext&) const override {
    return {};
  }
  bool graph_capturable() const override { return true; }
  bool overwrites_gradients() const override { return true; }
  ParameterSet* parameters() override { return &set_; }
  void forward(StageContext& ctx, std::span<const Tensor>, std::span<const Tensor>) override {
    ++calls;
    GradientAccess::zero_stale(set_, ctx.compute.stream());
    const Tensor& grad = set_.find("added")->grad;
    add(ctx.compute, {addend_.data(), grad.spec}, grad);
  }
  void backward(StageContext&, std::span<const Tensor>, std::span<const Tensor>) override {}

  int calls = 0;

 private:
  ParameterSet set_;
  Buffer addend_;
};

std::vector<float> fetch(ComputeContext& compute, const Tensor& tensor) {
  compute.wait();
  std::vector<float> values(static_cast<std::size_t>(tensor.elements()));
  copy_now(kGpu, values.data(), tensor.data, tensor.spec.bytes());
  return values;
}

class RecordedCallsTest : public ::testing::Test {
 protected:
  void SetUp() override { SLUICE_NEED_A_GPU(); }
};

TEST_F(RecordedCallsTest, AReplayLeavesSettledGradientsAsTheCallDoes) {
  ComputeContext compute(kGpu, 1);
  ZeroingStage stage(compute);
  ParameterSet& set = *stage.parameters();
  RecordedCalls calls(compute, 1, /*wanted=*/true);
  StageContext ctx{.compute = compute};
  const auto forward = [&] { stage.forward(ctx, {}, {}); };
  for (std::uint64_t step = 1; step <= 3; ++step) {
    SCOPED_TRACE(step);
    calls.begin_step(step, 1);
    GradientAccess::mark_stale(set, compute.stream());
    calls.run(0, stage, ctx, /*on_host=*/false, forward);
    EXPECT_EQ(fetch(compute, set.find("added")->grad), std::vector<float>(4, 1));
    EXPECT_EQ(fetch(compute, set.find("zeroed")->grad), std::vector<float>(4, 0));
    for (Parameter* each : set.all()) {
      EXPECT_FALSE(each->is_stale()) << each->name;
      EXPECT_EQ(next_write({each}, compute.stream()), Write::kAdd) << each->name;
    }
    if (!calls.begin_recording()) continue;
    GradientAccess::set_stale(set, true);
    calls.record(0, stage, ctx, forward);
    GradientAccess::set_stale(set, false);
  }
  EXPECT_EQ(stage.calls, 2) << "called, then recorded, then replayed";
  ctx.positions = 8;
  GradientAccess::mark_stale(set, compute.stream());
  calls.run(0, stage, ctx, /*on_host=*/false, forward);
  EXPECT_EQ(stage.calls, 3) << "called for other positions than the record's";
}

// The record zeroes gradients that are not stale here.
TEST_F(RecordedCallsTest, ACallIsMadeWhereGradientsAreNotOldThatTheRecordSettles) {
  ComputeContext compute(kGpu, 1);
  ZeroingStage stage(compute);
  ParameterSet& set = *stage.parameters();
  RecordedCalls calls(compute, 1, /*wanted=*/true);
  StageContext ctx{.compute = compute};
  const auto forward = [&] { stage.forward(ctx, {}, {}); };
  calls.begin_step(1, 1);
  GradientAccess::mark_stale(set, compute.stream());
  calls.run(0, stage, ctx, /*on_host=*/false, forward);
  ASSERT_TRUE(calls.begin_recording());
  GradientAccess::set_stale(set, true);
  calls.record(0, stage, ctx, forward);
  GradientAccess::set_stale(set, false);
  calls.run(0, stage, ctx, /*on_host=*/false, forward);
  EXPECT_EQ(fetch(compute, set.find("added")->grad), std::vector<float>(4, 2));
  EXPECT_EQ(stage.calls, 3);
}

}  // namespace
}  // namespace sluice::testing
