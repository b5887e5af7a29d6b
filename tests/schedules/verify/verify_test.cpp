#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <string>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

#include "tests/schedules/hand_made.hpp"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Not;
using testing::plan_of;

constexpr std::array kTagged = {TransportModel::kEager, TransportModel::kRendezvous,
                                TransportModel::kBounded};

bool progresses_tagged(const Plan& plan) {
  return verify(plan).progresses(TransportModel::kBounded);
}

std::vector<Plan> several_plans() {
  std::vector<Plan> plans;
  for (const std::string& name : schedule_names()) {
    plans.push_back(plan_of(generate(name, {3, 4, 1}), {}, {1, 1}));
    plans.push_back(plan_of(generate(name, {2, 5, 1}), {{{0, 1}}}));
  }
  for (const Schedule& schedule : testing::all_hand_made()) {
    plans.push_back(plan_of(schedule, {{{0, 2}}}));
  }
  return plans;
}

PlanOp* find_op(Plan& plan, int rank, OpKind kind, ActionKind action, int micro_batch) {
  for (PlanOp& op : plan.ranks[static_cast<std::size_t>(rank)].ops) {
    if (op.kind == kind && op.action == action && op.micro_batch == micro_batch) return &op;
  }
  return nullptr;
}

// Each receive posted just before its wait.
Plan with_late_posts(Plan plan) {
  for (RankPlan& rank : plan.ranks) {
    std::vector<PlanOp> ops;
    for (const PlanOp& op : rank.ops) {
      if (op.kind == OpKind::kPostRecv) continue;
      if (op.kind == OpKind::kWaitRecv) ops.emplace_back(op).kind = OpKind::kPostRecv;
      ops.push_back(op);
    }
    rank.ops = std::move(ops);
  }
  return plan;
}

// Each send waited for as soon as it is started.
Plan with_blocking_sends(Plan plan) {
  for (RankPlan& rank : plan.ranks) {
    std::vector<PlanOp> ops;
    for (const PlanOp& op : rank.ops) {
      if (op.kind == OpKind::kWaitSend) continue;
      ops.push_back(op);
      if (op.kind == OpKind::kStartSend) ops.emplace_back(op).kind = OpKind::kWaitSend;
    }
    rank.ops = std::move(ops);
  }
  return plan;
}

// As a runtime without posts ahead and without asynchronous sends would do it.
Plan blocking(Plan plan) { return with_blocking_sends(with_late_posts(std::move(plan))); }

TEST(VerifyTest, EveryGeneratedPlanProgressesOverTransportsWithTags) {
  for (const std::string& name : schedule_names()) {
    for (int p = 1; p <= 8; ++p) {
      for (int m = 1; m <= 17; ++m) {
        for (const PlanOptions& options : {PlanOptions{}, PlanOptions{0, 1}}) {
          SCOPED_TRACE(name + " p = " + std::to_string(p) + ", m = " + std::to_string(m));
          const Schedule schedule = generate(name, {p, m, 1});
          const Verification verification = verify(plan_of(schedule, {}, options));
          ASSERT_TRUE(verification.ok()) << verification.violation->message;
          EXPECT_THAT(verification.progresses_under, IsSupersetOf(kTagged));
        }
      }
    }
  }
}

TEST(VerifyTest, HandMadeSplitInterleavedAndOverlappedPlansProgressOverTransportsWithTags) {
  for (const Schedule& schedule : testing::all_hand_made()) {
    const Verification verification = verify(plan_of(schedule, {{{0, 3}}, {{1}}}));
    EXPECT_THAT(verification.progresses_under, IsSupersetOf(kTagged));
  }
}

TEST(VerifyTest, RefusesAPlanWithAnyOnePostRemoved) {
  for (const Plan& whole : several_plans()) {
    ASSERT_TRUE(verify(whole).ok());
    for (std::size_t rank = 0; rank < whole.ranks.size(); ++rank) {
      for (std::size_t i = 0; i < whole.ranks[rank].ops.size(); ++i) {
        const PlanOp removed = whole.ranks[rank].ops[i];
        if (removed.kind != OpKind::kPostRecv) continue;
        Plan plan = whole;
        plan.ranks[rank].ops.erase(plan.ranks[rank].ops.begin() + static_cast<std::ptrdiff_t>(i));
        const Verification verification = verify(plan);
        ASSERT_FALSE(verification.ok()) << to_string(removed);
        EXPECT_EQ(verification.violation->rank, static_cast<int>(rank));
        EXPECT_THAT(verification.violation->message,
                    HasSubstr("no receive of this message is posted before the wait"));
      }
    }
  }
}

