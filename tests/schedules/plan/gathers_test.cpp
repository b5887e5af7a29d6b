// UNSHARD and RESHARD: where lower() puts them, and the rules that verify() holds plans to.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>

namespace sluice {
namespace {

using ::testing::HasSubstr;

Schedule lower_with(const Schedule& schedule, Gather gather, bool trains = true) {
  const auto stages = static_cast<std::size_t>(schedule.placement.stages());
  return lower(schedule,
               {.reduce_grad = trains, .tied = {}, .gathers = std::vector<Gather>(stages, gather)});
}

std::string text_of(const Schedule& lowered, std::size_t rank) {
  std::string text;
  for (const Step& step : lowered.ranks[rank]) text += to_string(step) + ' ';
  return text;
}

TEST(GathersTest, AStageIsWholeFromItsFirstActionToItsLast) {
  const Schedule schedule = generate("1f1b", {2, 2, 1});
  for (const Gather gather : {Gather::kPerStep, Gather::kPerUse}) {
    const Schedule lowered = lower_with(schedule, gather);
    EXPECT_EQ(text_of(lowered, 0),
              "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0RESHARD "
              "0REDUCE_GRAD 0OPTIMIZER ");
    EXPECT_EQ(text_of(lowered, 1),
              "1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RESHARD "
              "1REDUCE_GRAD 1OPTIMIZER ");
  }
}

TEST(GathersTest, PerUseAStageGivesWayToTheNextOne) {
  const Schedule schedule = generate("interleaved", {2, 2, 2});
  EXPECT_EQ(text_of(lower_with(schedule, Gather::kPerUse), 1),
            "1UNSHARD 1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RESHARD "
            "3UNSHARD 3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 3RESHARD "
            "1UNSHARD 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1 1RESHARD "
            "1REDUCE_GRAD 3REDUCE_GRAD 1OPTIMIZER ");
  EXPECT_EQ(text_of(lower_with(schedule, Gather::kPerStep), 1),
            "1UNSHARD 1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 "
            "3UNSHARD 3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 3RESHARD "
            "1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1 1RESHARD "
            "1REDUCE_GRAD 3REDUCE_GRAD 1OPTIMIZER ");
}

TEST(GathersTest, AStageThatIsWholeHasNone) {
  const Schedule schedule = generate("1f1b", {2, 2, 1});
  const Schedule lowered =
      lower(schedule, {.tied = {}, .gathers = {Gather::kNever, Gather::kPerUse}});
  EXPECT_THAT(text_of(lowered, 0), ::testing::Not(HasSubstr("UNSHARD")));
  EXPECT_THAT(text_of(lowered, 1), HasSubstr("1UNSHARD"));
  EXPECT_THROW((void)lower(schedule, {.tied = {}, .gathers = {Gather::kPerUse}}), Error);
}

TEST(GathersTest, EverySchedulesPlanIsProven) {
  for (const std::string& name : schedule_names()) {
    for (const int micro_batches : {1, 3, 8}) {
      Schedule schedule;
      try {
        schedule = generate(name, {4, micro_batches, 0});
      } catch (const Error&) {
        continue;  // a shape that it cannot serve
      }
      for (const Gather gather : {Gather::kPerStep, Gather::kPerUse}) {
        for (const MessageOrder order : {MessageOrder::kReceivesAhead, MessageOrder::kGlobal}) {
          const Verification verified =
              verify(make_plan(lower_with(schedule, gather), {}, {.order = order}));
          ASSERT_TRUE(verified.ok()) << name << ' ' << verified.violation->message;
        }
      }
    }
  }
  const Schedule forward = generate_forward_only(Placement::looped(2, 2), 3);
  const Verification verified =
      verify(make_plan(lower_with(forward, Gather::kPerUse, /*trains=*/false), {}));
  EXPECT_TRUE(verified.ok()) << verified.violation->message;
}

// What a file says itself gives way.
TEST(GathersTest, ThoseOfTheScheduleAreNotKeptBesideThem) {
  Schedule schedule = generate("1f1b", {2, 2, 1});
  schedule.ranks[0].insert(schedule.ranks[0].begin(), parse_step("0UNSHARD"));
  EXPECT_EQ(text_of(lower_with(schedule, Gather::kPerStep), 0),
            text_of(lower_with(generate("1f1b", {2, 2, 1}), Gather::kPerStep), 0));
}

class GatherRulesTest : public ::testing::Test {
 protected:
  using Ops = std::vector<PlanOp>;
  Ops& ops() { return plan_.ranks[0].ops; }
  Ops::iterator first(OpKind kind) { return std::ranges::find(ops(), kind, &PlanOp::kind); }
  std::string why() const {
    const Verification verified = verify(plan_);
    return verified.violation ? verified.violation->message : "";
  }

  Plan plan_ = make_plan(lower_with(generate("interleaved", {2, 2, 2}), Gather::kPerUse), {});
};

TEST_F(GatherRulesTest, AStageDoesNotComputeBeforeItsParametersAreThere) {
  const auto unshard = first(OpKind::kUnshard);
  const auto compute = std::find_if(unshard, ops().end(),
                                    [](const PlanOp& op) { return op.kind == OpKind::kCompute; });
  std::rotate(unshard, unshard + 1, compute + 1);
  EXPECT_THAT(why(), HasSubstr("the stage's parameters are not there: UNSHARD comes before"));
}

TEST_F(GatherRulesTest, AStageDoesNotComputeAfterItsParametersAreAway) {
  ops().erase(std::find_if(first(OpKind::kReshard), ops().end(), [](const PlanOp& op) {
    return op.kind == OpKind::kUnshard && op.stage == 0;
  }));
  EXPECT_THAT(why(), HasSubstr("the stage's parameters are not there"));
}

TEST_F(GatherRulesTest, WhatWasGatheredIsAwayBeforeTheUpdate) {
  const auto last = std::find_if(ops().rbegin(), ops().rend(),
                                 [](const PlanOp& op) { return op.kind == OpKind::kReshard; });
  ops().erase(std::prev(last.base()));
  EXPECT_THAT(why(), HasSubstr("no RESHARD follows the UNSHARD of stage 0"));
}

TEST_F(GatherRulesTest, AStageIsGatheredOnce) {
  ops().insert(first(OpKind::kUnshard), *first(OpKind::kUnshard));
  EXPECT_THAT(why(), HasSubstr("the stage has its parameters already"));
}

TEST_F(GatherRulesTest, WhatWasNotGatheredDoesNotGo) {
  ops().insert(first(OpKind::kReshard), *first(OpKind::kReshard));
  EXPECT_THAT(why(), HasSubstr("no UNSHARD of the stage comes before"));
}

}  // namespace
}  // namespace sluice
