// Several whole replicas: no plan whose sums over replicas overlap with its messages deadlocks, not
// even where a rank's messages and sums share one in-order queue. verify() replays one replica
// without sums, for this reason:
//
// A group or a wait ends once several other things have happened, and nothing that happened is
// undone. So one set of events happens at any speed: the least set closed under these rules.
// All replicas have one list, so exchanging two replicas maps the rules, and thus the set, to
// themselves. A part of a sum therefore comes to the head of its queue in every replica or in none.
// A part that comes to the head ends, as if it waited for no other rank. Every replica thus goes as
// far as one alone whose queues hold no sums.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>

#include "tests/schedules/hand_made.hpp"

namespace sluice {
namespace {

using testing::plan_with_early_sums;

constexpr int kPieces = 3;  // of a sum: while its stage's last action runs, and at its REDUCE_GRAD

// One side of a message, or a rank's part in one piece of a sum.
struct Part {
  bool sum = false;
  bool receives = false;
  int stage = -1, piece = -1;          // of a sum
  int channel = -1, micro_batch = -1;  // of a message
};

// Ranks of several replicas, one queue of groups each: the first group runs, and ends when the
// other side of each of its messages runs, or the same piece of the sum in every replica.
class Job {
 public:
  explicit Job(std::vector<Plan> replicas) : replicas_(std::move(replicas)) {
    ranks_.resize(replicas_.size());
    for (std::size_t r = 0; r < replicas_.size(); ++r) ranks_[r].resize(replicas_[r].ranks.size());
  }

  // Whether every rank comes to the end of its list.
  bool ends() {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        for (std::size_t s = 0; s < ranks_[r].size(); ++s) {
          while (step(r, s)) moved = true;
          if (end_first(r, s)) moved = true;
        }
      }
    }
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      for (std::size_t s = 0; s < ranks_[r].size(); ++s) {
        if (ranks_[r][s].next < ops_of(r, s).size()) return false;
      }
    }
    return true;
  }

 private:
  using Message = std::tuple<int, int, bool>;  // channel, micro-batch, received

  struct RankState {
    std::size_t next = 0;                 // op
    std::deque<std::vector<Part>> queue;  // groups
    std::set<Message> ended;              // sides of messages
    std::size_t sums = 0;                 // pieces issued and not ended
  };

  const std::vector<PlanOp>& ops_of(std::size_t r, std::size_t s) const {
    return replicas_[r].ranks[s].ops;
  }

  static bool adds(const PlanOp& op) {
    return op.kind == OpKind::kCompute &&
           (op.action == ActionKind::kBackward || op.action == ActionKind::kBackwardWeight);
  }

  bool ends_gradients(std::size_t r, std::size_t s, std::size_t position) const {
    const std::vector<PlanOp>& ops = ops_of(r, s);
    if (!adds(ops[position])) return false;
    return std::none_of(
        ops.begin() + static_cast<std::ptrdiff_t>(position) + 1, ops.end(),
        [&](const PlanOp& later) { return adds(later) && later.stage == ops[position].stage; });
  }

  void issue_sums(RankState& rank, int stage, int first, int count) {
    for (int piece = first; piece < first + count; ++piece) {
      rank.queue.push_back({Part{.sum = true, .stage = stage, .piece = piece}});
      ++rank.sums;
    }
  }

  // False where the rank has to wait.
  bool step(std::size_t r, std::size_t s) {
    RankState& rank = ranks_[r][s];
    if (rank.next == ops_of(r, s).size()) return false;
    const PlanOp& op = ops_of(r, s)[rank.next];
    switch (op.kind) {
      case OpKind::kPostRecv:
      case OpKind::kStartSend: {
        if (!op.with_previous) rank.queue.emplace_back();
        rank.queue.back().push_back(Part{.receives = op.kind == OpKind::kPostRecv,
                                         .channel = op.channel,
                                         .micro_batch = op.micro_batch});
        break;
      }
      case OpKind::kWaitRecv:
      case OpKind::kWaitSend:
        if (rank.ended.count({op.channel, op.micro_batch, op.kind == OpKind::kWaitRecv}) == 0) {
          return false;
        }
        break;
      case OpKind::kCompute:
        if (ends_gradients(r, s, rank.next)) issue_sums(rank, op.stage, 0, kPieces - 1);
        break;
      case OpKind::kRelease:
      case OpKind::kFold:
      case OpKind::kStartMove:
      case OpKind::kWaitMove:
      case OpKind::kUnshard:
      case OpKind::kReshard:
        break;
      case OpKind::kReduceGrad:
        issue_sums(rank, op.stage, kPieces - 1, 1);
        break;
      case OpKind::kReduceTied:
      case OpKind::kOptimizer:
        if (rank.sums > 0) return false;
        break;
    }
    ++rank.next;
    return true;
  }

  // Whether the group is whole: no op that belongs to it is still to be issued.
  bool closed(std::size_t r, std::size_t s) const {
    const RankState& rank = ranks_[r][s];
    return rank.queue.size() > 1 || rank.next == ops_of(r, s).size() ||
           !ops_of(r, s)[rank.next].with_previous;
  }

  // Whether the first group of that queue runs and has such a part.
  template <class Wanted>
  bool runs(std::size_t r, std::size_t s, const Wanted& wanted) const {
    const RankState& rank = ranks_[r][s];
    if (rank.queue.empty() || !closed(r, s)) return false;
    return std::any_of(rank.queue.front().begin(), rank.queue.front().end(), wanted);
  }

  bool matched(std::size_t r, std::size_t s, const Part& part) const {
    if (part.sum) {
      for (std::size_t other = 0; other < ranks_.size(); ++other) {
        const bool there = runs(other, s, [&](const Part& p) {
          return p.sum && p.stage == part.stage && p.piece == part.piece;
        });
        if (!there && summed_.count({other, part.stage, part.piece}) == 0) return false;
      }
      return true;
    }
    const Channel& channel = replicas_[r].channels[static_cast<std::size_t>(part.channel)];
    const auto peer = static_cast<std::size_t>(part.receives ? channel.from_rank : channel.to_rank);
    return ranks_[r][peer].ended.count({part.channel, part.micro_batch, !part.receives}) > 0 ||
           runs(r, peer, [&](const Part& p) {
             return !p.sum && p.channel == part.channel && p.micro_batch == part.micro_batch &&
                    p.receives != part.receives;
           });
  }

  bool end_first(std::size_t r, std::size_t s) {
    RankState& rank = ranks_[r][s];
    if (rank.queue.empty() || !closed(r, s)) return false;
    const std::vector<Part>& group = rank.queue.front();
    if (!std::all_of(group.begin(), group.end(),
                     [&](const Part& part) { return matched(r, s, part); })) {
      return false;
    }
    for (const Part& part : group) {
      if (part.sum) {
        summed_.insert({r, part.stage, part.piece});
        --rank.sums;
      } else {
        rank.ended.insert({part.channel, part.micro_batch, part.receives});
      }
    }
    rank.queue.pop_front();
    return true;
  }

  std::vector<Plan> replicas_;
  std::vector<std::vector<RankState>> ranks_;           // [replica][rank]
  std::set<std::tuple<std::size_t, int, int>> summed_;  // replica, stage, piece
};