TEST(VerifyTest, RefusesAPlanWithAnyOneOpRemovedOrDoubled) {
  for (const Plan& whole : several_plans()) {
    for (std::size_t rank = 0; rank < whole.ranks.size(); ++rank) {
      for (std::size_t i = 0; i < whole.ranks[rank].ops.size(); ++i) {
        const PlanOp op = whole.ranks[rank].ops[i];
        SCOPED_TRACE(whole.schedule_name + " rank " + std::to_string(rank) + ": " + to_string(op));
        const auto at = static_cast<std::ptrdiff_t>(i);
        Plan plan = whole;
        auto& ops = plan.ranks[rank].ops;
        ops.insert(ops.begin() + at, op);
        EXPECT_FALSE(verify(plan).ok());
        ops.erase(ops.begin() + at, ops.begin() + at + 2);
        EXPECT_FALSE(verify(plan).ok());
      }
    }
  }
}

TEST(VerifyTest, BlockingSendsAndLatePostsDeadlockOneFOneBAndTheCycleIsNamed) {
  const Verification verification = verify(blocking(plan_of(generate("1f1b", {2, 4, 1}))));
  EXPECT_THAT(verification.progresses_under, ElementsAre(TransportModel::kEager));
  ASSERT_EQ(verification.deadlocks.size(), 4U);
  EXPECT_EQ(verification.deadlocks[0].model, TransportModel::kRendezvous);
  EXPECT_EQ(verification.deadlocks[0].violation.rank, 0);
  EXPECT_THAT(verification.deadlocks[0].violation.message,
              ::testing::AllOf(
                  HasSubstr("under the rendezvous model the plan deadlocks: rank 0 at op "),
                  HasSubstr("(wait-sent 0SEND_F1 channel 0 output[1]) waits for rank 1 to post "
                            "1RECV_F1"),
                  HasSubstr("; rank 1 at op "),
                  HasSubstr("(wait-sent 1SEND_B0 channel 1 grad-input[0]) waits for rank 0 to post "
                            "0RECV_B0")));
}

TEST(VerifyTest, OneFOneBNeedsOnlyOneOfPostsAheadAndAsynchronousSends) {
  for (int p = 2; p <= 5; ++p) {
    for (int m = 1; m <= 9; ++m) {
      const Plan plan = plan_of(generate("1f1b", {p, m, 1}));
      EXPECT_TRUE(progresses_tagged(with_blocking_sends(plan))) << "p = " << p << ", m = " << m;
      EXPECT_TRUE(progresses_tagged(with_late_posts(plan))) << "p = " << p << ", m = " << m;
    }
  }
}

TEST(VerifyTest, AllForwardsFirstSurvivesBlockingSendsAndLatePosts) {
  for (int p = 2; p <= 4; ++p) {
    EXPECT_TRUE(progresses_tagged(blocking(plan_of(generate("gpipe", {p, 5, 1})))));
  }
}

TEST(VerifyTest, BoundedModelStopsASendThatRendezvousLetsThrough) {
  // Rank 1 posts the receive of 0F1 only after it got 2F0, which rank 0 sends after 0F1.
  Schedule schedule =
      testing::hand_made(Placement::looped(2, 2), 2, {"0F0 0F1 2F0 2F1", "1F0 3F0 1F1 3F1"});
  schedule.forward_only = true;
  ASSERT_FALSE(check(schedule).has_value());
  const Plan plan = with_late_posts(plan_of(schedule));
  const Verification one = verify(plan);
  EXPECT_TRUE(one.progresses(TransportModel::kRendezvous));
  ASSERT_FALSE(one.progresses(TransportModel::kBounded));
  EXPECT_THAT(
      one.deadlocks[0].violation.message,
      ::testing::AllOf(
          HasSubstr("under the bounded model the plan deadlocks: rank 0 at op "),
          HasSubstr("(send 2SEND_F0 channel 2 output[0]) waits for rank 1 to post a receive "
                    "for an earlier send from stage 0")));
  EXPECT_TRUE(progresses_tagged(plan_of(schedule)));
}

