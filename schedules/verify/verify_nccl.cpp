#include "schedules/verify/verify_nccl.hpp"

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "schedules/lanes/lane_queues.hpp"
#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"
#include "schedules/verify/verify_walk.hpp"

namespace sluice {
namespace {

// Communicators as in-order queues of groups, in which nothing takes time.
class QueueReplay : public ProgressWalk<QueueReplay> {
 public:
  QueueReplay(const Plan& plan, const PlanTrace& trace, TransportModel model)
      : ProgressWalk(plan, trace),
        model_(model),
        queues_(queue_count(plan, trace, model), lanes_of(plan, trace, model)),
        last_group_(queue_count(plan, trace, model)),
        groups_(plan.ranks.size()) {}

  bool issue(std::size_t rank, const ProgressEvent& event) {
    if (!event.with_previous) ++groups_[rank];
    LaneMember member;
    member.channel = event.channel;
    member.index = event.index;
    member.receives = event.kind == OpKind::kPostRecv;
    std::int64_t& last = last_group_[queues_.queue_of(member.channel, member.receives)];
    member.joins = event.with_previous && last == groups_[rank];
    last = groups_[rank];
    queues_.issue(member);
    const ProgressEvent* next = next_event(rank);
    if (next != nullptr && next->with_previous) return true;
    queues_.settle([this](const LaneMember& each, double) {
      if (each.receives) {
        wake_waiting(receiver_of(each.channel), OpKind::kWaitRecv, each.channel);
      } else {
        wake_waiting(sender_of(each.channel), OpKind::kWaitSend, each.channel);
      }
    });
    return true;
  }

  bool is_done(const ProgressEvent& wait) const {
    return queues_.is_done(wait.channel, wait.index, wait.kind == OpKind::kWaitRecv);
  }

  Violation deadlock(int first_blocked) const {
    return follow(model_, Holder{false, at(first_blocked)});
  }

 private:
  friend class ProgressWalk<QueueReplay>;

  // What is blocked: a rank at a wait or a collective, or a queue whose first group runs.
  struct Holder {
    bool is_queue = false;
    std::size_t index = 0;
    friend bool operator==(const Holder&, const Holder&) = default;
  };

  static std::size_t queue_count(const Plan& plan, const PlanTrace& trace, TransportModel model) {
    return model == TransportModel::kNccl ? plan.ranks.size() : 2 * trace.pairs.size();
  }

  static std::vector<LaneChannel> lanes_of(const Plan& plan, const PlanTrace& trace,
                                           TransportModel model) {
    std::vector<LaneChannel> lanes;
    for (std::size_t channel = 0; channel < plan.channels.size(); ++channel) {
      const std::size_t pair = 2 * at(trace.channels[channel].pair);
      lanes.push_back(model == TransportModel::kNccl
                          ? LaneChannel{at(plan.channels[channel].from_rank),
                                        at(plan.channels[channel].to_rank)}
                          : LaneChannel{pair, pair + 1});
    }
    return lanes;
  }

  // The rest puts a deadlock into words.

  bool has_ended(const Holder& holder) const {
    return !holder.is_queue && finished(static_cast<int>(holder.index));
  }

  int rank_of(const Holder& holder) const {
    if (!holder.is_queue) return static_cast<int>(holder.index);
    const LaneMember& member = queues_.waiting(holder.index).front();
    return static_cast<int>(member.receives ? receiver_of(member.channel)
                                            : sender_of(member.channel));
  }

  // Position of the op that issued the member.
  int op_position_of(const LaneMember& member, int rank) const {
    const OpKind kind = member.receives ? OpKind::kPostRecv : OpKind::kStartSend;
    std::int32_t left = member.index;
    const std::vector<PlanOp>& ops = ops_of(rank);
    std::size_t i = 0;
    while (ops[i].kind != kind || ops[i].channel != member.channel || left-- > 0) ++i;
    return static_cast<int>(i);
  }

  int position_of(const Holder& holder) const {
    const int rank = rank_of(holder);
    return holder.is_queue ? op_position_of(queues_.unmatched(holder.index), rank)
                           : op_position(rank);
  }

  Holder awaited(const Holder& holder) const {
    if (holder.is_queue) {
      const LaneMember& member = queues_.unmatched(holder.index);
      const std::size_t other = queues_.queue_of(member.channel, !member.receives);
      const std::span<const LaneMember> members = queues_.waiting(other);
      const bool issued = std::any_of(members.begin(), members.end(), [&](const LaneMember& each) {
        return each.channel == member.channel && each.index == member.index &&
               each.receives != member.receives;
      });
      if (issued) return {true, other};
      return {false, member.receives ? sender_of(member.channel) : receiver_of(member.channel)};
    }
    const ProgressEvent& event = event_at(holder.index);
    if (event.kind == OpKind::kWaitRecv || event.kind == OpKind::kWaitSend) {
      return {true, queues_.queue_of(event.channel, event.kind == OpKind::kWaitRecv)};
    }
    return {false, at(missing_party(event))};
  }

