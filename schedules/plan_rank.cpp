#include "schedules/plan_rank.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <utility>

namespace sluice {
namespace {

constexpr std::size_t kKinds = kBufferKinds;
constexpr std::array kAllBuffers = {BufferKind::kInput, BufferKind::kOutput,
                                    BufferKind::kGradOutput, BufferKind::kGradInput,
                                    BufferKind::kState};

bool ends_use(ActionKind kind, bool forward_only) {
  return kind == ActionKind::kBackward || kind == ActionKind::kBackwardWeight ||
         (forward_only && kind == ActionKind::kForward);
}

// The slots of one (stage, kind), handed out statically while a rank's list is walked.
struct Pool {
  int count = 0;
  std::vector<int> free;

  int acquire_or_grow() {
    if (free.empty()) return count++;
    const int slot = free.back();
    free.pop_back();
    return slot;
  }
};

// Receives of one channel, posted in the sender's order.
struct Inbound {
  int channel = -1;
  ActionKind action = ActionKind::kRecvForward;
  BufferKind kind = BufferKind::kInput;
  int stage = -1;
  const std::vector<int>* order = nullptr;
  std::size_t posted = 0;
};

struct OpenSend {
  std::int32_t channel = -1, stage = -1, micro_batch = -1, slot = -1;
  ActionKind action = ActionKind::kSendForward;
};

// Sends of one pool that are started and not yet waited for, oldest first.
struct SendQueue {
  std::vector<OpenSend> open;
  std::size_t head = 0;
};

class RankPlanner {
 public:
  RankPlanner(const Schedule& lowered, const PlanMessages& messages,
              const std::vector<TiedStages>& tied, const PlanOptions& options, int rank)
      : schedule_(lowered),
        placement_(lowered.placement),
        steps_(lowered.ranks[static_cast<std::size_t>(rank)]),
        messages_(messages),
        tied_(tied),
        options_(options),
        rank_(rank),
        micro_batches_(static_cast<std::size_t>(lowered.micro_batches)),
        own_(lowered.placement.stages_of(rank)),
        pools_(own_.size() * kKinds),
        sends_(own_.size() * kKinds),
        slots_(own_.size() * kKinds * micro_batches_, -1) {}

  RankPlan run() {
    find_inbound();
    for (Inbound& inbound : inbound_) size_pool(inbound);
    reserve_ops();
    for (Inbound& inbound : inbound_) post_receives(inbound);
    for (const Step& step : steps_) {
      add(step.action);
      if (step.overlapped) add(*step.overlapped);
    }
    drain_sends();
    collect_pools();
    return std::move(plan_);
  }

 private:
  // Position of one of this rank's stages among its own. Ranks own few stages.
  std::size_t local(int stage) const {
    return static_cast<std::size_t>(std::find(own_.begin(), own_.end(), stage) - own_.begin());
  }
  std::size_t pool_index(int stage, BufferKind kind) const {
    return local(stage) * kKinds + static_cast<std::size_t>(kind);
  }
  Pool& pool(int stage, BufferKind kind) { return pools_[pool_index(stage, kind)]; }
  // Where the tensor of a micro-batch lies in the stage's pool.
  std::int32_t& slot(int stage, BufferKind kind, int micro_batch) {
    return slots_[pool_index(stage, kind) * micro_batches_ + static_cast<std::size_t>(micro_batch)];
  }

  bool is_last(int stage) const { return stage + 1 == placement_.stages(); }
  bool is_local(int stage, int neighbour) const {
    return neighbour >= 0 && neighbour < placement_.stages() &&
           placement_.rank_of(neighbour) == placement_.rank_of(stage);
  }

  PlanOp& emit(OpKind kind, const Action& action) {
    PlanOp& op = plan_.ops.emplace_back();
    op.kind = kind;
    op.action = action.kind;
    op.stage = action.stage;
    op.micro_batch = action.micro_batch;
    return op;
  }
  static void name_slot(PlanOp& op, BufferKind kind, std::int32_t index) {
    op.slots[static_cast<std::size_t>(kind)] = index;
  }