TEST(VerifyTest, NamesMessagesThatMeetInAnotherOrder) {
  Plan plan = plan_of(generate("gpipe", {2, 2, 1}));
  PlanOp* first = find_op(plan, 1, OpKind::kPostRecv, ActionKind::kRecvForward, 0);
  PlanOp* second = find_op(plan, 1, OpKind::kPostRecv, ActionKind::kRecvForward, 1);
  std::swap(*first, *second);
  const Verification verification = verify(plan);
  ASSERT_FALSE(verification.ok());
  EXPECT_THAT(verification.violation->message,
              HasSubstr("it is number 0 of its channel here and number 1 on rank 1"));
}

// Every stage recomputes.
Plan recomputing(const Schedule& schedule, MessageOrder order = MessageOrder::kReceivesAhead) {
  LowerOptions options;
  options.recomputes.assign(static_cast<std::size_t>(schedule.placement.stages()), true);
  return make_plan(lower(schedule, options), {}, {.order = order});
}

bool recomputes(const PlanOp& op) { return op.action == ActionKind::kRecompute; }

TEST(VerifyTest, EveryPlanThatRecomputesProgressesAsTheOneThatDoesNot) {
  for (const std::string& name : schedule_names()) {
    for (const MessageOrder order : {MessageOrder::kReceivesAhead, MessageOrder::kGlobal}) {
      const Schedule schedule = generate(name, {3, 5, 0});
      const Plan plan = recomputing(schedule, order);
      const Verification verification = verify(plan);
      ASSERT_TRUE(verification.ok()) << name << ": " << verification.violation->message;
      EXPECT_EQ(verification.progresses_under,
                verify(make_plan(lower(schedule, {}), {}, {.order = order})).progresses_under);
      std::ptrdiff_t count = 0;
      for (const RankPlan& rank : plan.ranks) count += std::ranges::count_if(rank.ops, recomputes);
      EXPECT_EQ(count, schedule.forward_only ? 0 : 5 * schedule.placement.stages());
    }
  }
}

TEST(VerifyTest, NothingOfAStageComesBetweenWhatItRecomputesAndItsBackward) {
  const Plan whole = recomputing(generate("1f1b", {2, 4, 1}));
  const std::vector<PlanOp>& ops = whole.ranks[0].ops;
  const auto place = [&](const char* text) {
    return std::ranges::find_if(ops,
                                [&](const PlanOp& op) {
                                  return to_string(op).starts_with(std::string("compute ") + text);
                                }) -
           ops.begin();
  };
  // What verify() says once the op has gone to where another one is, or is there too.
  const auto refusal = [&](const char* text, const char* where, bool doubled = false) {
    Plan plan = whole;
    std::vector<PlanOp>& changed = plan.ranks[0].ops;
    const auto from = place(text), to = place(where);
    const PlanOp op = ops[static_cast<std::size_t>(from)];
    changed.insert(changed.begin() + to, op);
    if (!doubled) changed.erase(changed.begin() + from + (from > to ? 1 : 0));
    const Verification verification = verify(plan);
    return verification.ok() ? "accepted" : verification.violation->message;
  };
  EXPECT_THAT(refusal("0RECOMPUTE0", "0F1"),
              HasSubstr("(compute 0F1 "));  // an action that needs the same memory
  EXPECT_THAT(refusal("0RECOMPUTE0", "0F1"), HasSubstr("recomputed of micro-batch 0"));
  EXPECT_THAT(refusal("0RECOMPUTE1", "0B0"), HasSubstr("whose B or I must come first"));
  EXPECT_THAT(refusal("0RECOMPUTE3", "0F3"), HasSubstr("between F and B or I"));
  EXPECT_THAT(refusal("0RECOMPUTE0", "0RECOMPUTE1"), HasSubstr("between F and B or I"));
  EXPECT_THAT(refusal("0RECOMPUTE0", "0B0", /*doubled=*/true),
              HasSubstr("has recomputed micro-batch 0"));
}

