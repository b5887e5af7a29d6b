// Sums over replicas on CPUs: they go on while operators run, and stand in the plan where a stage's
// last gradients are final.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <span>
#include <string>
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

TEST(OverlappedSumsPlanTest, TheSumOfOneChunkComesBetweenActionsOfTheOther) {
  expect_sums_between_actions(2, "cpu");
}

}  // namespace
}  // namespace sluice::testing