  std::string name_of_queue(std::size_t index) const {
    if (model_ == TransportModel::kNccl) return concat("the queue of rank ", index);
    const PairDepth& pair = trace_.pairs[index / 2].depth;
    return concat("rank ", index % 2 == 0 ? pair.from_rank : pair.to_rank,
                  "'s end of the queue from rank ", pair.from_rank, " to rank ", pair.to_rank);
  }

  std::string waits(const Holder& holder) const {
    const int rank = rank_of(holder);
    const int position = position_of(holder);
    const Holder next = awaited(holder);
    const std::string whom =
        next.is_queue ? name_of_queue(next.index) : concat("rank ", next.index);
    const PlanOp& op = ops_of(rank)[at(position)];
    if (!holder.is_queue) {
      return concat("rank ", rank, " at ", op_text(rank, position), " waits for ", whom,
                    next.is_queue ? "" : " to join");
    }
    const Channel& channel = channel_of(op.channel);
    const Action wanted = op.kind == OpKind::kPostRecv ? sending_action(channel, op.micro_batch)
                                                       : receiving_action(channel, op.micro_batch);
    return name_of_queue(holder.index) + " is at " + op_text(rank, position) + " and waits for " +
           whom + " to " + (next.is_queue ? "come to " : "issue ") + to_string(wanted);
  }

  const TransportModel model_;
  LaneQueues queues_;                     // by rank, or by pair * 2 + receives
  std::vector<std::int64_t> last_group_;  // [queue] of the rank, which last issued into it
  std::vector<std::int64_t> groups_;      // [rank] issued so far
};

// Without tags the n-th send from one rank to another meets the n-th receive there, on any
// channel. Returns what is wrong with that, if anything.
std::optional<Violation> check_pair_orders(const Plan& plan, const PlanTrace& trace,
                                           TransportModel model) {
  if (std::all_of(trace.pairs.begin(), trace.pairs.end(),
                  [](const PairTrace& pair) { return pair.channels < 2; })) {
    return std::nullopt;
  }
  const auto pair_of = [&](std::int32_t channel) { return at(trace.channels[at(channel)].pair); };
  // [pair * 2 + receives] channels in the order of their messages.
  std::vector<std::vector<std::int32_t>> orders(2 * trace.pairs.size());
  for (const std::vector<ProgressEvent>& events : trace.events) {
    for (const ProgressEvent& event : events) {
      const bool receives = event.kind == OpKind::kPostRecv;
      if (!receives && event.kind != OpKind::kStartSend) continue;
      const std::size_t pair = pair_of(event.channel);
      if (trace.pairs[pair].channels > 1) {
        orders[2 * pair + (receives ? 1 : 0)].push_back(event.channel);
      }
    }
  }
  for (std::size_t pair = 0; pair < trace.pairs.size(); ++pair) {
    const std::vector<std::int32_t>& sent = orders[2 * pair];
    const std::vector<std::int32_t>& received = orders[2 * pair + 1];
    const auto differs = std::mismatch(sent.begin(), sent.end(), received.begin());
    if (differs.first == sent.end()) continue;
    // The op of either side.
    const auto find = [&](int rank, OpKind kind, std::ptrdiff_t left) {
      const std::vector<PlanOp>& ops = plan.ranks[at(rank)].ops;
      for (std::size_t i = 0;; ++i) {
        if (ops[i].kind != kind || pair_of(ops[i].channel) != pair) continue;
        if (left-- == 0) return static_cast<int>(i);
      }
    };
    const std::ptrdiff_t number = differs.first - sent.begin();
    const PairDepth& ranks = trace.pairs[pair].depth;
    const int sends = find(ranks.from_rank, OpKind::kStartSend, number);
    const int posts = find(ranks.to_rank, OpKind::kPostRecv, number);
    const auto text = [&](int rank, int position) {
      return concat("op ", position, " (", plan.ranks[at(rank)].ops[at(position)], ") of rank ",
                    rank);
    };
    return Violation{ranks.to_rank, posts,
                     concat("under the ", name_of(model),
                            " model the wrong tensor is delivered: ", text(ranks.to_rank, posts),
                            " meets ", text(ranks.from_rank, sends), ", since both are number ",
                            number, " between these ranks; both ends must issue in one order")};
  }
  return std::nullopt;
}

}  // namespace

std::optional<Violation> replay_queues(const Plan& plan, const PlanTrace& trace,
                                       TransportModel model) {
  if (auto wrong = check_pair_orders(plan, trace, model)) return wrong;
  return QueueReplay(plan, trace, model).run();
}

}  // namespace sluice