TEST(VerifyTest, NamesAnIncompleteStage) {
  Plan plan = plan_of(generate("forward-only", {2, 2, 1}));
  auto& ops = plan.ranks[1].ops;
  ops.erase(
      std::remove_if(ops.begin(), ops.end(), [](const PlanOp& op) { return op.micro_batch == 1; }),
      ops.end());
  const Verification verification = verify(plan);
  ASSERT_FALSE(verification.ok());
  EXPECT_EQ(verification.violation->rank, 1);
  EXPECT_THAT(verification.violation->message,
              HasSubstr("only 1 of 2 micro-batches of stage 1 are complete"));
}

TEST(VerifyTest, NamesASendThatNobodyReceives) {
  Plan plan = plan_of(generate("forward-only", {2, 2, 1}));
  auto& ops = plan.ranks[1].ops;
  ops.erase(
      std::remove_if(ops.begin(), ops.end(), [](const PlanOp& op) { return op.channel >= 0; }),
      ops.end());
  // What was received is now read without ever having come.
  EXPECT_THAT(verify(plan).violation->message, HasSubstr("input is read: the slot is free"));

  plan = plan_of(generate("forward-only", {2, 2, 1}));
  // What would be sent is dropped instead.
  auto& sender = plan.ranks[0].ops;
  std::erase_if(sender, [](const PlanOp& op) {
    return op.micro_batch == 1 && op.kind == OpKind::kStartSend;
  });
  PlanOp* wait = find_op(plan, 0, OpKind::kWaitSend, ActionKind::kSendForward, 1);
  wait->kind = OpKind::kRelease;
  EXPECT_THAT(verify(plan).violation->message, HasSubstr("rank 0 never sends it"));
}

TEST(VerifyTest, NamesASlotThatIsWrittenWhileItIsHeld) {
  Plan plan = plan_of(generate("gpipe", {2, 3, 1}));
  find_op(plan, 1, OpKind::kCompute, ActionKind::kForward, 1)
      ->slots[static_cast<std::size_t>(BufferKind::kState)] = 0;
  EXPECT_THAT(
      verify(plan).violation->message,
      HasSubstr("state is written: the slot is filled with micro-batch 0, it must be free"));
}

TEST(VerifyTest, NamesASlotThatIsPostedTwice) {
  Plan plan = plan_of(generate("gpipe", {2, 3, 1}));
  find_op(plan, 1, OpKind::kPostRecv, ActionKind::kRecvForward, 1)
      ->slots[static_cast<std::size_t>(BufferKind::kInput)] = 0;
  const Verification verification = verify(plan);
  ASSERT_FALSE(verification.ok());
  EXPECT_EQ(verification.violation->position, 1);
  EXPECT_THAT(
      verification.violation->message,
      HasSubstr("the slot is posted and not waited for with micro-batch 0, it must be free"));
}

TEST(VerifyTest, NamesASlotOutsideItsPoolAndASlotTooMany) {
  Plan plan = plan_of(generate("gpipe", {2, 3, 1}));
  PlanOp* forward = find_op(plan, 1, OpKind::kCompute, ActionKind::kForward, 0);
  forward->slots[static_cast<std::size_t>(BufferKind::kState)] = 99;
  EXPECT_THAT(verify(plan).violation->message, HasSubstr("state[99] does not exist"));
  forward->slots[static_cast<std::size_t>(BufferKind::kState)] = 0;
  forward->slots[static_cast<std::size_t>(BufferKind::kGradInput)] = 0;
  EXPECT_THAT(verify(plan).violation->message,
              HasSubstr("it names a slot it has no use for: grad-input"));
}

TEST(VerifyTest, NamesIndicesThatDoNotExist) {
  const Plan whole = plan_of(generate("1f1b", {2, 2, 1}));
  for (int field = 0; field < 3; ++field) {
    for (const int value : {-7, 99}) {
      Plan plan = whole;
      PlanOp* wait = find_op(plan, 1, OpKind::kWaitRecv, ActionKind::kRecvForward, 1);
      (field == 0 ? wait->stage : field == 1 ? wait->micro_batch : wait->channel) = value;
      const Verification verification = verify(plan);
      ASSERT_FALSE(verification.ok());
      EXPECT_THAT(verification.violation->message, HasSubstr(std::to_string(value)));
    }
  }
}

