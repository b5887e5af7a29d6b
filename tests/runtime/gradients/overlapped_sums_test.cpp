// Sums over replicas on CPUs: they go on while operators run, and stand in the plan where a stage's
// last gradients are final.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <sluice/compute.hpp>
#include <sluice/error.hpp>
#include <sluice/operators.hpp>
#include <sluice/stage.hpp>
#include <sluice/tensor.hpp>

#include "tests/runtime/gradients/sums_cases.hpp"

namespace sluice::testing {
namespace {

void run_operator(ComputeContext& compute) {
  std::array<float, 1> x = {1}, weight = {1}, y = {};
  const auto tensor = [](std::array<float, 1>& values) {
    return Tensor{values.data(), {DType::kF32, Shape{1, 1}}};
  };
  linear_forward(compute, tensor(x), tensor(weight), {}, tensor(y));
}

// Its second parameter has a gradient of two shares, which are joined after backward; each is the
// replica's number. Its last backward finishes the first one, and calls `meanwhile` with it.
class SharedBucketStage : public CopyingStage {
 public:
  SharedBucketStage(int replica, TwoBucketStage::Meanwhile meanwhile)
      : first_(&set_.add("first", Shape{TwoBucketStage::kFloats}, Init::constant(0))),
        second_(&set_.add("second", Shape{TwoBucketStage::kFloats}, Init::constant(0))),
        number_(static_cast<float>(replica + 1)),
        meanwhile_(std::move(meanwhile)) {
    second_->shares = 2;
  }

  void backward(StageContext& ctx, std::span<const Tensor>, std::span<const Tensor>) override {
    for (const Tensor& written :
         {first_->grad, second_->share_grads.front(), second_->share_grads.back()}) {
      std::ranges::fill(written.floats(), number_);
    }
    if (ctx.final_gradients == nullptr) return;
    ctx.final_gradients->from(0);
    meanwhile_(ctx, first_->grad.floats());
  }

 private:
  Parameter *first_, *second_;
  float number_;
  TwoBucketStage::Meanwhile meanwhile_;
};

class OverlappedSumsTest : public ::testing::TestWithParam<int> {
 protected:
  static int replicas() { return GetParam(); }
  static float sum() { return static_cast<float>(replicas() * (replicas() + 1)) / 2; }
};

TEST_P(OverlappedSumsTest, ABucketIsSummedWhileTheBackwardThatFilledItRunsOperators) {
  std::vector<float> seen(static_cast<std::size_t>(replicas()), 0);
  const auto run = [&](bool progress_in_actions) {
    return run_two_buckets(replicas(), "cpu", progress_in_actions,
                           [&](int replica, StageContext& ctx, std::span<const float> second) {
                             ctx.final_gradients->from(TwoBucketStage::kFloats);
                             // The number ends a test that fails.
                             const int most = progress_in_actions ? 50'000'000 : 1000;
                             float& last = seen[static_cast<std::size_t>(replica)];
                             last = second.back();
                             for (int i = 0; i < most && last != sum(); ++i) {
                               run_operator(ctx.compute);
                               last = second.back();
                             }
                           });
  };
  const TwoBuckets inside = run(true);
  for (const float value : seen) EXPECT_EQ(value, sum());
  const TwoBuckets between = run(false);
  for (std::size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i], static_cast<float>(i + 1));
  EXPECT_EQ(inside.norms, between.norms);
  for (const auto* ran : {&inside, &between}) {
    for (const std::string& error : ran->errors) EXPECT_EQ(error, "");
  }
}

TEST_P(OverlappedSumsTest, SharesHoldUpTheirOwnBucketAlone) {
  std::vector<float> seen(static_cast<std::size_t>(replicas()), 0);
  const TwoBuckets shared = run_two_buckets<SharedBucketStage>(
      replicas(), "cpu", true, [&](int replica, StageContext& ctx, std::span<const float> first) {
        float& last = seen[static_cast<std::size_t>(replica)];
        for (int i = 0; i < 50'000'000 && last != sum();
             ++i) {  // the number ends a test that fails
          run_operator(ctx.compute);
          last = first.back();
        }
      });
  for (const float value : seen) EXPECT_EQ(value, sum());
  for (const std::string& error : shared.errors) EXPECT_EQ(error, "");
  const TwoBuckets plain =
      run_two_buckets(replicas(), "cpu", true, [](int, StageContext&, std::span<const float>) {});
  // Gradients of 1 and 2, in place of 1 and 1.
  for (std::size_t i = 0; i < seen.size(); ++i) {
    EXPECT_NEAR(shared.norms[i] / plain.norms[i], std::sqrt(5.0 / 2.0), 1e-6);
  }
}

// Its peers hold a sum that never completes.
TEST_P(OverlappedSumsTest, ARankThatFailsBetweenBucketsEndsAll) {
  const TwoBuckets ran = run_two_buckets(
      replicas(), "cpu", true, [&](int replica, StageContext& ctx, std::span<const float>) {
        ctx.final_gradients->from(TwoBucketStage::kFloats);
        if (replica + 1 == replicas()) throw Error(ErrorCode::kData, "no first bucket today");
      });
  for (const std::string& error : ran.errors) {
    EXPECT_NE(error.find("no first bucket today"), std::string::npos) << error;
  }
}

INSTANTIATE_TEST_SUITE_P(Replicas, OverlappedSumsTest, ::testing::Values(2, 3));

TEST(OverlappedSumsPlanTest, BucketsBesideSharesHaveTheBitsOfOneRank) {
  const TrainingCase what{.name = "shards", .model = small_model(), .micro_batches = 2, .steps = 2};
  for (const char* schedule : {"1f1b", "zb-h1"}) {
    Layout layout{.virtual_replicas = 2, .tensor_shards = 2, .schedule = schedule};
    TrainingOutcome alone;
    run_loopback(1, [&](Communicator& comm) { alone = train(comm, what, layout); });
    layout.replicas = 2;
    for (const std::size_t bytes : {3'000UL, 25'000'000UL}) {  // a part of any layer; all
      layout.bucket_bytes = bytes;
      run_loopback(2, [&](Communicator& comm) {
        const TrainingOutcome both = train(comm, what, layout);
        EXPECT_EQ(alone.norms, both.norms) << schedule << ", " << bytes;
        EXPECT_EQ(alone.digest, both.digest) << schedule << ", " << bytes;
      });
    }
  }
}

TEST(OverlappedSumsPlanTest, TheSumOfOneChunkComesBetweenActionsOfTheOther) {
  expect_sums_between_actions(2, "cpu");
}

}  // namespace
}  // namespace sluice::testing
