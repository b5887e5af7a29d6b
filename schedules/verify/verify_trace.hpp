// What remains of a plan's lists for the transport models, once each is known to be right by
// itself: a short event per message op and collective.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <sluice/plan.hpp>

#include "schedules/model/index.hpp"

namespace sluice {

// Eight bytes: a large plan leaves hundreds of millions.
struct ProgressEvent {
  OpKind kind : 4;  // kPostRecv, kWaitRecv, kStartSend, kWaitSend, collectives
  bool with_previous : 1;
  std::int32_t channel : 27;  // kReduceTied: the group; kOptimizer: 0
  std::int32_t index;         // messages: position in the channel's FIFO

  static constexpr std::int32_t kMostChannels = 1 << 26;
  ProgressEvent(const PlanOp& op, std::int32_t channel_in, std::int32_t index_in)
      : kind(op.kind),
        with_previous(op.with_previous),
        channel(channel_in & (kMostChannels - 1)),
        index(index_in) {}
};

// True for the op kinds that leave an event. kReduceGrad and kUnshard leave none: their parties are
// the same rank of every replica, whose lists are equal.
[[nodiscard]] constexpr bool leaves_event(OpKind kind) {
  return kind != OpKind::kCompute && kind != OpKind::kRelease && kind != OpKind::kFold &&
         kind != OpKind::kReduceGrad && kind != OpKind::kStartMove && kind != OpKind::kWaitMove &&
         kind != OpKind::kUnshard && kind != OpKind::kReshard;
}

// The order in which one end of a channel lists its messages: a table only where micro-batches do
// not ascend from 0.
class MessageOrderTrace {
 public:
  // Position of the message, or -1 where it is listed already.
  std::int32_t add(std::int32_t micro_batch, std::int32_t micro_batches) {
    if (table_.empty() && micro_batch == count_) return count_++;
    return add_out_of_order(micro_batch, micro_batches);
  }
  // -1: not listed.
  [[nodiscard]] std::int32_t index_of(std::int32_t micro_batch) const {
    if (!table_.empty()) return table_[at(micro_batch)];
    return micro_batch < count_ ? micro_batch : -1;
  }
  friend bool operator==(const MessageOrderTrace&, const MessageOrderTrace&) = default;

 private:
  std::int32_t add_out_of_order(std::int32_t micro_batch, std::int32_t micro_batches);

  std::int32_t count_ = 0;
  std::vector<std::int32_t> table_;  // [micro_batch] position or -1; empty: micro-batches ascend
};

struct ChannelTrace {
  MessageOrderTrace sent, posted;
  std::int32_t pair = 0;  // index into PlanTrace::pairs
};

// An ordered pair of ranks.
struct PairTrace {
  std::int32_t from_rank = 0, to_rank = 0;
  std::int32_t channels = 0;
};

struct PlanTrace {
  std::vector<std::vector<ProgressEvent>> events;  // [rank], in list order
  std::vector<ChannelTrace> channels;
  std::vector<PairTrace> pairs;  // ascending
  bool grouped = false;          // some op is in a group with the op before it

  explicit PlanTrace(const Plan& plan);  // requires legal ranks in plan.channels
};

// What the op at `position` did wrong, as a violation that names it.
[[nodiscard]] Violation violation_at(const Plan& plan, int rank, int position,
                                     const std::string& what);

// Replays the buffers of one rank and fills the trace's entries that belong to it. The trace is
// complete only where nothing is returned. Requires: plan.channels name legal stages and ranks.
[[nodiscard]] std::optional<Violation> replay_rank(const Plan& plan, int rank, PlanTrace& trace);

// Does every rank reach the end of its list under a transport model, and if not, who waits for
// whom? Requires: a complete trace whose sends and posts pair up. Linear in the number of events.
[[nodiscard]] std::optional<Violation> replay_progress(const Plan& plan, const PlanTrace& trace,
                                                       TransportModel model);

}  // namespace sluice