TEST(VerifyTest, NamesChannelsThatDoNotFitThePlacement) {
  const Plan whole = plan_of(generate("1f1b", {3, 2, 1}));
  Plan plan = whole;
  plan.channels[1].tag = -1;
  EXPECT_THAT(verify(plan).violation->message, HasSubstr("channel 1 has tag -1"));
  plan = whole;
  plan.channels[0].to_stage = 2;
  EXPECT_THAT(verify(plan).violation->message, HasSubstr("channel 0 joins stages 0 and 2"));
  plan = whole;
  plan.channels[0].to_rank = 2;
  EXPECT_THAT(verify(plan).violation->message, HasSubstr("channel 0 joins ranks 0 and 2"));
  plan = whole;
  plan.channels.push_back(plan.channels[0]);
  EXPECT_THAT(verify(plan).violation->message, HasSubstr("channel 4 repeats an earlier channel"));
}

TEST(VerifyTest, NamesTheRankThatNeverJoinsACollective) {
  Plan plan = plan_of(generate("1f1b", {3, 2, 1}));
  plan.ranks[2].ops.pop_back();  // OPTIMIZER
  plan.ranks[2].ops.pop_back();  // REDUCE_GRAD
  const Verification verification = verify(plan);
  ASSERT_FALSE(verification.ok());
  EXPECT_THAT(verification.violation->message,
              ::testing::AllOf(HasSubstr("(optimizer 0OPTIMIZER) waits for rank 2 to join"),
                               HasSubstr("whose list has ended")));
  EXPECT_TRUE(verification.progresses_under.empty());
}

TEST(VerifyTest, RefusesGradientsThatAreReducedForNoOptimizer) {
  for (const int ranks : {1, 3}) {
    Plan plan = plan_of(generate("1f1b", {ranks, 2, 1}));
    for (RankPlan& rank : plan.ranks) rank.ops.pop_back();
    EXPECT_THAT(verify(plan).violation->message,
                HasSubstr("gradients are reduced and no optimizer follows"));
  }
}

// Moved up op by op: it is legal anywhere after the last W or B, and nowhere before.
TEST(VerifyTest, RefusesASumBeforeItsStagesLastGradient) {
  for (const Schedule& schedule : testing::all_hand_made()) {
    const Plan whole = testing::plan_with_early_sums(schedule);
    ASSERT_TRUE(verify(whole).ok());
    const std::vector<PlanOp>& ops = whole.ranks[1].ops;
    for (std::size_t at = 0; at < ops.size(); ++at) {
      if (ops[at].kind != OpKind::kReduceGrad) continue;
      const int stage = ops[at].stage;
      const auto computes = [&](const PlanOp& op) {
        return op.kind == OpKind::kCompute && op.stage == stage;
      };
      std::size_t last = at;
      while (!computes(ops[last])) --last;
      Plan moved = whole;
      for (std::size_t i = at; i > last; --i) {
        EXPECT_TRUE(verify(moved).ok());
        std::swap(moved.ranks[1].ops[i], moved.ranks[1].ops[i - 1]);
      }
      ASSERT_FALSE(verify(moved).ok());
      EXPECT_THAT(verify(moved).violation->message,
                  HasSubstr("only 1 of 2 micro-batches of stage " + std::to_string(stage) +
                            " are complete"));
    }
  }
}

TEST(VerifyTest, NamesTiedGroupsThatAreReducedInAnotherOrder) {
  Plan plan = plan_of(generate("1f1b", {2, 2, 1}), {{{0, 1}}, {{0, 1}}});
  auto& ops = plan.ranks[1].ops;
  std::swap(ops[ops.size() - 2], ops[ops.size() - 3]);
  EXPECT_THAT(verify(plan).violation->message,
              ::testing::AllOf(HasSubstr("under the eager model the plan deadlocks"),
                               HasSubstr("(reduce-tied 0REDUCE_TIED group 0) waits for rank 1")));
}

