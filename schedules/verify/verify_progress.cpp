#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "schedules/model/actions.hpp"
#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"
#include "schedules/plan/lane_queues.hpp"
#include "schedules/verify/verify_trace.hpp"

namespace sluice {
namespace {

// What the two ends of a channel call one of its messages.
Action sending_action(const Channel& channel, int micro_batch) {
  return make_action(channel.kind, channel.from_stage, micro_batch);
}

Action receiving_action(const Channel& channel, int micro_batch) {
  return other_end(sending_action(channel, micro_batch));
}

// The walk that every transport model shares. Each rank goes through its events until it must wait,
// and is visited again only when what it waits for may have happened. Linear in the number
// of events as long as the model wakes a rank only for its own message.
//
// `Model` derives from this and has, public:
//   bool issue(std::size_t rank, const ProgressEvent& event);  // a post or a start; false: not yet
//   bool is_done(const ProgressEvent& wait) const;             // kWaitRecv or kWaitSend
//   Violation deadlock(int rank) const;                      // of a rank that is blocked
template <class Model>
class ProgressWalk {
 public:
  ProgressWalk(const Plan& plan, const PlanTrace& trace)
      : plan_(plan), trace_(trace), cursors_(plan.ranks.size()) {
    for (const TiedStages& group : plan.tied) collectives_.push_back({parties_of(group), 0});
    Collective all;
    for (int rank = 0; rank < plan.placement.ranks(); ++rank) all.parties.push_back(rank);
    collectives_.push_back(std::move(all));
  }

  std::optional<Violation> run() {
    for (std::size_t rank = cursors_.size(); rank-- > 0;) ready_.push_back(rank);
    while (!ready_.empty()) {
      const std::size_t rank = ready_.back();
      ready_.pop_back();
      advance(rank);
    }
    for (std::size_t rank = 0; rank < cursors_.size(); ++rank) {
      if (cursors_[rank].blocked) return model().deadlock(static_cast<int>(rank));
    }
    return std::nullopt;
  }

 protected:
  [[nodiscard]] bool blocked(std::size_t rank) const { return cursors_[rank].blocked; }
  [[nodiscard]] bool finished(int rank) const {
    return cursors_[at(rank)].position == trace_.events[at(rank)].size();
  }
  // What the rank does next; not for one that has finished.
  [[nodiscard]] const ProgressEvent& event_at(std::size_t rank) const {
    return trace_.events[rank][cursors_[rank].position];
  }
  // The event after that one, or null.
  [[nodiscard]] const ProgressEvent* next_event(std::size_t rank) const {
    const std::size_t next = cursors_[rank].position + 1;
    return next < trace_.events[rank].size() ? &trace_.events[rank][next] : nullptr;
  }
  [[nodiscard]] const Channel& channel_of(std::int32_t channel) const {
    return plan_.channels[at(channel)];
  }
  [[nodiscard]] std::size_t sender_of(std::int32_t channel) const {
    return at(channel_of(channel).from_rank);
  }
  [[nodiscard]] std::size_t receiver_of(std::int32_t channel) const {
    return at(channel_of(channel).to_rank);
  }

  void wake(std::size_t rank) {
    cursors_[rank].blocked = false;
    ready_.push_back(rank);
  }
  // Wakes the rank if a wait of that kind and channel holds it.
  void wake_waiting(std::size_t rank, OpKind kind, std::int32_t channel) {
    if (!cursors_[rank].blocked) return;
    const ProgressEvent& awaited = event_at(rank);
    if (awaited.kind == kind && awaited.channel == channel) wake(rank);
  }

  // The rest puts a deadlock into words.

  // A party that has not come to the collective.
  [[nodiscard]] int missing_party(const ProgressEvent& event) const {
    const std::size_t wanted = collective_of(event);
    for (const int party : collectives_[wanted].parties) {
      const auto rank = at(party);
      const bool waits = cursors_[rank].blocked && cursors_[rank].arrived &&
                         collective_of(event_at(rank)) == wanted;
      if (!waits) return party;
    }
    return collectives_[wanted].parties.front();
  }

