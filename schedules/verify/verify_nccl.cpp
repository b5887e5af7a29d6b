#include "schedules/verify/verify_nccl.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"
#include "schedules/verify/verify_walk.hpp"

namespace sluice {
namespace {

// Communicators as in-order queues of groups. A queue's first group runs once all of it is issued,
// and ends when each of its messages runs at the other end too.
class QueueReplay : public ProgressWalk<QueueReplay> {
 public:
  QueueReplay(const Plan& plan, const PlanTrace& trace, TransportModel model)
      : ProgressWalk(plan, trace),
        model_(model),
        queues_(model == TransportModel::kNccl ? plan.ranks.size() : 2 * trace.pairs.size()),
        groups_(plan.ranks.size()),
        sides_(plan.channels.size()) {}

  bool issue(std::size_t rank, const ProgressEvent& event) {
    if (!event.with_previous) ++groups_[rank];
    const bool receives = event.kind == OpKind::kPostRecv;
    const std::size_t index = queue_of(event.channel, receives);
    Queue& queue = queues_[index];
    const bool joins = event.with_previous && queue.last_group == groups_[rank];
    queue.last_group = groups_[rank];
    queue.members.push_back({event.channel, event.index, receives, joins});
    if (!joins) touched_.push_back(index);
    const ProgressEvent* next = next_event(rank);
    if (next != nullptr && next->with_previous) return true;
    for (const std::size_t each : touched_) {
      if (!queues_[each].runs) run_first(each);
    }
    touched_.clear();
    while (!ended_.empty()) {
      const std::size_t each = ended_.back();
      ended_.pop_back();
      end_first(each);
    }
    return true;
  }

  bool is_done(const ProgressEvent& wait) const {
    const Sides& sides = sides_[at(wait.channel)];
    return (wait.kind == OpKind::kWaitRecv ? sides.received : sides.sent) > wait.index;
  }

  Violation deadlock(int first_blocked) const {
    return follow(model_, Holder{false, at(first_blocked)});
  }

 private:
  friend class ProgressWalk<QueueReplay>;

  struct Member {
    std::int32_t channel = -1, index = -1;
    bool receives = false;
    bool joins = false;  // the group of the member before
  };

  struct Queue {
    std::vector<Member> members;  // from `first` on they are issued and have not ended
    std::size_t first = 0, group_end = 0;
    std::int32_t unmatched = 0;  // members of the group that runs whose other side does not
    bool runs = false;
    std::int64_t last_group = 0;  // of the rank, which last issued into this queue
  };

  // How many of a channel's messages run or ran at each end, and how many have ended there.
  struct Sides {
    std::int32_t sending = 0, receiving = 0, sent = 0, received = 0;
  };

  // What is blocked: a rank at a wait or a collective, or a queue whose first group runs.
  struct Holder {
    bool is_queue = false;
    std::size_t index = 0;
    friend bool operator==(const Holder&, const Holder&) = default;
  };

  std::size_t queue_of(std::int32_t channel, bool receives) const {
    if (model_ == TransportModel::kNccl) {
      return receives ? receiver_of(channel) : sender_of(channel);
    }
    return 2 * at(trace_.channels[at(channel)].pair) + (receives ? 1U : 0U);
  }

  // Starts the group at the head of a queue that has one.
  void run_first(std::size_t index) {
    Queue& queue = queues_[index];
    queue.runs = true;
    queue.unmatched = 0;
    std::size_t i = queue.first;
    do {
      const Member& member = queue.members[i];
      Sides& sides = sides_[at(member.channel)];
      (member.receives ? sides.receiving : sides.sending) = member.index + 1;
      if ((member.receives ? sides.sending : sides.receiving) <= member.index) {
        ++queue.unmatched;
        continue;
      }
      const std::size_t other = queue_of(member.channel, !member.receives);
      if (--queues_[other].unmatched == 0) ended_.push_back(other);
    } while (++i < queue.members.size() && queue.members[i].joins);
    queue.group_end = i;
    if (queue.unmatched == 0) ended_.push_back(index);
  }