constexpr PlannedCollective kStatistics{.axis = CollectiveAxis::kReplica,
                                        .kind = CollectiveKind::kSum,
                                        .bytes = 24,
                                        .type = DType::kF64};
constexpr PlannedCollective kGather{.kind = CollectiveKind::kAllGather, .bytes = 32};
constexpr PlannedCollective kScatter{.kind = CollectiveKind::kReduceScatter, .bytes = 64};
constexpr PlannedCollective kExchange{
    .kind = CollectiveKind::kAllToAll, .bytes = 8, .type = DType::kI32};

// Of three stages.
std::vector<StageCollectives> some_collectives() {
  std::vector<StageCollectives> all(3);
  all[0] = {.forward = {kGather, kStatistics},
            .backward_input = {kStatistics},
            .backward_weight = {kScatter, kExchange}};
  all[2] = {.forward = {kExchange}, .loss = {kStatistics, kGather}};
  return all;
}

Plan plan_with_collectives(const std::string& name) {
  return make_plan(lower(generate(name, {3, 4, 1}), {}), {}, {.collectives = some_collectives()});
}

std::vector<PlannedCollective> list_of(const Plan& plan, const PlanOp& op) {
  const auto first = plan.collectives.begin() + op.first_collective;
  return {first, first + op.collectives};
}

// What verify() says of a plan that it refuses; empty: it does not.
std::string refusal_of(const Plan& plan) {
  const Verification verification = verify(plan);
  return verification.ok() ? "" : verification.violation->message;
}

TEST(VerifyTest, CollectivesStandInTheActionsThatMakeThem) {
  for (const char* name : {"1f1b", "zb-h1", "forward-only"}) {
    const Plan plan = plan_with_collectives(name);
    EXPECT_TRUE(progresses_tagged(plan));
    for (int rank = 0; rank < 3; ++rank) {
      for (const PlanOp& op : plan.ranks[static_cast<std::size_t>(rank)].ops) {
        std::vector<PlannedCollective> expected;
        if (op.kind == OpKind::kCompute && op.stage == 0) {
          expected = op.action == ActionKind::kForward ? std::vector{kGather, kStatistics}
                     : op.action == ActionKind::kBackward
                         ? std::vector{kStatistics, kScatter, kExchange}
                     : op.action == ActionKind::kBackwardInput ? std::vector{kStatistics}
                                                               : std::vector{kScatter, kExchange};
        } else if (op.kind == OpKind::kCompute && op.stage == 2 &&
                   op.action == ActionKind::kForward) {
          expected = {kExchange, kStatistics, kGather};
        }
        if (plan.forward_only) std::erase(expected, kStatistics);
        EXPECT_EQ(list_of(plan, op), expected) << to_string(plan, op);
      }
    }
  }
  try {
    (void)make_plan(lower(generate("1f1b", {2, 4, 1}), {}), {},
                    {.collectives = some_collectives()});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("collectives of 3 stages, there are 2"));
  }
}

TEST(VerifyTest, AnActionsTextSaysItsCollectives) {
  Plan plan = plan_with_collectives("1f1b");
  const auto forward = [&](int rank) {
    return to_string(plan, *find_op(plan, rank, OpKind::kCompute, ActionKind::kForward, 2));
  };
  EXPECT_THAT(forward(0), HasSubstr(" collectives 2 "));
  EXPECT_THAT(forward(0), ::testing::EndsWith(
                              ", collectives: all-gather of 32 bytes of f32 over the tensor ranks; "
                              "sum of 24 bytes of f64 over the replicas"));
  EXPECT_THAT(forward(1), Not(HasSubstr("collectives")));
}

