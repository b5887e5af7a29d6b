#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

namespace sluice {
namespace {

Plan plan_with(const Schedule& schedule, const std::vector<int>& resident,
               MessageOrder order = MessageOrder::kReceivesAhead) {
  return make_plan(lower(schedule, {.tied = {}, .resident = resident}), {}, {.order = order});
}

int states(const Plan& plan, int stage, BufferKind kind = BufferKind::kState) {
  for (const BufferPool& pool :
       plan.ranks[static_cast<std::size_t>(plan.placement.rank_of(stage))].pools) {
    if (pool.stage == stage && pool.kind == kind) return pool.count;
  }
  return 0;
}

std::string actions_of(const Schedule& lowered, std::size_t rank, std::size_t most) {
  std::string text;
  for (const Step& step : lowered.ranks[rank]) {
    if (is_message(step.action.kind)) continue;
    if (most-- == 0) break;
    text += to_string(step) + ' ';
  }
  return text;
}

TEST(MovesTest, OneFOneBHalvesTheStatesOfItsFirstRank) {
  const Schedule schedule = generate("1f1b", {4, 8, 1});
  EXPECT_EQ(actions_of(lower(schedule, {.tied = {}, .resident = half_resident(schedule)}), 0, 24),
            "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0FETCH0 0F3 0OFFLOAD3 0B0 0FETCH1 0F4 "
            "0OFFLOAD4 0B1 0FETCH2 0F5 0OFFLOAD5 0B2 0FETCH3 0F6 0OFFLOAD6 0B3 0FETCH4 0F7 ");
  const Plan plan = plan_with(schedule, half_resident(schedule));
  EXPECT_TRUE(verify(plan).ok()) << verify(plan).violation->message;
  EXPECT_EQ(states(plan, 0), 2);
  EXPECT_EQ(states(plan_with(schedule, {}), 0), 4);
  EXPECT_EQ(states(plan, 0, BufferKind::kStored), 3);
  EXPECT_EQ(states(plan, 3, BufferKind::kStored), 0);  // its backward comes at once
}

TEST(MovesTest, EveryScheduleKeepsItsBoundAndIsProven) {
  for (const std::string& name : schedule_names()) {
    for (const int ranks : {2, 4, 8}) {
      for (const int micro_batches : {1, 3, 8, 17}) {
        Schedule schedule;
        try {
          schedule = generate(name, {ranks, micro_batches, 0});
        } catch (const Error&) {
          continue;  // a shape that it cannot serve
        }
        const std::vector<int> bounds = half_resident(schedule);
        for (const MessageOrder order : {MessageOrder::kReceivesAhead, MessageOrder::kGlobal}) {
          const Plan plan = plan_with(schedule, bounds, order);
          const Verification verified = verify(plan);
          ASSERT_TRUE(verified.ok()) << name << ' ' << verified.violation->message;
          EXPECT_TRUE(verified.deadlocks.empty() || order == MessageOrder::kReceivesAhead) << name;
          const Plan plain = plan_with(schedule, {}, order);
          for (int stage = 0; stage < schedule.placement.stages(); ++stage) {
            EXPECT_LE(states(plan, stage), states(plain, stage)) << name << " stage " << stage;
            // What is between I and W stays.
            const bool split = name.find("zb") != std::string::npos;
            if (split) continue;
            EXPECT_LE(states(plan, stage), std::max(3, bounds[static_cast<std::size_t>(stage)]))
                << name << ' ' << ranks << ' ' << micro_batches << " stage " << stage;
          }
        }
      }
    }
  }
}

TEST(MovesTest, AStateComesBackBeforeItIsRecomputedFrom) {
  const Schedule schedule = generate("1f1b", {4, 8, 1});
  const Plan plan = make_plan(lower(schedule, {.tied = {},
                                               .recomputes = std::vector<bool>(4, true),
                                               .resident = half_resident(schedule)}),
                              {});
  EXPECT_TRUE(verify(plan).ok()) << verify(plan).violation->message;
  EXPECT_EQ(states(plan, 0), 2);
}

TEST(MovesTest, OffloadsAsFewAsTheBoundTakes) {
  const Schedule schedule = generate("gpipe", {2, 8, 1});
  const auto offloads = [&](int bound) {
    const Plan plan = plan_with(schedule, {bound, bound});
    return std::count_if(plan.ranks[0].ops.begin(), plan.ranks[0].ops.end(), [](const PlanOp& op) {
      return op.kind == OpKind::kStartMove && op.action == ActionKind::kOffload;
    });
  };
  EXPECT_EQ(offloads(8), 0);
  EXPECT_EQ(offloads(7), 1);
  EXPECT_EQ(offloads(4), 4);
  EXPECT_EQ(offloads(0), 0);  // no bound
}

// The first op of rank 0 that matches.
template <typename Match>
PlanOp& op_of(Plan& plan, const Match& match) {
  return *std::find_if(plan.ranks[0].ops.begin(), plan.ranks[0].ops.end(), match);
}

std::string why_refused(const Plan& plan) {
  const Verification verified = verify(plan);
  return verified.violation ? verified.violation->message : "";
}

class MoveRulesTest : public ::testing::Test {
 protected:
  static bool is(const PlanOp& op, OpKind kind, ActionKind action) {
    return op.kind == kind && op.action == action;
  }
  void remove(OpKind kind, ActionKind action) {
    auto& ops = plan_.ranks[0].ops;
    ops.erase(std::find_if(ops.begin(), ops.end(),
                           [&](const PlanOp& op) { return is(op, kind, action); }));
  }