  void find_inbound() {
    for (const int stage : own_) {
      if (stage > 0) {
        add_inbound(messages_.forward[static_cast<std::size_t>(stage) - 1],
                    ActionKind::kRecvForward, BufferKind::kInput, stage);
      }
      if (!is_last(stage)) {
        add_inbound(messages_.backward[static_cast<std::size_t>(stage) + 1],
                    ActionKind::kRecvBackward, BufferKind::kGradOutput, stage);
      }
    }
  }

  void add_inbound(int channel, ActionKind action, BufferKind kind, int stage) {
    if (channel < 0) return;
    Inbound inbound;
    inbound.channel = channel;
    inbound.action = action;
    inbound.kind = kind;
    inbound.stage = stage;
    inbound.order = &messages_.orders[static_cast<std::size_t>(channel)];
    inbound_.push_back(inbound);
  }

  // A receive can be waited for only when all before it in the channel are posted too. So the pool
  // needs, at each wait, a slot for every message up to the furthest one waited for that is not
  // released.
  void size_pool(const Inbound& inbound) {
    std::vector<int> index_of(micro_batches_);
    for (std::size_t i = 0; i < micro_batches_; ++i) {
      index_of[static_cast<std::size_t>((*inbound.order)[i])] = static_cast<int>(i);
    }
    int posted = 0, released = 0, most = 0, waits = 0;
    const auto visit = [&](const Action& action) {
      if (action.stage != inbound.stage) return;
      if (action.kind == inbound.action) {
        posted = std::max(posted, index_of[static_cast<std::size_t>(action.micro_batch)] + 1);
        most = std::max(most, posted - released);
        ++waits;
      } else if (ends_use(action.kind, schedule_.forward_only)) {
        ++released;
      }
    };
    for (const Step& step : steps_) {
      visit(step.action);
      if (step.overlapped) visit(*step.overlapped);
    }
    if (waits != schedule_.micro_batches) {
      throw std::invalid_argument(
          "plan of '" + schedule_.name + "': rank " + std::to_string(rank_) + " receives " +
          std::to_string(waits) + " of " + std::to_string(micro_batches_) + " messages for stage " +
          std::to_string(inbound.stage) + "; pass a schedule that lower() returned");
    }
    if (!messages_.depths.empty()) {
      most = std::max(most, messages_.depths[static_cast<std::size_t>(inbound.channel)]);
    }
    Pool& sized = pool(inbound.stage, inbound.kind);
    sized.count = std::min(schedule_.micro_batches,
                           most + std::min(options_.receive_ahead, schedule_.micro_batches));
    for (int i = sized.count; i-- > 0;) sized.free.push_back(i);
  }

  // Exact: a receive is posted and waited for, a send started, waited for and released, and each
  // micro-batch's buffers are released once.
  void reserve_ops() {
    std::size_t count = 0;
    const auto visit = [&](const Action& action) {
      const bool receive =
          action.kind == ActionKind::kRecvForward || action.kind == ActionKind::kRecvBackward;
      count += receive ? 2U : is_message(action.kind) ? 3U : 1U;
      if (ends_use(action.kind, schedule_.forward_only)) ++count;
    };
    for (const Step& step : steps_) {
      visit(step.action);
      if (step.overlapped) visit(*step.overlapped);
    }
    plan_.ops.reserve(count);
  }

  void post_receives(Inbound& inbound) {
    Pool& free_slots = pool(inbound.stage, inbound.kind);
    while (inbound.posted < inbound.order->size() && !free_slots.free.empty()) {
      const int micro_batch = (*inbound.order)[inbound.posted++];
      const int index = free_slots.acquire_or_grow();
      slot(inbound.stage, inbound.kind, micro_batch) = index;
      emit_message(OpKind::kPostRecv,
                   {inbound.channel, inbound.stage, micro_batch, index, inbound.action},
                   inbound.kind);
    }
  }

  void emit_message(OpKind kind, const OpenSend& message, BufferKind buffer) {
    PlanOp& op = plan_.ops.emplace_back();
    op.kind = kind;
    op.action = message.action;
    op.stage = message.stage;
    op.micro_batch = message.micro_batch;
    op.channel = message.channel;
    name_slot(op, buffer, message.slot);
  }

