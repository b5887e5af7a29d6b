// Plans for in-order queues of groups: what verify() says of them, and that make_plan() makes them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <stdexcept>
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

constexpr TransportModel kEager = TransportModel::kEager;
constexpr TransportModel kRendezvous = TransportModel::kRendezvous;
constexpr TransportModel kBounded = TransportModel::kBounded;
constexpr TransportModel kNccl = TransportModel::kNccl;
constexpr TransportModel kNcclEdges = TransportModel::kNcclEdges;

PlanOptions global_order(int receive_ahead = 1, int send_slots = 2) {
  return {receive_ahead, send_slots, MessageOrder::kGlobal};
}

template <class Visit>
void for_each_generated(const Visit& visit) {
  for (const std::string& name : schedule_names()) {
    for (const int p : {1, 2, 3, 4, 8}) {
      for (const int v : {1, 2, 3}) {
        for (const int m : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16}) {
          try {
            (void)stages_of(name, {p, m, v});
          } catch (const Error&) {
            continue;  // v is not for this schedule
          }
          SCOPED_TRACE(name + " p = " + std::to_string(p) + ", v = " + std::to_string(v) +
                       ", m = " + std::to_string(m));
          visit(generate(name, {p, m, v}));
        }
      }
    }
  }
}

std::string deadlock_of(const Verification& verification, TransportModel model) {
  for (const Deadlock& deadlock : verification.deadlocks) {
    if (deadlock.model == model) return deadlock.violation.message;
  }
  return "none";
}

// Each receive issued just before its wait, every op a group of its own.
Plan naive(Plan plan) {
  for (RankPlan& rank : plan.ranks) {
    std::vector<PlanOp> ops;
    for (const PlanOp& op : rank.ops) {
      if (op.kind == OpKind::kPostRecv) continue;
      if (op.kind == OpKind::kWaitRecv) ops.emplace_back(op).kind = OpKind::kPostRecv;
      ops.emplace_back(op).with_previous = false;
    }
    rank.ops = std::move(ops);
  }
  return plan;
}

TEST(NcclTest, EveryGeneratedScheduleInTheGlobalOrderEndsUnderEveryModel) {
  for_each_generated([](const Schedule& schedule) {
    for (const PlanOptions& options : {global_order(), global_order(0, 1), global_order(3, 1)}) {
      const Plan plan = plan_of(schedule, {}, options);
      const Verification verification = verify(plan);
      ASSERT_TRUE(verification.ok()) << verification.violation->message;
      ASSERT_EQ(verification.progresses_under.size(), std::size_t{kTransportModels})
          << verification.deadlocks.front().violation.message;
      EXPECT_EQ(plan.exact, is_exact(schedule));
    }
  });
}

// What schedules/README.md says of each transport model.
TEST(NcclTest, HoldsWhatThePageSays) {
  for_each_generated([](const Schedule& schedule) {
    const Placement& placement = schedule.placement;
    if (placement.ranks() == 1) return;
    const bool one_chunk = placement.stages() == placement.ranks();
    const Verification verification = verify(plan_of(schedule));
    EXPECT_TRUE(verification.progresses(kBounded));
    EXPECT_EQ(verification.progresses(kNccl), schedule.forward_only && one_chunk);
    if (!schedule.forward_only || one_chunk) {
      EXPECT_EQ(verification.progresses(kNcclEdges), one_chunk);
    }
  });
}

TEST(NcclTest, ReceivesJustBeforeTheirUseDeadlockInOneQueueAndTheCycleIsNamed) {
  for (const char* name : {"1f1b", "interleaved", "zb-h1", "interleaved-zb"}) {
    SCOPED_TRACE(name);
    const Verification verification = verify(naive(plan_of(generate(name, {4, 8, 1}))));
    ASSERT_FALSE(verification.progresses(kNccl));
    EXPECT_THAT(deadlock_of(verification, kNccl),
                AllOf(HasSubstr("deadlocks: the queue of rank 2 is at op 7 (send 2SEND_F1 "),
                      HasSubstr("and waits for the queue of rank 3 to come to 3RECV_F1; the queue "
                                "of rank 3 is at op "),
                      HasSubstr("2RECV_B0")));
  }
  EXPECT_THAT(deadlock_of(verify(naive(plan_of(generate("zb-v", {4, 8, 1})))), kNccl),
              HasSubstr("the wrong tensor is delivered"));
  const Verification verification = verify(naive(plan_of(generate("1f1b", {2, 2, 1}))));
  ASSERT_TRUE(verification.ok());
  EXPECT_THAT(verification.progresses_under,
              ElementsAre(kEager, kRendezvous, kBounded, kNcclEdges));
  ASSERT_EQ(verification.deadlocks.size(), 1U);
  EXPECT_EQ(verification.deadlocks[0].violation.rank, 0);
  EXPECT_EQ(verification.deadlocks[0].violation.position, 3);
  EXPECT_EQ(verification.deadlocks[0].violation.message,
            "under the nccl model the plan deadlocks: the queue of rank 0 is at op 3 (send "
            "0SEND_F1 channel 0 output[1]) and waits for the queue of rank 1 to come to 1RECV_F1; "
            "the queue of rank 1 is at op 4 (send 1SEND_B0 channel 1 grad-input[0]) and waits "
            "for the queue of rank 0 to come to 0RECV_B0");
}