  Plan plan_ = plan_with(generate("1f1b", {4, 8, 1}), {2, 2, 2, 2});
};

TEST_F(MoveRulesTest, AStateIsNotReadBeforeItCameBack) {
  remove(OpKind::kWaitMove, ActionKind::kFetch);
  EXPECT_THAT(why_refused(plan_), ::testing::HasSubstr("state is read: the slot is posted"));
}

TEST_F(MoveRulesTest, AStateIsNotReadWhereItNeverCameBack) {
  remove(OpKind::kStartMove, ActionKind::kFetch);
  EXPECT_THAT(why_refused(plan_), ::testing::HasSubstr("0OFFLOAD3"));  // its place is taken
}

TEST_F(MoveRulesTest, ASlotIsNotWrittenWhileItsStateLeaves) {
  remove(OpKind::kWaitMove, ActionKind::kOffload);
  EXPECT_THAT(why_refused(plan_), ::testing::HasSubstr("state is written: the slot is being sent"));
}

TEST_F(MoveRulesTest, ASlotIsNotFreedWhileItsStateLeaves) {
  auto& ops = plan_.ranks[0].ops;
  PlanOp wait = op_of(
      plan_, [](const PlanOp& op) { return is(op, OpKind::kStartMove, ActionKind::kOffload); });
  wait.kind = OpKind::kRelease;
  wait.slots[static_cast<std::size_t>(BufferKind::kStored)] = -1;
  ops.insert(std::find_if(ops.begin(), ops.end(),
                          [](const PlanOp& op) {
                            return is(op, OpKind::kStartMove, ActionKind::kOffload);
                          }) +
                 1,
             wait);
  EXPECT_THAT(why_refused(plan_),
              ::testing::HasSubstr("state is released: the slot is being sent"));
}

TEST_F(MoveRulesTest, APlaceInTheStoreHoldsOneState) {
  for (PlanOp& op : plan_.ranks[0].ops) {
    if (op.kind == OpKind::kStartMove) op.slots[static_cast<std::size_t>(BufferKind::kStored)] = 0;
  }
  EXPECT_THAT(why_refused(plan_), ::testing::HasSubstr("stored is written: the slot is filled"));
}

TEST_F(MoveRulesTest, NothingIsAwayAtTheEnd) {
  const auto last_fetch = [&](OpKind kind) {
    auto& ops = plan_.ranks[0].ops;
    const auto found = std::find_if(ops.rbegin(), ops.rend(), [&](const PlanOp& op) {
      return is(op, kind, ActionKind::kFetch);
    });
    ops.erase(std::prev(found.base()));
  };
  last_fetch(OpKind::kWaitMove);
  last_fetch(OpKind::kStartMove);
  EXPECT_THAT(why_refused(plan_), ::testing::HasSubstr("state is read: "));
}

TEST_F(MoveRulesTest, OnlyOffloadAndFetchMove) {
  op_of(plan_, [](const PlanOp& op) { return op.kind == OpKind::kStartMove; }).action =
      ActionKind::kForward;
  EXPECT_THAT(why_refused(plan_), ::testing::HasSubstr("F moves nothing"));
}

TEST(MovesTest, LowerRefusesAScheduleThatMovesAndBoundsOfSomeStages) {
  const Schedule lowered =
      lower(generate("1f1b", {4, 8, 1}), {.tied = {}, .resident = {2, 2, 2, 2}});
  EXPECT_FALSE(check(lowered).has_value());
  Schedule moves = generate("1f1b", {2, 2, 1});
  moves.ranks[0].push_back({parse_action("0OFFLOAD1")});
  EXPECT_THROW((void)lower(moves, {}), Error);
  EXPECT_THROW((void)lower(generate("1f1b", {4, 8, 1}), {.tied = {}, .resident = {2}}), Error);
}

TEST(MovesTest, TheSimulatorWaitsForSlowMovesAndFreesWhatLeft) {
  const Schedule schedule = generate("1f1b", {4, 16, 1});
  const Schedule moved = lower(schedule, {.tied = {}, .resident = {2, 2, 2, 2}});
  SimulationTimes times{.stages = {StageTimes{}},
                        .bytes = {StageBytes{.until_input = 60, .until_weight = 40}}};
  const Simulation plain = simulate(schedule, times);
  times.move_link.bandwidth = 100;  // a move takes as long as a forward
  const Simulation fast = simulate(moved, times);
  EXPECT_EQ(fast.makespan, plain.makespan);
  EXPECT_EQ(plain.peak_bytes[0], 400);
  EXPECT_LE(fast.peak_bytes[0], 300);  // one that leaves or comes back is still, or already, there
  times.move_link.bandwidth = 25;
  EXPECT_GT(simulate(moved, times).makespan, 1.3 * plain.makespan);
}

}  // namespace
}  // namespace sluice