// Every schedule, with the issue order that NCCL's queues need.
template <class Visit>
void for_each_plan(const Visit& visit) {
  for (const std::string& name : schedule_names()) {
    for (const int p : {1, 2, 3, 4}) {
      for (const int v : {1, 2, 3}) {
        for (const int m : {1, 2, 3, 5, 8}) {
          std::optional<Schedule> schedule;
          try {
            schedule = generate(name, {p, m, v});
          } catch (const Error&) {
            continue;  // v is not for this schedule
          }
          SCOPED_TRACE(name + " p = " + std::to_string(p) + ", v = " + std::to_string(v) +
                       ", m = " + std::to_string(m));
          visit(plan_with_early_sums(*schedule, {1, 2, MessageOrder::kGlobal}));
        }
      }
    }
  }
}

TEST(ReplicasTest, SumsBesideMessagesStopNoQueue) {
  for_each_plan([](const Plan& plan) {
    const Verification verification = verify(plan);
    ASSERT_TRUE(verification.ok()) << verification.violation->message;
    EXPECT_TRUE(verification.progresses(TransportModel::kNccl));
    for (const std::size_t d : {2UL, 3UL}) {
      EXPECT_TRUE(Job(std::vector<Plan>(d, plan)).ends()) << d << " replicas";
    }
  });
}

TEST(ReplicasTest, APlanThatStandsStillAloneStandsStillBesideItsLike) {
  const Plan plan = plan_with_early_sums(generate("1f1b", {2, 2, 1}));  // kReceivesAhead
  ASSERT_FALSE(verify(plan).progresses(TransportModel::kNccl));
  EXPECT_FALSE(Job({plan, plan}).ends());
}

// A rank of one replica that sums where its other self does not: each queue waits for the other.
TEST(ReplicasTest, ListsThatDifferBetweenReplicasMayDeadlock) {
  const Schedule schedule = generate("interleaved", {2, 4, 2});
  const auto plan = [&](std::vector<bool> early) {
    LowerOptions lowering;
    lowering.overlapped_grad_sums = std::move(early);
    return make_plan(lower(schedule, lowering), {}, {1, 2, MessageOrder::kGlobal});
  };
  const Plan first = plan({true, false, true, false});
  const Plan second = plan({false, true, false, true});
  EXPECT_TRUE(Job({first, first}).ends());
  EXPECT_TRUE(Job({second, second}).ends());
  EXPECT_FALSE(Job({first, second}).ends());
}

}  // namespace
}  // namespace sluice