TEST(NcclTest, ReceivesPostedAheadBlockTheOneQueueThatTheSendsNeed) {
  const Verification verification = verify(plan_of(generate("1f1b", {2, 1, 1})));
  EXPECT_THAT(verification.progresses_under,
              ElementsAre(kEager, kRendezvous, kBounded, kNcclEdges));
  EXPECT_THAT(
      deadlock_of(verification, kNccl),
      AllOf(HasSubstr("the queue of rank 0 is at op 0 (post 0RECV_B0 channel 1 grad-output[0]) "
                      "and waits for rank 1 to issue 1SEND_B0; rank 1 at op 1 (wait 1RECV_F0 "),
            HasSubstr(" waits for the queue of rank 1; the queue of rank 1 is at op 0 (post "
                      "1RECV_F0 channel 0 input[0]) and waits for the queue of rank 0 to come to "
                      "0SEND_F0")));
}

TEST(NcclTest, ReceivesOfTwoChannelsInAnotherOrderDeliverTheWrongTensor) {
  const Verification verification = verify(plan_of(generate("interleaved", {2, 1, 2})));
  EXPECT_THAT(verification.progresses_under, ElementsAre(kEager, kRendezvous, kBounded));
  for (const TransportModel model : {kNccl, kNcclEdges}) {
    EXPECT_THAT(deadlock_of(verification, model),
                AllOf(HasSubstr("the wrong tensor is delivered: op 1 (post 1RECV_B0 channel 3 "
                                "grad-output[0]) of rank 1 meets op 7 (send 2SEND_F0 channel 4 "
                                "output[0]) of rank 0"),
                      HasSubstr("both are number 1 between these ranks")));
  }
}

std::string issues_of(const RankPlan& rank) {
  std::string text;
  for (const PlanOp& op : rank.ops) {
    if (op.kind != OpKind::kPostRecv && op.kind != OpKind::kStartSend) continue;
    Action action;
    action.kind = op.action;
    action.stage = op.stage;
    action.micro_batch = op.micro_batch;
    text += (op.with_previous ? "+" : text.empty() ? "" : " ") + to_string(action);
  }
  return text;
}

TEST(NcclTest, BothEndsIssueInOneOrderAndWhatCrossesIsOneGroup) {
  const Plan plan = plan_of(generate("1f1b", {3, 3, 1}), {}, global_order());
  EXPECT_EQ(issues_of(plan.ranks[0]), "0SEND_F0 0SEND_F1 0SEND_F2 0RECV_B0 0RECV_B1 0RECV_B2");
  EXPECT_EQ(issues_of(plan.ranks[1]),
            "1RECV_F0 1RECV_F1 1SEND_F0 1RECV_F2 1SEND_F1 1RECV_B0 1SEND_B0 1SEND_F2+1RECV_B1 "
            "1SEND_B1 1RECV_B2 1SEND_B2");
  EXPECT_EQ(issues_of(plan.ranks[2]), "2RECV_F0 2RECV_F1 2SEND_B0 2RECV_F2+2SEND_B1 2SEND_B2");
}

// The members of a group may stand in any order; two groups may not.
TEST(NcclTest, TheGroupingIsPartOfTheProof) {
  const Plan whole = plan_of(generate("1f1b", {2, 4, 1}), {}, global_order());
  ASSERT_TRUE(verify(whole).progresses(kNccl));
  int crossings = 0;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    for (std::size_t i = 0; i + 1 < whole.ranks[rank].ops.size(); ++i) {
      if (!whole.ranks[rank].ops[i + 1].with_previous) continue;
      ++crossings;
      Plan plan = whole;
      PlanOp& first = plan.ranks[rank].ops[i];
      PlanOp& second = plan.ranks[rank].ops[i + 1];
      std::swap(first, second);
      std::swap(first.with_previous, second.with_previous);
      EXPECT_TRUE(verify(plan).progresses(kNccl)) << "grouped, in another order";
      second.with_previous = false;
      EXPECT_TRUE(verify(plan).progresses(kNccl)) << "the other end's group holds both";
      for (RankPlan& each : plan.ranks) {
        for (PlanOp& op : each.ops) op.with_previous = false;
      }
      EXPECT_THAT(deadlock_of(verify(plan), kNccl), HasSubstr("deadlocks")) << "two queues cross";
      EXPECT_TRUE(verify(plan).progresses(kNcclEdges));
    }
  }
  EXPECT_GT(crossings, 2);
}

