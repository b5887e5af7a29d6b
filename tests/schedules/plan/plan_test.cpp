#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>

#include "tests/schedules/hand_made.hpp"

namespace sluice {
namespace {

using testing::plan_of;

int pool_count(const Plan& plan, int stage, BufferKind kind) {
  for (const RankPlan& rank : plan.ranks) {
    for (const BufferPool& pool : rank.pools) {
      if (pool.stage == stage && pool.kind == kind) return pool.count;
    }
  }
  return 0;
}

std::string text_of(const RankPlan& rank) {
  std::string text;
  for (const PlanOp& op : rank.ops) text += to_string(op) + '\n';
  return text;
}

TEST(PlanTest, ListsEveryPostWaitSendAndReleaseInOrder) {
  const Plan plan = plan_of(generate("1f1b", {2, 3, 1}), {}, {1, 1});
  EXPECT_EQ(text_of(plan.ranks[1]),
            "post 1RECV_F0 channel 0 input[0]\n"
            "post 1RECV_F1 channel 0 input[1]\n"
            "wait 1RECV_F0 channel 0 input[0]\n"
            "compute 1F0 input[0] output[0] state[0]\n"
            "compute 1B0 input[0] output[0] grad-input[0] state[0]\n"
            "send 1SEND_B0 channel 1 grad-input[0]\n"
            "release 1B0 input[0] output[0] state[0]\n"
            "post 1RECV_F2 channel 0 input[0]\n"
            "wait 1RECV_F1 channel 0 input[1]\n"
            "compute 1F1 input[1] output[0] state[0]\n"
            "wait-sent 1SEND_B0 channel 1 grad-input[0]\n"
            "compute 1B1 input[1] output[0] grad-input[0] state[0]\n"
            "send 1SEND_B1 channel 1 grad-input[0]\n"
            "release 1B1 input[1] output[0] state[0]\n"
            "wait 1RECV_F2 channel 0 input[0]\n"
            "compute 1F2 input[0] output[0] state[0]\n"
            "wait-sent 1SEND_B1 channel 1 grad-input[0]\n"
            "compute 1B2 input[0] output[0] grad-input[0] state[0]\n"
            "send 1SEND_B2 channel 1 grad-input[0]\n"
            "release 1B2 input[0] output[0] state[0]\n"
            "wait-sent 1SEND_B2 channel 1 grad-input[0]\n"
            "reduce-grad 1REDUCE_GRAD\n"
            "optimizer 1OPTIMIZER\n");
}

TEST(PlanTest, ASumBesideComputationWaitsForNoSend) {
  const Plan plan = testing::plan_with_early_sums(testing::interleaved());
  EXPECT_THAT(text_of(plan.ranks[1]),
              ::testing::HasSubstr("compute 3B1 input[1] output[0] grad-input[1] state[0]\n"
                                   "release 3B1 input[1] output[0] state[0]\n"
                                   "reduce-grad 3REDUCE_GRAD\n"
                                   "send 3SEND_B1 "));
  EXPECT_THAT(text_of(plan.ranks[1]), ::testing::HasSubstr("reduce-grad 1REDUCE_GRAD\n"
                                                           "send 1SEND_B1 channel 1 grad-input[1]\n"
                                                           "wait-sent 1SEND_F0 "));
  // In the order of NCCL's queues what is sent at that time goes first: another rank waits for it.
  const Plan queued =
      testing::plan_with_early_sums(testing::interleaved(), {1, 2, MessageOrder::kGlobal});
  EXPECT_THAT(text_of(queued.ranks[1]),
              ::testing::ContainsRegex("compute 3B1 [^\n]*\nrelease [^\n]*\nsend 3SEND_B1 "
                                       "[^\n]*\nreduce-grad 3REDUCE_GRAD\n"));
}

TEST(PlanTest, InputPoolsHoldWhatIsInFlightAndTheReceivesAhead) {
  for (const int ahead : {0, 1, 3}) {
    for (const int m : {1, 3, 12}) {
      const Plan plan = plan_of(generate("1f1b", {4, m, 1}), {}, {ahead, 2});
      for (int stage = 1; stage < 4; ++stage) {
        EXPECT_EQ(pool_count(plan, stage, BufferKind::kInput),
                  std::min(std::min(4 - stage, m) + ahead, m));
        EXPECT_EQ(pool_count(plan, stage - 1, BufferKind::kGradOutput), std::min(1 + ahead, m));
        EXPECT_EQ(pool_count(plan, stage, BufferKind::kState), std::min(4 - stage, m));
        EXPECT_EQ(pool_count(plan, stage, BufferKind::kGradInput), std::min(2, m));
      }
      EXPECT_EQ(pool_count(plan, 0, BufferKind::kInput), 0);
      EXPECT_EQ(pool_count(plan, 3, BufferKind::kGradOutput), 0);
      EXPECT_EQ(pool_count(plan, 3, BufferKind::kOutput), 1);
    }
  }
}

TEST(PlanTest, ForwardOnlyHoldsNoStateBeyondOneForwardAndNoGradients) {
  const Plan plan = plan_of(generate("forward-only", {3, 9, 1}));
  EXPECT_EQ(pool_count(plan, 1, BufferKind::kState), 1);
  EXPECT_EQ(pool_count(plan, 1, BufferKind::kInput), 2);
  EXPECT_EQ(pool_count(plan, 1, BufferKind::kGradOutput), 0);
  EXPECT_EQ(pool_count(plan, 1, BufferKind::kGradInput), 0);
  EXPECT_EQ(plan.channels.size(), 2U);
  EXPECT_EQ(testing::count(plan, OpKind::kOptimizer), 0);
}

TEST(PlanTest, StagesOfOneRankWriteIntoEachOthersPools) {
  const Plan plan = plan_of(testing::v_split());
  EXPECT_EQ(pool_count(plan, 1, BufferKind::kOutput), 0);
  EXPECT_EQ(pool_count(plan, 2, BufferKind::kGradInput), 0);
  EXPECT_EQ(pool_count(plan, 2, BufferKind::kInput), 2);
  EXPECT_EQ(pool_count(plan, 1, BufferKind::kGradOutput), 1);
  EXPECT_EQ(pool_count(plan, 0, BufferKind::kOutput), 2);
  EXPECT_THAT(text_of(plan.ranks[1]),
              ::testing::HasSubstr("compute 1F0 input[0] output[0] state[0]\n"
                                   "compute 2F0 input[0] output[0] state[0]\n"));
}

TEST(PlanTest, WeightHalfReleasesWhatBothHalvesRead) {
  const Plan plan = plan_of(testing::v_split());
  EXPECT_THAT(text_of(plan.ranks[0]),
              ::testing::HasSubstr("compute 3W0 input[0] output[0] state[0]\n"
                                   "release 3W0 input[0] output[0] state[0]\n"));
}

TEST(PlanTest, TagsCountTheChannelsOfAnOrderedRankPair) {
  const Plan plan = plan_of(testing::interleaved());
  ASSERT_EQ(plan.channels.size(), 6U);
  std::vector<std::vector<int>> tags(2);
  for (const Channel& channel : plan.channels) {
    tags[static_cast<std::size_t>(channel.from_rank)].push_back(channel.tag);
  }
  EXPECT_THAT(tags[0], ::testing::ElementsAre(0, 1, 2));
  EXPECT_THAT(tags[1], ::testing::ElementsAre(0, 1, 2));
}

TEST(PlanTest, ReceivesArePostedInTheSendersOrder) {
  const Plan plan = plan_of(generate("gpipe-lifo", {2, 3, 1}));
  std::vector<int> posted;
  for (const PlanOp& op : plan.ranks[0].ops) {
    if (op.kind == OpKind::kPostRecv) posted.push_back(op.micro_batch);
  }
  EXPECT_THAT(posted, ::testing::ElementsAre(2, 1, 0));
}

TEST(PlanTest, PoolIsCountedInTheSendersOrder) {
  const Plan plan = plan_of(generate("gpipe-lifo", {2, 5, 1}), {}, {0, 2});
  EXPECT_EQ(pool_count(plan, 0, BufferKind::kGradOutput), 1);
}

TEST(PlanTest, PoolCoversMessagesThatAreUsedInAnotherOrderThanSent) {
  // Rank 1 takes micro-batch 2 first, so 0 and 1 must be posted and held too.
  const Schedule schedule = testing::hand_made(
      Placement::linear(2), 3, {"0F0 0F1 0F2 0B2 0B0 0B1", "1F2 1B2 1F0 1B0 1F1 1B1"});
  ASSERT_FALSE(check(schedule).has_value());
  const Plan plan = plan_of(schedule, {}, {0, 2});
  EXPECT_EQ(pool_count(plan, 1, BufferKind::kInput), 3);
  EXPECT_TRUE(verify(plan).ok());
  EXPECT_FALSE(plan.exact);
}

TEST(PlanTest, TiedReductionsNameTheirGroup) {
  const Plan plan = plan_of(generate("1f1b", {3, 2, 1}), {{{1, 2}}, {{0, 2}}});
  std::vector<std::vector<int>> groups(3);
  for (std::size_t rank = 0; rank < 3; ++rank) {
    for (const PlanOp& op : plan.ranks[rank].ops) {
      if (op.kind == OpKind::kReduceTied) groups[rank].push_back(op.channel);
    }
  }
  EXPECT_THAT(groups[0], ::testing::ElementsAre(1));
  EXPECT_THAT(groups[1], ::testing::ElementsAre(0));
  EXPECT_THAT(groups[2], ::testing::ElementsAre(0, 1));
}

TEST(PlanTest, SendPoolGrowsWhereTensorsWaitUnsent) {
  Schedule lowered = testing::hand_made(
      Placement::linear(2), 3,
      {"0F0 0F1 0F2 0SEND_F0 0SEND_F1 0SEND_F2", "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2"});
  lowered.forward_only = true;
  ASSERT_FALSE(check(lowered).has_value());
  const Plan plan = make_plan(lowered, {}, {1, 1});
  EXPECT_EQ(pool_count(plan, 0, BufferKind::kOutput), 3);
  EXPECT_TRUE(verify(plan).ok());
}

TEST(PlanTest, RefusesWhatCannotBePlanned) {
  const Schedule schedule = generate("gpipe", {2, 2, 1});
  EXPECT_THROW((void)make_plan(schedule, {}), Error);
  EXPECT_THROW((void)plan_of(schedule, {}, {-1, 2}), Error);
  EXPECT_THROW((void)plan_of(schedule, {}, {1, 0}), Error);
  LowerOptions tied;
  tied.tied = {{{0, 1}}};
  EXPECT_THROW((void)make_plan(lower(schedule, tied), {}), Error);
  Schedule unknown = lower(schedule, {});
  unknown.ranks[0].push_back({{.kind = static_cast<ActionKind>(99)}});
  EXPECT_THROW((void)make_plan(unknown, {}), Error);
}

}  // namespace
}  // namespace sluice
