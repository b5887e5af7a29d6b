#include "schedules/verify_progress.hpp"

#include <algorithm>
#include <string>
#include <vector>

namespace sluice {
namespace {

class ProgressReplay {
 public:
  ProgressReplay(const Plan& plan, const PlanTrace& trace, TransportModel model,
                 const VerifyOptions& options)
      : plan_(plan),
        trace_(trace),
        model_(model),
        send_buffers_(options.send_buffers),
        cursors_(plan.ranks.size()),
        started_(plan.channels.size()),
        posted_(plan.channels.size()) {
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
      if (cursors_[rank].blocked) return deadlock(static_cast<int>(rank));
    }
    return std::nullopt;
  }

 private:
  struct Cursor {
    std::size_t position = 0;
    std::int32_t unmatched_sends = 0;
    bool blocked = false;
    bool arrived = false;  // counted at the collective it stands at
  };

  struct Collective {
    std::vector<int> parties;
    std::size_t arrived = 0;
  };

  std::vector<int> parties_of(const TiedStages& group) const {
    std::vector<int> ranks;
    for (const int stage : group.stages) ranks.push_back(plan_.placement.rank_of(stage));
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

  const ProgressEvent& event_at(std::size_t rank) const {
    return trace_.events[rank][cursors_[rank].position];
  }
  const Channel& channel_of(const ProgressEvent& event) const {
    return plan_.channels[static_cast<std::size_t>(event.channel)];
  }
  std::size_t collective_of(const ProgressEvent& event) const {
    return event.kind == OpKind::kOptimizer ? collectives_.size() - 1
                                            : static_cast<std::size_t>(event.channel);
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
    const auto channel = static_cast<std::size_t>(event.channel);
    switch (event.kind) {
      case OpKind::kPostRecv:
        post(event);
        return true;
      case OpKind::kStartSend:
        return start(rank, event);
      case OpKind::kWaitRecv:
        return started_[channel] > event.index;
      case OpKind::kWaitSend:
        return model_ == TransportModel::kEager || posted_[channel] > event.index;
      default:
        return join(rank, collectives_[collective_of(event)]);
    }
  }

  // Posts and starts of a channel come in the order of their index.
  void post(const ProgressEvent& event) {
    const auto sender = static_cast<std::size_t>(channel_of(event).from_rank);
    posted_[static_cast<std::size_t>(event.channel)] = event.index + 1;
    if (started_[static_cast<std::size_t>(event.channel)] <= event.index) return;
    --cursors_[sender].unmatched_sends;
    if (!cursors_[sender].blocked) return;
    const ProgressEvent& awaited = event_at(sender);
    if (awaited.kind == OpKind::kStartSend ||
        (awaited.kind == OpKind::kWaitSend && awaited.channel == event.channel)) {
      wake(sender);
    }
  }

  bool start(std::size_t rank, const ProgressEvent& event) {
    Cursor& cursor = cursors_[rank];
    if (model_ == TransportModel::kBounded && cursor.unmatched_sends >= send_buffers_) return false;
    started_[static_cast<std::size_t>(event.channel)] = event.index + 1;
    if (posted_[static_cast<std::size_t>(event.channel)] <= event.index) ++cursor.unmatched_sends;
    const auto receiver = static_cast<std::size_t>(channel_of(event).to_rank);
    if (cursors_[receiver].blocked) {
      const ProgressEvent& awaited = event_at(receiver);
      if (awaited.kind == OpKind::kWaitRecv && awaited.channel == event.channel) wake(receiver);
    }
    return true;
  }

  bool join(std::size_t rank, Collective& collective) {
    if (!cursors_[rank].arrived) {
      cursors_[rank].arrived = true;
      if (++collective.arrived == collective.parties.size()) {
        for (const int party : collective.parties) {
          if (static_cast<std::size_t>(party) != rank) wake(static_cast<std::size_t>(party));
        }
      }
    }
    return collective.arrived == collective.parties.size();
  }

  void wake(std::size_t rank) {
    cursors_[rank].blocked = false;
    ready_.push_back(rank);
  }

  // The rest puts a standstill into words.

  // A rank that must act before the blocked `rank` can go on.
  int awaited_rank(int rank) const {
    const ProgressEvent& event = event_at(static_cast<std::size_t>(rank));
    switch (event.kind) {
      case OpKind::kWaitRecv:
        return channel_of(event).from_rank;
      case OpKind::kWaitSend:
        return channel_of(event).to_rank;
      case OpKind::kStartSend:
        return unmatched_channel(rank).to_rank;
      default:
        return missing_party(event);
    }
  }

  const Channel& unmatched_channel(int rank) const {
    std::size_t i = 0;
    while (plan_.channels[i].from_rank != rank || started_[i] <= posted_[i]) ++i;
    return plan_.channels[i];
  }

  int missing_party(const ProgressEvent& event) const {
    const std::size_t wanted = collective_of(event);
    for (const int party : collectives_[wanted].parties) {
      const auto rank = static_cast<std::size_t>(party);
      const bool waits = cursors_[rank].blocked && cursors_[rank].arrived &&
                         collective_of(event_at(rank)) == wanted;
      if (!waits) return party;
    }
    return collectives_[wanted].parties.front();
  }

  bool finished(int rank) const {
    return cursors_[static_cast<std::size_t>(rank)].position ==
           trace_.events[static_cast<std::size_t>(rank)].size();
  }

  // Index of the op that left the rank's current event.
  int op_position(int rank) const {
    const std::vector<PlanOp>& ops = plan_.ranks[static_cast<std::size_t>(rank)].ops;
    std::size_t left = cursors_[static_cast<std::size_t>(rank)].position;
    std::size_t i = 0;
    for (;; ++i) {
      if (leaves_event(ops[i].kind) && left-- == 0) return static_cast<int>(i);
    }
  }

  std::string waits(int rank) const {
    const int position = op_position(rank);
    const PlanOp& op =
        plan_.ranks[static_cast<std::size_t>(rank)].ops[static_cast<std::size_t>(position)];
    std::string text = "rank " + std::to_string(rank) + " at op " + std::to_string(position) +
                       " (" + to_string(op) + ") waits for rank " +
                       std::to_string(awaited_rank(rank)) + " to ";
    Action awaited;
    awaited.micro_batch = op.micro_batch;
    switch (op.kind) {
      case OpKind::kWaitRecv: {
        const Channel& channel = plan_.channels[static_cast<std::size_t>(op.channel)];
        awaited.kind = channel.kind;
        awaited.stage = channel.from_stage;
        return text + "send " + to_string(awaited);
      }
      case OpKind::kWaitSend: {
        const Channel& channel = plan_.channels[static_cast<std::size_t>(op.channel)];
        const bool forward = channel.kind == ActionKind::kSendForward;
        awaited.kind = forward ? ActionKind::kRecvForward : ActionKind::kRecvBackward;
        awaited.stage = channel.to_stage;
        return text + "post " + to_string(awaited);
      }
      case OpKind::kStartSend:
        return text + "post a receive for an earlier send from stage " +
               std::to_string(unmatched_channel(rank).from_stage);
      default:
        return text + "join";
    }
  }

  Violation deadlock(int first_blocked) const {
    std::vector<int> chain;
    std::vector<bool> visited(cursors_.size());
    int rank = first_blocked;
    while (!finished(rank) && !visited[static_cast<std::size_t>(rank)]) {
      visited[static_cast<std::size_t>(rank)] = true;
      chain.push_back(rank);
      rank = awaited_rank(rank);
    }
    const std::string model = "under the " + std::string(name_of(model_)) + " model ";
    if (finished(rank)) {
      const int last = chain.back();
      return Violation{last, op_position(last),
                       model + "the plan cannot finish: " + waits(last) + ", whose list has ended"};
    }
    chain.erase(chain.begin(), std::find(chain.begin(), chain.end(), rank));
    std::rotate(chain.begin(), std::min_element(chain.begin(), chain.end()), chain.end());
    std::string text = model + "the plan deadlocks: ";
    for (std::size_t i = 0; i < chain.size(); ++i) text += (i == 0 ? "" : "; ") + waits(chain[i]);
    return Violation{chain.front(), op_position(chain.front()), text};
  }

  const Plan& plan_;
  const PlanTrace& trace_;
  const TransportModel model_;
  const int send_buffers_;
  std::vector<Cursor> cursors_;          // [rank]
  std::vector<std::int32_t> started_;    // [channel] sends
  std::vector<std::int32_t> posted_;     // [channel] receives
  std::vector<Collective> collectives_;  // one per tied group, then the optimizer's
  std::vector<std::size_t> ready_;
};

}  // namespace

std::optional<Violation> replay_progress(const Plan& plan, const PlanTrace& trace,
                                         TransportModel model, const VerifyOptions& options) {
  return ProgressReplay(plan, trace, model, options).run();
}

}  // namespace sluice
