#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include <sluice/plan.hpp>

#include "schedules/model/actions.hpp"
#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"
#include "schedules/plan/lane_queues.hpp"
#include "schedules/plan/plan_parts.hpp"
#include "schedules/simulate/simulation_costs.hpp"

namespace sluice {
namespace {

// When each slot was last filled, used or freed.
class Slots {
 public:
  explicit Slots(const Plan& plan) : pools_(at(plan.placement.stages())) {
    std::size_t count = 0;
    for (const RankPlan& rank : plan.ranks) {
      for (const BufferPool& pool : rank.pools) {
        pools_[at(pool.stage)][at(pool.kind)] = static_cast<std::ptrdiff_t>(count);
        count += at(pool.count);
      }
    }
    times_.resize(count);
  }

  // Of the stage's own pool or, at a local hand-over, the neighbour's.
  double& at_slot(const PlanOp& op, BufferKind kind) {
    int stage = op.stage;
    BufferKind pool = kind;
    if (pools_[at(stage)][at(kind)] < 0) {
      const bool forward = kind == BufferKind::kOutput;
      stage += forward ? 1 : -1;
      pool = forward ? BufferKind::kInput : BufferKind::kGradOutput;
    }
    return times_[static_cast<std::size_t>(pools_[at(stage)][at(pool)]) + at(op.slot(kind))];
  }

  // The latest time of all slots that the op names.
  double latest(const PlanOp& op) {
    double time = 0;
    for (const BufferKind kind : kAllBuffers) {
      if (op.slot(kind) >= 0) time = std::max(time, at_slot(op, kind));
    }
    return time;
  }
  void set(const PlanOp& op, double time) {
    for (const BufferKind kind : kAllBuffers) {
      if (op.slot(kind) >= 0) at_slot(op, kind) = time;
    }
  }

 private:
  struct Pool : std::array<std::ptrdiff_t, kBufferKinds> {
    Pool() { fill(-1); }
  };
  std::vector<Pool> pools_;  // [stage][kind] the first slot; -1: none
  std::vector<double> times_;
};

// [channel] What a message takes.
std::vector<double> message_times(const Plan& plan, const SimulationTimes& times) {
  const Handovers handovers = handovers_of(times, plan.placement);
  std::vector<double> result;
  for (const Channel& channel : plan.channels) {
    const bool forward = channel.kind == ActionKind::kSendForward;
    const Handover& handover =
        (forward ? handovers.forward : handovers.backward)[at(channel.from_stage)];
    result.push_back(handover.seconds + handover.latency);
  }
  return result;
}

class LaneRun {
 public:
  LaneRun(const Plan& plan, const SimulationTimes& times)
      : plan_(plan),
        times_(times),
        slots_(plan),
        queues_(plan, times.queues == MessageQueues::kPerPair, message_times(plan, times)),
        cursors_(plan.ranks.size()),
        counts_(plan.channels.size()) {
    const int stages = plan.placement.stages(), micro_batches = plan.micro_batches;
    for (PairTable<double>* table : {&result_.forward, &result_.backward, &result_.weight,
                                     &result_.activation_left, &result_.gradient_left}) {
      *table = PairTable<double>(stages, micro_batches);
    }
  }

  LaneTimes run() {
    for (std::size_t rank = cursors_.size(); rank-- > 0;) ready_.push_back(rank);
    while (!ready_.empty()) {
      const std::size_t rank = ready_.back();
      ready_.pop_back();
      advance(rank);
    }
    for (std::size_t rank = 0; rank < cursors_.size(); ++rank) {
      if (cursors_[rank].position == plan_.ranks[rank].ops.size()) continue;
      refuse("simulation of '", plan_.schedule_name, "': rank ", rank,
             " never comes to its end with in-order queues");
    }
    return std::move(result_);
  }