  // Index of the op that left the rank's current event.
  [[nodiscard]] int op_position(int rank) const {
    std::size_t left = cursors_[at(rank)].position;
    std::size_t i = 0;
    for (;; ++i) {
      if (leaves_event(ops_of(rank)[i].kind) && left-- == 0) return static_cast<int>(i);
    }
  }
  [[nodiscard]] const std::vector<PlanOp>& ops_of(int rank) const {
    return plan_.ranks[at(rank)].ops;
  }
  // "op 3 (send 0SEND_F1 ...)"
  [[nodiscard]] std::string op_text(int rank, int position) const {
    return concat("op ", position, " (", ops_of(rank)[at(position)], ")");
  }

  // Who waits for whom from a blocked `holder` on, until one repeats or a list has ended. The model
  // has, for its type of holder: awaited(), has_ended(), rank_of(), position_of(), waits() as text.
  template <class Holder>
  [[nodiscard, gnu::cold, gnu::noinline]] Violation follow(TransportModel name,
                                                           Holder holder) const {
    const auto& model = static_cast<const Model&>(*this);
    std::vector<Holder> chain;
    while (std::find(chain.begin(), chain.end(), holder) == chain.end()) {
      if (model.has_ended(holder)) {
        const Holder& last = chain.back();
        return {model.rank_of(last), model.position_of(last),
                concat("under the ", name_of(name), " model the plan cannot finish: ",
                       model.waits(last), ", whose list has ended")};
      }
      chain.push_back(holder);
      holder = model.awaited(holder);
    }
    chain.erase(chain.begin(), std::find(chain.begin(), chain.end(), holder));
    const auto first = std::min_element(
        chain.begin(), chain.end(),
        [&](const Holder& a, const Holder& b) { return model.rank_of(a) < model.rank_of(b); });
    std::rotate(chain.begin(), first, chain.end());
    std::string text = concat("under the ", name_of(name), " model the plan deadlocks: ");
    for (std::size_t i = 0; i < chain.size(); ++i) {
      text += concat(i == 0 ? "" : "; ", model.waits(chain[i]));
    }
    return {model.rank_of(chain.front()), model.position_of(chain.front()), text};
  }

  const Plan& plan_;
  const PlanTrace& trace_;

 private:
  struct Cursor {
    std::size_t position = 0;
    bool blocked = false;
    bool arrived = false;  // counted at its collective
  };

  struct Collective {
    std::vector<int> parties;
    std::size_t arrived = 0;
  };

  Model& model() { return static_cast<Model&>(*this); }

  std::vector<int> parties_of(const TiedStages& group) const {
    std::vector<int> ranks;
    for (const int stage : group.stages) ranks.push_back(plan_.placement.rank_of(stage));
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

  [[nodiscard]] std::size_t collective_of(const ProgressEvent& event) const {
    return event.kind == OpKind::kOptimizer ? collectives_.size() - 1 : at(event.channel);
  }

  void advance(std::size_t rank) {
    Cursor& cursor = cursors_[rank];
    const std::vector<ProgressEvent>& events = trace_.events[rank];
    for (; cursor.position < events.size(); ++cursor.position) {
      if (!step(rank, events[cursor.position])) {
        cursor.blocked = true;
        return;
      }
      cursor.arrived = false;
    }
  }

  // False where the rank must wait; it is then asked again once that may have changed.
  bool step(std::size_t rank, const ProgressEvent& event) {
    switch (event.kind) {
      case OpKind::kPostRecv:
      case OpKind::kStartSend:
        return model().issue(rank, event);
      case OpKind::kWaitRecv:
      case OpKind::kWaitSend:
        return model().is_done(event);
      default:
        return join(rank, collectives_[collective_of(event)]);
    }
  }

  bool join(std::size_t rank, Collective& collective) {
    if (!cursors_[rank].arrived) {
      cursors_[rank].arrived = true;
      if (++collective.arrived == collective.parties.size()) {
        for (const int party : collective.parties) {
          if (at(party) != rank) wake(at(party));
        }
      }
    }
    return collective.arrived == collective.parties.size();
  }

  std::vector<Cursor> cursors_;          // [rank]
  std::vector<Collective> collectives_;  // one per tied group, then the optimizer's
  std::vector<std::size_t> ready_;
};

// Transports with tags: messages of different channels do not stand in each other's way.
class TaggedReplay : public ProgressWalk<TaggedReplay> {
 public:
  TaggedReplay(const Plan& plan, const PlanTrace& trace, TransportModel model)
      : ProgressWalk(plan, trace),
        model_(model),
        unmatched_(plan.ranks.size()),
        started_(plan.channels.size()),
        posted_(plan.channels.size()) {}