TEST(NcclTest, RefusesAGroupWithSomethingElseInIt) {
  Plan plan = plan_of(generate("1f1b", {2, 2, 1}), {}, global_order());
  for (PlanOp& op : plan.ranks[0].ops) op.with_previous = op.kind == OpKind::kStartSend;
  const Verification verification = verify(plan);
  ASSERT_FALSE(verification.ok());
  EXPECT_THAT(verification.violation->message,
              AllOf(HasSubstr("rank 0, op 1 (send 0SEND_F0 "),
                    HasSubstr("only a post or a start right after another one can be in a group")));
}

TEST(NcclTest, NamesTheRankThatNeverJoinsACollective) {
  Plan plan = plan_of(generate("1f1b", {3, 2, 1}), {}, global_order());
  plan.ranks[2].ops.pop_back();  // OPTIMIZER
  plan.ranks[2].ops.pop_back();  // REDUCE_GRAD
  for (const TransportModel model : {kNccl, kNcclEdges}) {
    EXPECT_THAT(deadlock_of(verify(plan), model),
                AllOf(HasSubstr("(optimizer 0OPTIMIZER) waits for rank 2 to join"),
                      HasSubstr("whose list has ended")));
  }
}

TEST(NcclTest, ReceivesAheadAreIssuedWhereTheirTurnHasComeAndASlotIsFree) {
  const Plan plan = plan_of(generate("gpipe", {2, 4, 1}), {}, global_order(2));
  const std::vector<PlanOp>& ops = plan.ranks[1].ops;
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(ops[i].kind, OpKind::kPostRecv) << i;
  const std::vector<PlanOp>& first = plan.ranks[0].ops;
  const auto is_post = [](const PlanOp& op) { return op.kind == OpKind::kPostRecv; };
  const auto post = std::find_if(first.begin(), first.end(), is_post);
  const auto last_send = std::find_if(
      first.rbegin(), first.rend(), [](const PlanOp& op) { return op.kind == OpKind::kStartSend; });
  EXPECT_GT(post - first.begin(), &*last_send - first.data()) << "gradients come after all sends";
}

// What the models say, played without cleverness: again and again over all ranks until nothing
// changes.
class PlainReplay {
 public:
  PlainReplay(const Plan& plan, TransportModel model)
      : plan_(plan), model_(model), cursors_(plan.ranks.size()) {
    for (const RankPlan& rank : plan.ranks) {
      for (const PlanOp& op : rank.ops) joins_ += op.kind == OpKind::kOptimizer ? 1 : 0;
    }
  }

