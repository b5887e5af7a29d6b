#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>

#include "tests/schedules/hand_made.hpp"

namespace sluice {
namespace {

using testing::text_of;

TEST(LowerTest, SendsRightAfterTheProducerAndReceivesRightBeforeTheUser) {
  const Schedule lowered = lower(generate("1f1b", {3, 2, 1}), {});
  EXPECT_EQ(text_of(lowered.ranks[1]),
            "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 "
            "1SEND_B1 1REDUCE_GRAD 1OPTIMIZER");
  EXPECT_EQ(text_of(lowered.ranks[0]),
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0OPTIMIZER");
}

TEST(LowerTest, StagesOfOneRankExchangeNoMessages) {
  const Schedule lowered = lower(testing::v_split(), {});
  EXPECT_EQ(text_of(lowered.ranks[1]),
            "1RECV_F0 1F0 2F0 2SEND_F0 1RECV_F1 1F1 2F1 2SEND_F1 2RECV_B0 2I0 1I0 1SEND_B0 2W0 "
            "1W0 2RECV_B1 2I1 1I1 1SEND_B1 2W1 1W1 1REDUCE_GRAD 2REDUCE_GRAD 1OPTIMIZER");
}

TEST(LowerTest, MessagesOfAnOverlappedPairSurroundIt) {
  LowerOptions options;
  options.keep_pairs = true;
  EXPECT_THAT(text_of(lower(testing::v_overlapped(), options).ranks[1]),
              ::testing::HasSubstr("1RECV_F1 2RECV_B0 (1F1;2B0)OVERLAP_F_B 1B0 1SEND_B0"));
}

TEST(LowerTest, APairIsTwoStepsWithMessagesOfTheirOwn) {
  EXPECT_THAT(text_of(lower(testing::v_overlapped(), {}).ranks[1]),
              ::testing::HasSubstr("1RECV_F1 1F1 2RECV_B0 2B0 1B0 1SEND_B0"));
}

TEST(LowerTest, WhatIsRecomputedComesBeforeTheGradientThatItsBackwardWaitsFor) {
  LowerOptions options;
  options.recomputes = {true, true, false};
  const Schedule lowered = lower(generate("1f1b", {3, 2, 1}), options);
  EXPECT_EQ(text_of(lowered.ranks[0]),
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECOMPUTE0 0RECV_B0 0B0 0RECOMPUTE1 0RECV_B1 0B1 "
            "0REDUCE_GRAD 0OPTIMIZER");
  EXPECT_THAT(text_of(lowered.ranks[2]), ::testing::Not(::testing::HasSubstr("RECOMPUTE")));
  EXPECT_EQ(check(lowered), std::nullopt);
  options.recomputes = {true, true, true, true};
  EXPECT_THAT(text_of(lower(testing::v_split(), options).ranks[1]),
              ::testing::HasSubstr("2RECOMPUTE0 2RECV_B0 2I0 1RECOMPUTE0 1I0 1SEND_B0 2W0"));
  EXPECT_THAT(text_of(lower(testing::v_overlapped(), options).ranks[1]),
              ::testing::HasSubstr("1RECV_F1 1F1 2RECOMPUTE0 2RECV_B0 2B0 1RECOMPUTE0 1B0"));
  options.recomputes = {true};
  EXPECT_THROW((void)lower(testing::v_split(), options), Error);
}

TEST(LowerTest, TiedParametersAreReducedOnEveryRankThatOwnsAUse) {
  LowerOptions options;
  options.tied = {{{0, 2}}, {{1, 2}}};
  const Schedule lowered = lower(generate("gpipe", {3, 1, 1}), options);
  EXPECT_THAT(text_of(lowered.ranks[0]),
              ::testing::EndsWith("0REDUCE_GRAD 0REDUCE_TIED 0OPTIMIZER"));
  EXPECT_THAT(text_of(lowered.ranks[2]),
              ::testing::EndsWith("2REDUCE_GRAD 2REDUCE_TIED 2REDUCE_TIED 2OPTIMIZER"));
}

TEST(LowerTest, SumsBesideComputationStandBehindTheLastActionThatAdds) {
  const Schedule chunks = testing::lower_with_early_sums(testing::interleaved());
  EXPECT_EQ(text_of(chunks.ranks[1]),
            "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 "
            "3B1 3REDUCE_GRAD 3SEND_B1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1REDUCE_GRAD 1SEND_B1 "
            "1OPTIMIZER");
  const Schedule halves = testing::lower_with_early_sums(testing::v_split());
  EXPECT_THAT(text_of(halves.ranks[1]),
              ::testing::EndsWith("2W1 2REDUCE_GRAD 1W1 1REDUCE_GRAD 1OPTIMIZER"));
  // The last action may be one of an overlapped pair.
  const Schedule pairs = testing::lower_with_early_sums(
      testing::hand_made(Placement::v_shape(2), 1, {"0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"}));
  EXPECT_THAT(text_of(pairs.ranks[0]), ::testing::HasSubstr("3B0 3REDUCE_GRAD 3SEND_B0 0RECV_B0"));
}

TEST(LowerTest, EveryStageDecidesForItself) {
  LowerOptions options;
  options.tied = {{{0, 3}}};
  options.overlapped_grad_sums = {true, false, false, true};
  const Schedule lowered = lower(testing::interleaved(), options);
  EXPECT_THAT(text_of(lowered.ranks[0]), ::testing::EndsWith("0B1 0REDUCE_GRAD 2REDUCE_GRAD "
                                                             "0REDUCE_TIED 0OPTIMIZER"));
  EXPECT_THAT(text_of(lowered.ranks[1]),
              ::testing::ContainsRegex("3B1 3REDUCE_GRAD 3SEND_B1 .* 1B1 1SEND_B1 1REDUCE_GRAD "
                                       "3REDUCE_TIED"));
  options.overlapped_grad_sums.pop_back();
  EXPECT_THROW((void)lower(testing::interleaved(), options), Error);
}

TEST(LowerTest, ForwardOnlyAndUnreducedSchedulesEndWithComputeAndMessages) {
  EXPECT_EQ(text_of(lower(generate("forward-only", {2, 1, 1}), {}).ranks[1]), "1RECV_F0 1F0");
  LowerOptions options;
  options.reduce_grad = false;
  EXPECT_EQ(text_of(lower(generate("gpipe", {1, 1, 1}), options).ranks[0]), "0F0 0B0");
}

TEST(LowerTest, RefusesLoweredSchedulesAndIllegalTiedGroups) {
  const Schedule schedule = generate("gpipe", {2, 1, 1});
  EXPECT_THROW((void)lower(lower(schedule, {}), {}), Error);
  for (const TiedStages& group :
       {TiedStages{{}}, TiedStages{{0, 2}}, TiedStages{{1, 0}}, TiedStages{{0, 0}}}) {
    LowerOptions options;
    options.tied = {group};
    EXPECT_THROW((void)lower(schedule, options), Error);
  }
}

}  // namespace
}  // namespace sluice
