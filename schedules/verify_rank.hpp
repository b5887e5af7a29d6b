// The part of verify() that looks at one rank's list alone: buffers, order and completeness. What
// remains of the list, for the transport models, is a short event per message op and collective.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "schedules/plan.hpp"

namespace sluice {

struct ProgressEvent {
  OpKind kind = OpKind::kPostRecv;  // kPostRecv, kWaitRecv, kStartSend, kWaitSend, collectives
  bool with_previous = false;
  std::int32_t channel = -1;  // kReduceTied: the group
  std::int32_t index = -1;    // messages: position in the channel's FIFO
};

// True for the op kinds that leave an event. kReduceGrad leaves none: its parties are the same rank
// of every replica, whose lists are equal.
[[nodiscard]] constexpr bool leaves_event(OpKind kind) {
  return kind != OpKind::kCompute && kind != OpKind::kRelease && kind != OpKind::kReduceGrad;
}

struct PlanTrace {
  std::vector<std::vector<ProgressEvent>> events;  // [rank], in list order
  std::vector<int> peak_in_flight;                 // [rank]
  std::vector<int> queue_depth;                    // [channel]
  std::vector<std::int32_t> pairs;                 // [channel] index into pair_depths
  std::vector<PairDepth> pair_depths;              // ascending
  bool exact = true;                               // until a rank's list says otherwise
  // [channel * micro_batches + micro_batch] position among the channel's sends (posts), -1: none.
  std::vector<std::int32_t> send_index;
  std::vector<std::int32_t> post_index;
  // Counts while ranks are replayed, by channel, and by pair.
  std::vector<std::int32_t> sent, posted, open_sends, open_of_pair;

  explicit PlanTrace(const Plan& plan);  // requires legal ranks in plan.channels
};

// Where each stage stands among the stages of its rank.
[[nodiscard]] std::vector<int> local_stage_indices(const Placement& placement);

// What the op at `position` did wrong, as a violation that names it.
[[nodiscard]] Violation violation_at(const Plan& plan, int rank, int position,
                                     const std::string& what);

// Replays the buffers of one rank and fills the trace's entries that belong to it. The trace is
// complete only where nothing is returned. Requires: plan.channels name legal stages and ranks.
[[nodiscard]] std::optional<Violation> replay_rank(const Plan& plan, int rank,
                                                   const std::vector<int>& local_stage,
                                                   PlanTrace& trace);

}  // namespace sluice