  void add(const Action& action) {
    switch (action.kind) {
      case ActionKind::kForward:
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
      case ActionKind::kBackwardWeight:
        return add_compute(action);
      case ActionKind::kRecvForward:
        return add_receive(action, messages_.forward[static_cast<std::size_t>(action.stage) - 1],
                           BufferKind::kInput);
      case ActionKind::kRecvBackward:
        return add_receive(action, messages_.backward[static_cast<std::size_t>(action.stage) + 1],
                           BufferKind::kGradOutput);
      case ActionKind::kSendForward:
        return add_send(action, messages_.forward[static_cast<std::size_t>(action.stage)],
                        BufferKind::kOutput);
      case ActionKind::kSendBackward:
        return add_send(action, messages_.backward[static_cast<std::size_t>(action.stage)],
                        BufferKind::kGradInput);
      case ActionKind::kReduceGrad:
        drain_sends();
        emit(OpKind::kReduceGrad, action);
        return;
      case ActionKind::kReduceTied:
        drain_sends();
        emit(OpKind::kReduceTied, action).channel = next_tied_group(action);
        return;
      case ActionKind::kOptimizer:
        drain_sends();
        emit(OpKind::kOptimizer, action);
        return;
      default:
        throw std::invalid_argument("plan of '" + schedule_.name + "': rank " +
                                    std::to_string(rank_) + " lists " + to_string(action) +
                                    ", which plans do not carry; legal are F, B, I, W, messages, "
                                    "REDUCE_GRAD, REDUCE_TIED and OPTIMIZER");
    }
  }

  void add_receive(const Action& action, int channel, BufferKind kind) {
    emit_message(OpKind::kWaitRecv,
                 {channel, action.stage, action.micro_batch,
                  slot(action.stage, kind, action.micro_batch), action.kind},
                 kind);
  }

  void add_send(const Action& action, int channel, BufferKind kind) {
    const OpenSend send{channel, action.stage, action.micro_batch,
                        slot(action.stage, kind, action.micro_batch), action.kind};
    emit_message(OpKind::kStartSend, send, kind);
    sends_[pool_index(action.stage, kind)].open.push_back(send);
  }

  void wait_for_oldest_send(int stage, BufferKind kind) {
    SendQueue& queue = sends_[pool_index(stage, kind)];
    const OpenSend send = queue.open[queue.head++];
    if (queue.head == queue.open.size()) {
      queue.open.clear();
      queue.head = 0;
    }
    emit_message(OpKind::kWaitSend, send, kind);
    emit_message(OpKind::kRelease, send, kind);
    plan_.ops.back().channel = -1;
    pool(stage, kind).free.push_back(send.slot);
  }

  // A slot for a tensor about to be sent. Waits for the oldest send where all slots are taken; the
  // pool exceeds send_slots only where more tensors than that lie computed and unsent.
  int acquire_send_slot(int stage, BufferKind kind) {
    Pool& taken = pool(stage, kind);
    const SendQueue& queue = sends_[pool_index(stage, kind)];
    const bool full = taken.free.empty() && taken.count >= options_.send_slots;
    if (full && queue.head < queue.open.size()) wait_for_oldest_send(stage, kind);
    return taken.acquire_or_grow();
  }

  void drain_sends() {
    for (const int stage : own_) {
      for (const BufferKind kind : {BufferKind::kOutput, BufferKind::kGradInput}) {
        const SendQueue& queue = sends_[pool_index(stage, kind)];
        while (queue.head < queue.open.size()) wait_for_oldest_send(stage, kind);
      }
    }
  }

  // Takes a slot for what `action` hands to `neighbour` and returns it: in the neighbour's pool
  // where that is on this rank, else in the stage's own.
  int acquire_hand_over(const Action& action, int neighbour, BufferKind own, BufferKind theirs) {
    if (is_local(action.stage, neighbour)) {
      return slot(neighbour, theirs, action.micro_batch) =
                 pool(neighbour, theirs).acquire_or_grow();
    }
    return slot(action.stage, own, action.micro_batch) = acquire_send_slot(action.stage, own);
  }

