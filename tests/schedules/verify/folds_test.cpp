// Folds between groups of micro-batches: where plans list them, and what a plan may not do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>

#include "tests/schedules/hand_made.hpp"

namespace sluice {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::plan_of;

using Ops = std::vector<PlanOp>;

Plan folded(const Schedule& schedule, int every,
            MessageOrder order = MessageOrder::kReceivesAhead) {
  return plan_of(schedule, {{{0, 1}}}, {.order = order, .fold_every = every});
}

bool is_fold(const PlanOp& op) { return op.kind == OpKind::kFold; }
// Of the two folds of a group: the one after forward actions?
bool is_forward(const PlanOp& op) { return op.action == ActionKind::kForward; }

TEST(FoldsTest, EveryScheduleWhoseGradientsAscendFoldsAfterEachGroupOfEachStage) {
  for (const std::string& name : schedule_names()) {
    for (const int p : {2, 3}) {
      for (const auto& [groups, every] : {std::pair(2, 1), std::pair(3, 4), std::pair(4, 2)}) {
        for (const MessageOrder order : {MessageOrder::kReceivesAhead, MessageOrder::kGlobal}) {
          const Schedule schedule = generate(name, {p, groups * every, 0});
          if (!is_exact(schedule) || schedule.forward_only) continue;
          const Plan plan = folded(schedule, every, order);
          const Verification verification = verify(plan);
          ASSERT_TRUE(verification.ok()) << name << ": " << verification.violation->message;
          EXPECT_EQ(testing::count(plan, OpKind::kFold), 2 * groups * plan.placement.stages());
          EXPECT_EQ(plan.exact, true);
        }
      }
    }
  }
}

// What one rank of 1F1B does with two groups of two.
TEST(FoldsTest, AFoldFollowsTheLastActionOfItsGroupAndWhatThatSends) {
  const Plan plan = plan_of(generate("1f1b", {2, 4, 1}), {}, {.fold_every = 2});
  std::vector<std::string> texts;
  for (const PlanOp& op : plan.ranks[1].ops) {
    if (op.kind == OpKind::kCompute || op.kind == OpKind::kStartSend || is_fold(op) ||
        op.kind == OpKind::kReduceGrad) {
      const std::string text = to_string(op);
      texts.push_back(text.substr(0, text.find(' ', text.find(' ') + 1)));
    }
  }
  EXPECT_THAT(
      texts, ElementsAre("compute 1F0", "compute 1B0", "send 1SEND_B0", "compute 1F1", "fold 1F1",
                         "compute 1B1", "send 1SEND_B1", "fold 1B1", "compute 1F2", "compute 1B2",
                         "send 1SEND_B2", "compute 1F3", "fold 1F3", "compute 1B3", "send 1SEND_B3",
                         "fold 1B3", "reduce-grad 1REDUCE_GRAD"));
  const Plan early = testing::plan_with_early_sums(generate("zb-h1", {2, 4, 1}), {.fold_every = 4});
  for (const RankPlan& rank : early.ranks) {
    for (std::size_t i = 0; i < rank.ops.size(); ++i) {
      if (rank.ops[i].kind != OpKind::kReduceGrad) continue;
      std::size_t before = i - 1;
      while (rank.ops[before].kind == OpKind::kWaitSend) --before;
      EXPECT_TRUE(is_fold(rank.ops[before])) << to_string(rank.ops[before]);
    }
  }
  EXPECT_TRUE(verify(early).ok());
}

TEST(FoldsTest, PlansWithoutGroupsHaveNone) {
  EXPECT_EQ(testing::count(plan_of(generate("1f1b", {2, 4, 1})), OpKind::kFold), 0);
}

// The first index of an op that `is` says.
std::size_t find(const Ops& ops, const std::function<bool(const PlanOp&)>& is) {
  std::size_t i = 0;
  while (!is(ops[i])) ++i;
  return i;
}

// What verify() says of 1F1B with groups of two once `change` has changed rank 1's list.
std::string refusal(const std::function<void(Ops&)>& change) {
  Plan plan = folded(generate("1f1b", {2, 6, 1}), 2);
  change(plan.ranks[1].ops);
  const Verification verification = verify(plan);
  return verification.ok() ? "accepted" : verification.violation->message;
}

TEST(FoldsTest, EveryRuleBrokenIsRefused) {
  for (const bool forward : {true, false}) {
    const auto of_pass = [&](const PlanOp& op) { return is_fold(op) && is_forward(op) == forward; };
    const auto nth = [&](Ops& ops, int n) {
      std::size_t i = find(ops, of_pass);
      for (; n > 0; --n)
        i = find(Ops(ops.begin() + std::ptrdiff_t(i) + 1, ops.end()), of_pass) + i + 1;
      return ops.begin() + static_cast<std::ptrdiff_t>(i);
    };
    // Missing, of the first group: the next group's action finds it so; of the last one.
    EXPECT_THAT(refusal([&](Ops& ops) { ops.erase(nth(ops, 0)); }),
                HasSubstr("micro-batches 0 to 1 are not folded yet; legal are schedules in which a "
                          "stage computes F, and B or W, of each 2 micro-batches before those of "
                          "later ones"));
    EXPECT_THAT(refusal([&](Ops& ops) { ops.erase(nth(ops, 2)); }),
                HasSubstr("only 2 of 3 groups of stage 1 are folded"));
    // Twice.
    EXPECT_THAT(refusal([&](Ops& ops) { ops.insert(nth(ops, 0), *nth(ops, 0)); }),
                HasSubstr("since the last fold 0 of 2 micro-batches are computed"));
    // Before its group is complete.
    EXPECT_THAT(refusal([&](Ops& ops) {
                  const PlanOp fold = *nth(ops, 0);
                  ops.erase(nth(ops, 0));
                  const std::size_t first = find(ops, [&](const PlanOp& op) {
                    return op.kind == OpKind::kCompute && is_forward(op) == forward;
                  });
                  ops.insert(ops.begin() + static_cast<std::ptrdiff_t>(first) + 1, fold);
                }),
                HasSubstr("since the last fold 1 of 2 micro-batches are computed"));
    // Another micro-batch, kind of action, stage.
    EXPECT_THAT(refusal([&](Ops& ops) { nth(ops, 1)->micro_batch = 2; }),
                HasSubstr("the last micro-batch of the group is 3"));
    EXPECT_THAT(refusal([&](Ops& ops) { nth(ops, 1)->micro_batch = 6; }),
                HasSubstr("micro-batch 6 does not exist"));
    EXPECT_THAT(refusal([&](Ops& ops) { nth(ops, 0)->action = ActionKind::kBackwardInput; }),
                HasSubstr("a fold follows F, B or W, not I"));
    EXPECT_THAT(refusal([&](Ops& ops) { nth(ops, 0)->stage = 0; }),
                HasSubstr("stage 0 is not a stage of this rank"));
    EXPECT_THAT(refusal([&](Ops& ops) { nth(ops, 0)->slots[0] = 0; }),
                HasSubstr("it names a slot it has no use for"));
  }
  // After the reduction.
  EXPECT_THAT(refusal([](Ops& ops) {
                const std::size_t sum =
                    find(ops, [](const PlanOp& op) { return op.kind == OpKind::kReduceGrad; });
                std::size_t last = sum;
                while (!is_fold(ops[last])) --last;
                for (; last < sum; ++last) std::swap(ops[last], ops[last + 1]);
              }),
              HasSubstr("only 2 of 3 groups of stage 1 are folded"));
}

TEST(FoldsTest, AScheduleThatMixesGroupsIsRefused) {
  const Verification verification = verify(folded(generate("gpipe-lifo", {2, 4, 1}), 2));
  ASSERT_FALSE(verification.ok());
  EXPECT_THAT(verification.violation->message,
              AllOf(HasSubstr("(compute 0B3 "),
                    HasSubstr("micro-batches 0 to 1 are not folded yet; legal are schedules")));
}

TEST(FoldsTest, NumbersThatDoNotDivideTheMicroBatchesAreRefused) {
  for (const int every : {-1, 3, 5}) {
    EXPECT_THROW((void)folded(generate("1f1b", {2, 4, 1}), every), Error) << every;
    Plan plan = plan_of(generate("1f1b", {2, 4, 1}));
    plan.fold_every = every;
    EXPECT_THAT(verify(plan).violation->message, HasSubstr("legal are 0 and divisors")) << every;
  }
  EXPECT_THROW(
      (void)assemble_plan(generate_forward_only(Placement::linear(1), 4), {}, {.fold_every = 2}),
      Error);
  Plan none = folded(generate("1f1b", {2, 4, 1}), 2);
  none.fold_every = 0;
  EXPECT_THAT(verify(none).violation->message, HasSubstr("the plan has one group"));
}

}  // namespace
}  // namespace sluice