  bool ends() {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t rank = 0; rank < cursors_.size(); ++rank) {
        while (cursors_[rank] < plan_.ranks[rank].ops.size() && step(rank)) {
          ++cursors_[rank];
          moved = true;
        }
      }
      for (auto& [name, queue] : queues_) moved = end_first(queue) || moved;
    }
    for (std::size_t rank = 0; rank < cursors_.size(); ++rank) {
      if (cursors_[rank] < plan_.ranks[rank].ops.size()) return false;
    }
    return true;
  }

 private:
  using Message = std::pair<int, int>;  // channel, micro-batch
  struct Entry {
    Message message;
    bool receives = false;
    int group = 0;
  };

  bool queued() const { return model_ == kNccl || model_ == kNcclEdges; }

  int group_of(std::size_t rank) const {
    int group = 0;
    for (std::size_t i = 0; i <= cursors_[rank]; ++i) {
      const PlanOp& op = plan_.ranks[rank].ops[i];
      const bool issues = op.kind == OpKind::kPostRecv || op.kind == OpKind::kStartSend;
      group += issues && !op.with_previous ? 1 : 0;
    }
    return group;
  }

  bool step(std::size_t rank) {
    const PlanOp& op = plan_.ranks[rank].ops[cursors_[rank]];
    const Message message{op.channel, op.micro_batch};
    const bool receives = op.kind == OpKind::kPostRecv || op.kind == OpKind::kWaitRecv;
    switch (op.kind) {
      case OpKind::kPostRecv:
      case OpKind::kStartSend: {
        issued_[{message, receives}] = true;
        if (!queued()) return true;
        const Channel& channel = plan_.channels[static_cast<std::size_t>(op.channel)];
        const std::vector<int> name =
            model_ == kNccl
                ? std::vector<int>{static_cast<int>(rank)}
                : std::vector<int>{channel.from_rank, channel.to_rank, receives ? 1 : 0};
        queues_[name].push_back({message, receives, group_of(rank)});
        return true;
      }
      case OpKind::kWaitRecv:
      case OpKind::kWaitSend:
        if (queued()) return ended_[{message, receives}];
        return (model_ == kEager && !receives) || issued_[{message, !receives}];
      case OpKind::kOptimizer:
        arrived_[rank] = true;
        return static_cast<int>(arrived_.size()) == joins_;
      default:
        return true;
    }
  }

  std::vector<Entry> first_group(const std::vector<Entry>& queue) const {
    std::vector<Entry> group;
    for (const Entry& entry : queue) {
      if (entry.group == queue.front().group) group.push_back(entry);
    }
    return group;
  }

  bool runs(const Message& message, bool receives) const {
    for (const auto& [name, queue] : queues_) {
      for (const Entry& entry : first_group(queue)) {
        if (entry.message == message && entry.receives == receives) return true;
      }
    }
    const auto ended = ended_.find({message, receives});
    return ended != ended_.end() && ended->second;
  }

  bool end_first(std::vector<Entry>& queue) {
    const std::vector<Entry> group = first_group(queue);
    for (const Entry& entry : group) {
      if (!runs(entry.message, !entry.receives)) return false;
    }
    for (const Entry& entry : group) ended_[{entry.message, entry.receives}] = true;
    queue.erase(queue.begin(), queue.begin() + static_cast<std::ptrdiff_t>(group.size()));
    return !group.empty();
  }

  const Plan& plan_;
  const TransportModel model_;
  std::vector<std::size_t> cursors_;
  std::map<std::vector<int>, std::vector<Entry>> queues_;
  std::map<std::pair<Message, bool>, bool> issued_, ended_;  // by message and "receives"
  std::map<std::size_t, bool> arrived_;
  int joins_ = 0;
};

// Exchanges neighbouring posts and starts and moves group borders, by a fixed generator.
Plan shuffled(Plan plan, std::uint32_t seed) {
  const auto random = [&seed](std::size_t below) {
    seed = seed * 1664525U + 1013904223U;
    return static_cast<std::size_t>(seed >> 8U) % below;
  };
  const auto issues = [](const PlanOp& op) {
    return op.kind == OpKind::kPostRecv || op.kind == OpKind::kStartSend;
  };
  for (RankPlan& rank : plan.ranks) {
    for (std::size_t i = 1; i < rank.ops.size(); ++i) {
      PlanOp& op = rank.ops[i];
      PlanOp& before = rank.ops[i - 1];
      if (!issues(op) || !issues(before)) continue;
      if (random(4) == 0 && op.channel != before.channel) {
        std::swap(op, before);
        std::swap(op.with_previous, before.with_previous);
      }
      if (random(4) == 0) op.with_previous = !op.with_previous;
    }
  }
  return plan;
}

TEST(NcclTest, AgreesWithThePlainReplayOnPlansThatWorkAndPlansThatDoNot) {
  std::map<bool, int> outcomes;
  for (const char* name : {"1f1b", "gpipe", "interleaved", "zb-v"}) {
    for (const int m : {2, 5}) {
      const Schedule schedule = generate(name, {3, m, 1});
      for (const MessageOrder order : {MessageOrder::kReceivesAhead, MessageOrder::kGlobal}) {
        const Plan whole = plan_of(schedule, {}, {1, 2, order});
        for (std::uint32_t seed = 0; seed < 12; ++seed) {
          const Plan plan = seed == 0 ? whole : seed == 1 ? naive(whole) : shuffled(whole, seed);
          const Verification verification = verify(plan);
          ASSERT_TRUE(verification.ok()) << verification.violation->message;
          for (const TransportModel model : {kEager, kRendezvous, kNccl, kNcclEdges}) {
            const std::string why = deadlock_of(verification, model);
            if (why.find("wrong tensor") != std::string::npos) continue;
            EXPECT_EQ(verification.progresses(model), PlainReplay(plan, model).ends())
                << name << " m = " << m << ", seed " << seed << ": " << why;
            ++outcomes[verification.progresses(model)];
          }
        }
      }
    }
  }
  EXPECT_GT(outcomes[true], 50);
  EXPECT_GT(outcomes[false], 50);
}

}  // namespace
}  // namespace sluice