 private:
  struct Cursor {
    std::size_t position = 0;
    double clock = 0;  // end of the last action
    bool waits = false;
  };
  // Of a channel's messages so far: waited for as a receive and as a send; and when each ended, in
  // order.
  struct Counts {
    std::int32_t received = 0, sent = 0;
    std::vector<double> receive_ends, send_ends;
  };

  void advance(std::size_t rank) {
    const std::vector<PlanOp>& ops = plan_.ranks[rank].ops;
    Cursor& cursor = cursors_[rank];
    cursor.waits = false;
    for (; cursor.position < ops.size(); ++cursor.position) {
      const PlanOp& op = ops[cursor.position];
      switch (op.kind) {
        case OpKind::kPostRecv:
        case OpKind::kStartSend:
          issue(rank, op);
          break;
        case OpKind::kWaitRecv:
        case OpKind::kWaitSend:
          if (wait(op)) break;
          cursor.waits = true;
          return;
        case OpKind::kCompute:
          compute(cursor, op);
          break;
        case OpKind::kRelease:
          slots_.set(op, cursor.clock);
          break;
        default:
          break;
      }
    }
  }

  void issue(std::size_t rank, const PlanOp& op) {
    queues_.issue(op.channel, op.kind == OpKind::kPostRecv, op.with_previous, slots_.latest(op));
    const std::vector<PlanOp>& ops = plan_.ranks[rank].ops;
    const std::size_t next = cursors_[rank].position + 1;
    if (next < ops.size() && ops[next].with_previous) return;
    queues_.settle([this](const LaneMember& each, double time) { end(each, time); });
  }

  void end(const LaneMember& member, double time) {
    Counts& counts = counts_[at(member.channel)];
    (member.receives ? counts.receive_ends : counts.send_ends).push_back(time);
    const Channel& channel = plan_.channels[at(member.channel)];
    const auto rank = at(member.receives ? channel.to_rank : channel.from_rank);
    Cursor& cursor = cursors_[rank];
    if (!cursor.waits) return;
    const PlanOp& op = plan_.ranks[rank].ops[cursor.position];
    if (op.channel != member.channel || (op.kind == OpKind::kWaitRecv) != member.receives) return;
    cursor.waits = false;
    ready_.push_back(rank);
  }

  // Sets when the slot has its tensor, or is free; false where that is not known yet.
  bool wait(const PlanOp& op) {
    Counts& counts = counts_[at(op.channel)];
    const bool receives = op.kind == OpKind::kWaitRecv;
    const std::vector<double>& ends = receives ? counts.receive_ends : counts.send_ends;
    std::int32_t& next = receives ? counts.received : counts.sent;
    if (at(next) >= ends.size()) return false;
    const double time = ends[at(next++)];
    slots_.set(op, std::max(slots_.latest(op), time));
    if (!receives) {
      (op.action == ActionKind::kSendForward ? result_.activation_left : result_.gradient_left)
          .at(op.stage, op.micro_batch) = time;
    }
    return true;
  }

  void compute(Cursor& cursor, const PlanOp& op) {
    const Action action = make_action(op.action, op.stage, op.micro_batch);
    const double start = std::max(cursor.clock, slots_.latest(op));
    cursor.clock = start + duration_of(times_, action);
    slots_.set(op, cursor.clock);
    result_.starts_of(op.action).at(op.stage, op.micro_batch) = start;
  }

  const Plan& plan_;
  const SimulationTimes& times_;
  Slots slots_;
  LaneQueues queues_;
  std::vector<Cursor> cursors_;
  std::vector<Counts> counts_;  // [channel]
  std::vector<std::size_t> ready_;
  LaneTimes result_;
};

}  // namespace

LaneTimes lane_times(const Schedule& schedule, const SimulationTimes& times) {
  LowerOptions options;
  options.reduce_grad = !schedule.forward_only;
  const Plan plan =
      assemble_plan(lower(schedule, options), options.tied, {.order = MessageOrder::kGlobal});
  return LaneRun(plan, times).run();
}

}  // namespace sluice
