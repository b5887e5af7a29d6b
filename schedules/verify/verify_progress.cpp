#include "schedules/verify/verify_progress.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"
#include "schedules/verify/verify_nccl.hpp"
#include "schedules/verify/verify_walk.hpp"

namespace sluice {
namespace {

// Transports with tags: messages of different channels do not stand in each other's way.
class TaggedReplay : public ProgressWalk<TaggedReplay> {
 public:
  TaggedReplay(const Plan& plan, const PlanTrace& trace, TransportModel model,
               const VerifyOptions& options)
      : ProgressWalk(plan, trace),
        model_(model),
        send_buffers_(options.send_buffers),
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
    if (model_ == TransportModel::kBounded && unmatched_[rank] >= send_buffers_) return false;
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
  const int send_buffers_;
  std::vector<std::int32_t> unmatched_;  // [rank] sends
  std::vector<std::int32_t> started_;    // [channel] sends
  std::vector<std::int32_t> posted_;     // [channel] receives
};

}  // namespace

std::optional<Violation> replay_progress(const Plan& plan, const PlanTrace& trace,
                                         TransportModel model, const VerifyOptions& options) {
  if (model == TransportModel::kNccl || model == TransportModel::kNcclEdges) {
    return replay_queues(plan, trace, model);
  }
  return TaggedReplay(plan, trace, model, options).run();
}

}  // namespace sluice