  bool issue(std::size_t rank, const ProgressEvent& event) {
    if (event.kind == OpKind::kStartSend) return start(rank, event);
    post(event);
    return true;
  }

  bool is_done(const ProgressEvent& wait) const {
    const auto channel = at(wait.channel);
    if (wait.kind == OpKind::kWaitRecv) return started_[channel] > wait.index;
    return model_ == TransportModel::kEager || posted_[channel] > wait.index;
  }

  // For follow().
  bool has_ended(int rank) const { return finished(rank); }
  static int rank_of(int rank) { return rank; }
  int position_of(int rank) const { return op_position(rank); }
  // A rank that must act before the blocked `rank` can go on.
  int awaited(int rank) const {
    const ProgressEvent& event = event_at(at(rank));
    switch (event.kind) {
      case OpKind::kWaitRecv:
        return channel_of(event.channel).from_rank;
      case OpKind::kWaitSend:
        return channel_of(event.channel).to_rank;
      case OpKind::kStartSend:
        return unmatched_channel(rank).to_rank;
      default:
        return missing_party(event);
    }
  }
  std::string waits(int rank) const {
    const int position = op_position(rank);
    const PlanOp& op = ops_of(rank)[at(position)];
    std::string text = concat("rank ", rank, " at ", op_text(rank, position), " waits for rank ",
                              awaited(rank), " to ");
    switch (op.kind) {
      case OpKind::kWaitRecv:
        return text + "send " + to_string(sending_action(channel_of(op.channel), op.micro_batch));
      case OpKind::kWaitSend:
        return text + "post " + to_string(receiving_action(channel_of(op.channel), op.micro_batch));
      case OpKind::kStartSend:
        return concat(text, "post a receive for an earlier send from stage ",
                      unmatched_channel(rank).from_stage);
      default:
        return text + "join";
    }
  }

  Violation deadlock(int first_blocked) const { return follow(model_, first_blocked); }

 private:
  // Posts and starts of a channel come in the order of their index.
  void post(const ProgressEvent& event) {
    const std::size_t sender = sender_of(event.channel);
    posted_[at(event.channel)] = event.index + 1;
    if (started_[at(event.channel)] <= event.index) return;
    --unmatched_[sender];
    if (!blocked(sender)) return;
    if (event_at(sender).kind == OpKind::kStartSend) {
      wake(sender);
    } else {
      wake_waiting(sender, OpKind::kWaitSend, event.channel);
    }
  }

  bool start(std::size_t rank, const ProgressEvent& event) {
    if (model_ == TransportModel::kBounded && unmatched_[rank] > 0) return false;
    started_[at(event.channel)] = event.index + 1;
    if (posted_[at(event.channel)] <= event.index) ++unmatched_[rank];
    wake_waiting(receiver_of(event.channel), OpKind::kWaitRecv, event.channel);
    return true;
  }

  const Channel& unmatched_channel(int rank) const {
    std::size_t i = 0;
    while (plan_.channels[i].from_rank != rank || started_[i] <= posted_[i]) ++i;
    return plan_.channels[i];
  }

  const TransportModel model_;
  std::vector<std::int32_t> unmatched_;  // [rank] sends
  std::vector<std::int32_t> started_;    // [channel] sends
  std::vector<std::int32_t> posted_;     // [channel] receives
};

// Communicators as in-order queues of groups, in which nothing takes time.
class QueueReplay : public ProgressWalk<QueueReplay> {
 public:
  QueueReplay(const Plan& plan, const PlanTrace& trace, TransportModel model)
      : ProgressWalk(plan, trace),
        model_(model),
        queues_(plan, model == TransportModel::kNcclEdges) {}

  bool issue(std::size_t rank, const ProgressEvent& event) {
    queues_.issue(event.channel, event.kind == OpKind::kPostRecv, event.with_previous);
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
    const PairTrace& pair = trace_.pairs[index / 2];
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
  LaneQueues queues_;
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
    const PairTrace& ranks = trace.pairs[pair];
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

std::optional<Violation> replay_progress(const Plan& plan, const PlanTrace& trace,
                                         TransportModel model) {
  if (model == TransportModel::kNccl || model == TransportModel::kNcclEdges) {
    if (auto wrong = check_pair_orders(plan, trace, model)) return wrong;
    return QueueReplay(plan, trace, model).run();
  }
  return TaggedReplay(plan, trace, model).run();
}

}  // namespace sluice