// Every micro-batch makes one list: a plan in which one does not is refused.
TEST(VerifyTest, RefusesListsThatDifferBetweenMicroBatches) {
  const auto refused = [](const char* name, ActionKind action, auto change) {
    Plan plan = plan_with_collectives(name);
    PlanOp& op = *find_op(plan, 0, OpKind::kCompute, action, 2);
    const std::vector<PlannedCollective> before = list_of(plan, op);
    op.first_collective = static_cast<std::int32_t>(plan.collectives.size());
    plan.collectives.insert(plan.collectives.end(), before.begin(), before.end());
    EXPECT_EQ(refusal_of(plan), "") << "an equal list at another place is legal";
    change(plan, op);
    return refusal_of(plan);
  };
  const auto last = [](Plan& plan) -> PlannedCollective& { return plan.collectives.back(); };
  EXPECT_THAT(
      refused("1f1b", ActionKind::kForward, [&](Plan& plan, PlanOp&) { last(plan).bytes = 16; }),
      HasSubstr("collective 2 of 2 is a sum of 16 bytes of f64 over the replicas, that of "
                "the stage's first F a sum of 24 bytes of f64 over the replicas"));
  EXPECT_THAT(refused("1f1b", ActionKind::kForward,
                      [&](Plan& plan, PlanOp&) { last(plan).axis = CollectiveAxis::kTensor; }),
              HasSubstr("is a sum of 24 bytes of f64 over the tensor ranks, that of"));
  EXPECT_THAT(refused("1f1b", ActionKind::kBackward,
                      [&](Plan& plan, PlanOp&) { last(plan).kind = CollectiveKind::kAllGather; }),
              HasSubstr("collective 3 of 3 is an all-gather of 8 bytes of i32"));
  EXPECT_THAT(refused("zb-h1", ActionKind::kBackwardInput,
                      [&](Plan& plan, PlanOp&) { last(plan).type = DType::kF32; }),
              HasSubstr("collective 1 of 1 is a sum of 24 bytes of f32"));
  EXPECT_THAT(refused("zb-h1", ActionKind::kBackwardWeight,
                      [&](Plan& plan, PlanOp&) { std::swap(last(plan), *(&last(plan) - 1)); }),
              HasSubstr("collective 1 of 2 is an all-to-all"));
  EXPECT_THAT(refused("1f1b", ActionKind::kForward, [&](Plan&, PlanOp& op) { op.collectives = 1; }),
              HasSubstr("it makes 1 collectives, the stage's first F makes 2"));
}

TEST(VerifyTest, RefusesABackwardWhoseHalvesMakeOthers) {
  // Stage 0 of one rank: micro-batch 0 has B, micro-batch 1 I and W.
  Schedule schedule = generate("zb-h1", {1, 2, 1});
  std::vector<Step>& steps = schedule.ranks[0];
  const auto is = [](ActionKind kind) {
    return
        [=](const Step& step) { return step.action.kind == kind && step.action.micro_batch == 0; };
  };
  std::erase_if(steps, is(ActionKind::kBackwardWeight));
  std::find_if(steps.begin(), steps.end(), is(ActionKind::kBackwardInput))->action.kind =
      ActionKind::kBackward;
  Plan plan = make_plan(
      lower(schedule, {}), {},
      {.collectives = {{.backward_input = {kGather}, .backward_weight = {kScatter, kExchange}}}});
  EXPECT_EQ(refusal_of(plan), "");
  PlanOp& whole = *find_op(plan, 0, OpKind::kCompute, ActionKind::kBackward, 0);
  --whole.collectives;
  EXPECT_THAT(refusal_of(plan), HasSubstr("it makes 3 collectives, the stage's compute 0B0"));
}