  void end_first(std::size_t index) {
    Queue& queue = queues_[index];
    for (; queue.first < queue.group_end; ++queue.first) {
      const Member& member = queue.members[queue.first];
      Sides& sides = sides_[at(member.channel)];
      if (member.receives) {
        sides.received = member.index + 1;
        wake_waiting(receiver_of(member.channel), OpKind::kWaitRecv, member.channel);
      } else {
        sides.sent = member.index + 1;
        wake_waiting(sender_of(member.channel), OpKind::kWaitSend, member.channel);
      }
    }
    queue.runs = false;
    if (queue.first == queue.members.size()) {
      queue.members.clear();
      queue.first = 0;
      return;
    }
    if (queue.first >= kCompactFrom && 2 * queue.first >= queue.members.size()) {
      queue.members.erase(queue.members.begin(),
                          queue.members.begin() + static_cast<std::ptrdiff_t>(queue.first));
      queue.first = 0;
    }
    run_first(index);
  }

  // The rest puts a deadlock into words.

  // The first message of the group that runs whose other side does not.
  const Member& unmatched_member(const Queue& queue) const {
    std::size_t i = queue.first;
    for (;; ++i) {
      const Member& member = queue.members[i];
      const Sides& sides = sides_[at(member.channel)];
      if ((member.receives ? sides.sending : sides.receiving) <= member.index) return member;
    }
  }

  bool has_ended(const Holder& holder) const {
    return !holder.is_queue && finished(static_cast<int>(holder.index));
  }

  int rank_of(const Holder& holder) const {
    if (!holder.is_queue) return static_cast<int>(holder.index);
    const Member& member = queues_[holder.index].members[queues_[holder.index].first];
    return static_cast<int>(member.receives ? receiver_of(member.channel)
                                            : sender_of(member.channel));
  }

  // Position of the op that issued the member.
  int op_position_of(const Member& member, int rank) const {
    const OpKind kind = member.receives ? OpKind::kPostRecv : OpKind::kStartSend;
    std::int32_t left = member.index;
    const std::vector<PlanOp>& ops = ops_of(rank);
    std::size_t i = 0;
    while (ops[i].kind != kind || ops[i].channel != member.channel || left-- > 0) ++i;
    return static_cast<int>(i);
  }

  int position_of(const Holder& holder) const {
    const int rank = rank_of(holder);
    return holder.is_queue ? op_position_of(unmatched_member(queues_[holder.index]), rank)
                           : op_position(rank);
  }

  Holder awaited(const Holder& holder) const {
    if (holder.is_queue) {
      const Member& member = unmatched_member(queues_[holder.index]);
      const std::size_t other = queue_of(member.channel, !member.receives);
      const std::vector<Member>& members = queues_[other].members;
      const bool issued =
          std::any_of(members.begin() + static_cast<std::ptrdiff_t>(queues_[other].first),
                      members.end(), [&](const Member& each) {
                        return each.channel == member.channel && each.index == member.index &&
                               each.receives != member.receives;
                      });
      if (issued) return {true, other};
      return {false, member.receives ? sender_of(member.channel) : receiver_of(member.channel)};
    }
    const ProgressEvent& event = event_at(holder.index);
    if (event.kind == OpKind::kWaitRecv || event.kind == OpKind::kWaitSend) {
      return {true, queue_of(event.channel, event.kind == OpKind::kWaitRecv)};
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

  static constexpr std::size_t kCompactFrom = 64;

  const TransportModel model_;
  std::vector<Queue> queues_;         // [rank], or [pair * 2 + receives]
  std::vector<std::int64_t> groups_;  // [rank] issued so far
  std::vector<Sides> sides_;          // [channel]
  std::vector<std::size_t> touched_;  // queues of the group that is being issued
  std::vector<std::size_t> ended_;    // queues whose first group has ended
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