  void add_compute(const Action& action) {
    const int stage = action.stage;
    const int micro_batch = action.micro_batch;
    std::array<std::int32_t, kBufferKinds> named = {-1, -1, -1, -1, -1};
    const auto name = [&](BufferKind kind, std::int32_t index) {
      named[static_cast<std::size_t>(kind)] = index;
    };
    if (action.kind == ActionKind::kForward) {
      slot(stage, BufferKind::kState, micro_batch) =
          pool(stage, BufferKind::kState).acquire_or_grow();
      if (is_last(stage)) {
        slot(stage, BufferKind::kOutput, micro_batch) =
            pool(stage, BufferKind::kOutput).acquire_or_grow();
      } else {
        name(BufferKind::kOutput,
             acquire_hand_over(action, stage + 1, BufferKind::kOutput, BufferKind::kInput));
      }
    } else if (action.kind != ActionKind::kBackwardWeight && stage > 0) {
      name(BufferKind::kGradInput,
           acquire_hand_over(action, stage - 1, BufferKind::kGradInput, BufferKind::kGradOutput));
    }
    const auto name_kept = [&](BufferKind kind) { name(kind, slot(stage, kind, micro_batch)); };
    if (stage > 0) name_kept(BufferKind::kInput);
    name_kept(BufferKind::kState);
    if (is_last(stage)) {
      name_kept(BufferKind::kOutput);
    } else if (action.kind != ActionKind::kForward) {
      name_kept(BufferKind::kGradOutput);
    }
    emit(OpKind::kCompute, action).slots = named;
    if (ends_use(action.kind, schedule_.forward_only)) release_kept(action);
  }

  // Everything kept for (stage, micro-batch), then the receives that now find a slot.
  void release_kept(const Action& action) {
    PlanOp& op = emit(OpKind::kRelease, action);
    const auto release = [&](BufferKind kind) {
      std::int32_t& index = slot(action.stage, kind, action.micro_batch);
      name_slot(op, kind, index);
      pool(action.stage, kind).free.push_back(index);
    };
    if (action.stage > 0) release(BufferKind::kInput);
    release(BufferKind::kState);
    if (is_last(action.stage)) {
      release(BufferKind::kOutput);
    } else if (!schedule_.forward_only) {
      release(BufferKind::kGradOutput);
    }
    for (Inbound& inbound : inbound_) {
      if (inbound.stage == action.stage) post_receives(inbound);
    }
  }

  // The n-th REDUCE_TIED of a rank belongs to the n-th group the rank has a part in.
  int next_tied_group(const Action& action) {
    for (; tied_cursor_ < tied_.size(); ++tied_cursor_) {
      const std::vector<int>& stages = tied_[tied_cursor_].stages;
      const bool takes_part = std::any_of(stages.begin(), stages.end(), [&](int stage) {
        return stage >= 0 && stage < placement_.stages() && placement_.rank_of(stage) == rank_;
      });
      if (takes_part) return static_cast<int>(tied_cursor_++);
    }
    throw std::invalid_argument("plan of '" + schedule_.name + "': " + to_string(action) +
                                " on rank " + std::to_string(rank_) +
                                " belongs to no tied parameter; pass the groups that lower() got");
  }

  void collect_pools() {
    for (std::size_t i = 0; i < own_.size(); ++i) {
      for (const BufferKind kind : kAllBuffers) {
        const Pool& sized = pools_[i * kKinds + static_cast<std::size_t>(kind)];
        if (sized.count > 0) plan_.pools.push_back(BufferPool{own_[i], kind, sized.count});
      }
    }
  }

  const Schedule& schedule_;
  const Placement& placement_;
  const std::vector<Step>& steps_;
  const PlanMessages& messages_;
  const std::vector<TiedStages>& tied_;
  const PlanOptions& options_;
  const int rank_;
  const std::size_t micro_batches_;
  const std::vector<int>& own_;      // this rank's stages
  std::vector<Pool> pools_;          // [own stage][kind]
  std::vector<SendQueue> sends_;     // [own stage][kind]
  std::vector<std::int32_t> slots_;  // [own stage][kind][micro_batch]
  std::vector<Inbound> inbound_;
  std::size_t tied_cursor_ = 0;
  RankPlan plan_;
};

}  // namespace

RankPlan plan_rank(const Schedule& lowered, const PlanMessages& messages,
                   const std::vector<TiedStages>& tied, const PlanOptions& options, int rank) {
  return RankPlanner(lowered, messages, tied, options, rank).run();
}

}  // namespace sluice