TEST(VerifyTest, RefusesCollectivesThatStandElsewhere) {
  const auto with = [](const char* name, OpKind kind, ActionKind action, int first, int count) {
    Plan plan = plan_with_collectives(name);
    PlanOp& op = *find_op(plan, 0, kind, action, 2);
    op.first_collective = first;
    op.collectives = count;
    return refusal_of(plan);
  };
  const auto forward = [&](int first, int count) {
    return with("1f1b", OpKind::kCompute, ActionKind::kForward, first, count);
  };
  EXPECT_THAT(with("1f1b", OpKind::kStartSend, ActionKind::kSendForward, 0, 1),
              HasSubstr("it makes collectives; only F, B, I, W and RECOMPUTE do"));
  EXPECT_THAT(with("1f1b", OpKind::kRelease, ActionKind::kBackward, 0, 1),
              HasSubstr("it makes collectives; only F, B, I, W and RECOMPUTE do"));
  EXPECT_THAT(forward(-1, 2), HasSubstr("it names 2 collectives from -1 on; the plan has 8"));
  EXPECT_THAT(forward(0, -1), HasSubstr("it names -1 collectives from 0 on; the plan has 8"));
  EXPECT_THAT(forward(7, 2), HasSubstr("it names 2 collectives from 7 on; the plan has 8"));
  EXPECT_THAT(forward(9, 0), HasSubstr("it names 0 collectives from 9 on; the plan has 8"));
  Plan plan = plan_with_collectives("forward-only");
  for (PlannedCollective& each : plan.collectives) each.axis = CollectiveAxis::kReplica;
  EXPECT_THAT(refusal_of(plan),
              HasSubstr("it makes collectives over the replicas in a forward-only plan"));
  plan = plan_with_collectives("1f1b");
  plan.collectives[1].type = DType::kBf16;
  EXPECT_THAT(refusal_of(plan), HasSubstr("collective 1 of the plan cannot be: legal are sums of "
                                          "f32 and of f64"));
}

// A queue's group has all of its messages at its head at once: an action within it may wait for
// ranks that wait for one of these messages.
TEST(VerifyTest, RefusesCollectivesWithinAGroupOfMessages) {
  std::vector<StageCollectives> collectives(3);
  for (StageCollectives& each : collectives) each.backward_weight = {kGather};
  Plan plan = make_plan(lower(generate("zb-h1", {3, 4, 1}), {}), {},
                        {.order = MessageOrder::kGlobal, .collectives = collectives});
  ASSERT_EQ(refusal_of(plan), "");
  std::vector<std::string> refusals;
  for (RankPlan& rank : plan.ranks) {
    const std::vector<PlanOp> before = rank.ops;
    for (std::size_t i = 1; i < before.size(); ++i) {
      if (!before[i].with_previous) continue;
      for (std::size_t later = i + 1; later < before.size(); ++later) {
        if (before[later].collectives == 0) continue;
        const auto place = rank.ops.begin() + static_cast<std::ptrdiff_t>(i);
        const auto moved = rank.ops.begin() + static_cast<std::ptrdiff_t>(later);
        std::rotate(place, moved, moved + 1);
        refusals.push_back(refusal_of(plan));
        rank.ops = before;
      }
    }
  }
  EXPECT_THAT(refusals, Not(::testing::Contains("")));
  EXPECT_THAT(refusals, ::testing::Contains(HasSubstr("can be in a group with the op before")));
}

// Aim: below 1 s in all. Lists are kept once per stage, so they take little beside the ops.
TEST(VerifyTest, ProvesAndSimulatesALargePlanWithManyCollectives) {
  const int ranks = 64, stages = 2 * ranks;
  const std::vector<PlannedCollective> list(16, kGather);
  const std::vector<StageCollectives> collectives(static_cast<std::size_t>(stages),
                                                  {.forward = list, .backward_input = list});
  const std::clock_t start = std::clock();
  const Schedule schedule = generate("interleaved", {ranks, 256, 2});
  const Plan plan = make_plan(lower(schedule, {}), {}, {.collectives = collectives});
  EXPECT_TRUE(progresses_tagged(plan));
  SimulationTimes times;
  times.stages = {StageTimes{}};
  times.collectives = collectives;
  for (auto& axis : times.collective_costs) axis.fill({.latency = 0.01});
  const Simulation simulation = simulate(schedule, times, {.timeline = false});
  EXPECT_NEAR(simulation.busy[0], 2 * 256 * (3 + 2 * 16 * 0.01), 1e-6);
  EXPECT_EQ(plan.collectives.size(), static_cast<std::size_t>(stages) * 2 * 16);
  std::size_t ops = 0;
  for (const RankPlan& rank : plan.ranks) ops += rank.ops.size();
  std::printf("%.0f ms; %zu ops, %zu KiB; %zu collectives, %zu KiB\n",
              1e3 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC, ops,
              ops * sizeof(PlanOp) / 1024, plan.collectives.size(),
              plan.collectives.size() * sizeof(PlannedCollective) / 1024);
}

}  // namespace
}  // namespace sluice
