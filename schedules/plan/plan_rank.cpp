#include "schedules/plan/plan_rank.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "schedules/model/index.hpp"
#include "schedules/plan/plan_receives.hpp"

namespace sluice {
namespace {

constexpr std::size_t kKinds = kBufferKinds;
constexpr std::array kAllBuffers = {BufferKind::kInput, BufferKind::kOutput,
                                    BufferKind::kGradOutput, BufferKind::kGradInput,
                                    BufferKind::kState};

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
        steps_(lowered.ranks[at(rank)]),
        messages_(messages),
        tied_(tied),
        options_(options),
        issues_(messages.issues.empty() ? nullptr : &messages.issues[at(rank)]),
        rank_(rank),
        micro_batches_(at(lowered.micro_batches)),
        own_(lowered.placement.stages_of(rank)),
        pools_(own_.size() * kKinds),
        sends_(own_.size() * kKinds),
        slots_(own_.size() * kKinds * micro_batches_, -1),
        last_weight_(own_.size(), -1) {}

  PlannedRank run() {
    make_receive_pools();
    find_tail();
    issue_ahead();
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      issue_before(i);
      if (i == tail_) drain_sends();
      add(steps_[i].action);
      if (steps_[i].overlapped) add(*steps_[i].overlapped);
    }
    drain_sends();
    collect_pools();
    return {std::move(plan_), exact_};
  }

 private:
  // One of this rank's stages: its pools by kind, and where in them the tensors of each micro-batch
  // lie.
  struct StageView {
    Pool* pools = nullptr;          // [kind]
    std::int32_t* slots = nullptr;  // [kind][micro_batch]
    std::size_t micro_batches = 0;

    [[nodiscard]] Pool& pool(BufferKind kind) const { return pools[at(kind)]; }
    [[nodiscard]] std::int32_t& slot(BufferKind kind, int micro_batch) const {
      return slots[at(kind) * micro_batches + at(micro_batch)];
    }
  };

  // Position of one of this rank's stages among its own, which ascend.
  std::size_t local(int stage) const {
    return at(std::lower_bound(own_.begin(), own_.end(), stage) - own_.begin());
  }
  StageView view(int stage) {
    const std::size_t first = local(stage) * kKinds;
    return {&pools_[first], &slots_[first * micro_batches_], micro_batches_};
  }
  SendQueue& sends_of(int stage, BufferKind kind) {
    return sends_[local(stage) * kKinds + at(kind)];
  }
  Pool& pool(int stage, BufferKind kind) { return view(stage).pool(kind); }
  std::int32_t& slot(int stage, BufferKind kind, int micro_batch) {
    return view(stage).slot(kind, micro_batch);
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
    op.slots[at(kind)] = index;
  }

  void make_receive_pools() {
    RankReceives receives = find_receives(schedule_, messages_, options_, rank_);
    plan_.ops.reserve(receives.ops);
    inbound_ = std::move(receives.inbound);
    for (const Inbound& inbound : inbound_) {
      Pool& sized = pool(inbound.stage, inbound.kind);
      sized.count = inbound.slots;
      for (int i = sized.count; i-- > 0;) sized.free.push_back(i);
    }
  }

  // The reductions and the optimizer at the list's end may block the rank; one before that end does
  // not (LowerOptions::overlapped_grad_sums).
  void find_tail() {
    const auto goes_on = [](const Step& step) {
      return is_compute(step.action.kind) || is_message(step.action.kind);
    };
    tail_ = at(std::find_if(steps_.rbegin(), steps_.rend(), goes_on).base() - steps_.begin());
  }

  Inbound& inbound_of(int channel) {
    return *std::find_if(inbound_.begin(), inbound_.end(),
                         [&](const Inbound& inbound) { return inbound.channel == channel; });
  }

  // What can be issued now though no action needs it yet.
  void issue_ahead() {
    if (issues_ == nullptr) {
      for (Inbound& inbound : inbound_) post_receives(inbound);
      return;
    }
    while (receives_fit()) issue_group();
  }

  // What must be issued before the step.
  void issue_before(std::size_t step) {
    if (issues_ == nullptr || issued_ == issues_->size()) return;
    if (at((*issues_)[issued_].before_step) > step) return;
    while (issued_ < issues_->size() && at((*issues_)[issued_].before_step) <= step) {
      issue_group();
    }
    issue_ahead();
  }

  void post_receives(Inbound& inbound) {
    while (inbound.posted < inbound.order->size() &&
           !pool(inbound.stage, inbound.kind).free.empty()) {
      post_receive(inbound, (*inbound.order)[inbound.posted++]);
    }
  }

  void post_receive(const Inbound& inbound, int micro_batch) {
    const int index = pool(inbound.stage, inbound.kind).acquire_or_grow();
    slot(inbound.stage, inbound.kind, micro_batch) = index;
    emit_message(OpKind::kPostRecv,
                 {inbound.channel, inbound.stage, micro_batch, index, inbound.action},
                 inbound.kind);
  }

  // Does the next group receive only, and is there a slot for each of its messages?
  bool receives_fit() {
    if (issued_ == issues_->size()) return false;
    std::size_t end = issued_;
    do {
      const Issue& issue = (*issues_)[end];
      if (!issue.receives) return false;
      const Inbound& inbound = inbound_of(issue.channel);
      const auto taken =
          std::count_if(issues_->begin() + static_cast<std::ptrdiff_t>(issued_),
                        issues_->begin() + static_cast<std::ptrdiff_t>(end),
                        [&](const Issue& earlier) { return earlier.channel == issue.channel; });
      const auto free = pool(inbound.stage, inbound.kind).free.size();
      if (free <= at(taken)) return false;
    } while (++end < issues_->size() && (*issues_)[end].with_previous);
    return true;
  }

  void issue_group() {
    do {
      const Issue& issue = (*issues_)[issued_];
      if (issue.receives) {
        post_receive(inbound_of(issue.channel), issue.micro_batch);
      } else {
        const Channel& channel = messages_.channels[at(issue.channel)];
        start_send(channel.kind, channel.from_stage, issue.micro_batch, issue.channel);
      }
      plan_.ops.back().with_previous = issue.with_previous;
    } while (++issued_ < issues_->size() && (*issues_)[issued_].with_previous);
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
    const bool sends =
        action.kind == ActionKind::kSendForward || action.kind == ActionKind::kSendBackward;
    if (!sends) release_kept();
    switch (action.kind) {
      case ActionKind::kForward:
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
      case ActionKind::kBackwardWeight:
        return add_compute(action);
      case ActionKind::kRecvForward:
        return add_receive(action, messages_.forward[at(action.stage) - 1], BufferKind::kInput);
      case ActionKind::kRecvBackward:
        return add_receive(action, messages_.backward[at(action.stage) + 1],
                           BufferKind::kGradOutput);
      case ActionKind::kSendForward:
      case ActionKind::kSendBackward:
        return add_send(action);
      case ActionKind::kReduceGrad:
        emit(OpKind::kReduceGrad, action);
        return;
      case ActionKind::kReduceTied:
        emit(OpKind::kReduceTied, action).channel = next_tied_group(action);
        return;
      case ActionKind::kOptimizer:
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

  // Where the order is global, issue_before() has started it.
  void add_send(const Action& action) {
    if (issues_ != nullptr) return;
    const bool forward = action.kind == ActionKind::kSendForward;
    start_send(action.kind, action.stage, action.micro_batch,
               (forward ? messages_.forward : messages_.backward)[at(action.stage)]);
  }

  void start_send(ActionKind action, int stage, int micro_batch, int channel) {
    const BufferKind kind =
        action == ActionKind::kSendForward ? BufferKind::kOutput : BufferKind::kGradInput;
    const OpenSend send{channel, stage, micro_batch, slot(stage, kind, micro_batch), action};
    emit_message(OpKind::kStartSend, send, kind);
    sends_of(stage, kind).open.push_back(send);
  }

  void wait_for_oldest_send(int stage, BufferKind kind) {
    SendQueue& queue = sends_of(stage, kind);
    const OpenSend send = queue.open[queue.head++];
    if (queue.head == queue.open.size()) {
      queue.open.clear();
      queue.head = 0;
    }
    emit_message(OpKind::kWaitSend, send, kind);
    pool(stage, kind).free.push_back(send.slot);
  }

  // A slot for a tensor about to be sent. Waits for the oldest send where all slots are taken; the
  // pool exceeds send_slots only where more tensors than that lie computed and unsent.
  int acquire_send_slot(Pool& taken, int stage, BufferKind kind) {
    if (taken.free.empty() && taken.count >= options_.send_slots) {
      const SendQueue& queue = sends_of(stage, kind);
      if (queue.head < queue.open.size()) wait_for_oldest_send(stage, kind);
    }
    return taken.acquire_or_grow();
  }

  void drain_sends() {
    release_kept();
    for (const int stage : own_) {
      for (const BufferKind kind : {BufferKind::kOutput, BufferKind::kGradInput}) {
        const SendQueue& queue = sends_of(stage, kind);
        while (queue.head < queue.open.size()) wait_for_oldest_send(stage, kind);
      }
    }
  }

  // Takes a slot for what `action` hands to `neighbour` and returns it: in the neighbour's pool
  // where that is on this rank, else in the stage's own.
  int acquire_hand_over(const StageView& own, const Action& action, int neighbour, BufferKind mine,
                        BufferKind theirs) {
    if (is_local(action.stage, neighbour)) {
      const StageView other = view(neighbour);
      return other.slot(theirs, action.micro_batch) = other.pool(theirs).acquire_or_grow();
    }
    return own.slot(mine, action.micro_batch) =
               acquire_send_slot(own.pool(mine), action.stage, mine);
  }

  void add_compute(const Action& action) {
    const int stage = action.stage;
    const int micro_batch = action.micro_batch;
    const bool forward = action.kind == ActionKind::kForward;
    const bool last = is_last(stage);
    const StageView own = view(stage);
    if (forward) {
      own.slot(BufferKind::kState, micro_batch) = own.pool(BufferKind::kState).acquire_or_grow();
    }
    std::int32_t output = -1, grad_input = -1;
    if (forward && !last) {
      output = acquire_hand_over(own, action, stage + 1, BufferKind::kOutput, BufferKind::kInput);
    } else if (last) {
      std::int32_t& kept = own.slot(BufferKind::kOutput, micro_batch);
      if (forward) kept = own.pool(BufferKind::kOutput).acquire_or_grow();
      output = kept;
    }
    if (!forward && action.kind != ActionKind::kBackwardWeight && stage > 0) {
      grad_input = acquire_hand_over(own, action, stage - 1, BufferKind::kGradInput,
                                     BufferKind::kGradOutput);
    }
    PlanOp& op = emit(OpKind::kCompute, action);
    if (stage > 0) name_slot(op, BufferKind::kInput, own.slot(BufferKind::kInput, micro_batch));
    name_slot(op, BufferKind::kOutput, output);
    if (!forward && !last) {
      name_slot(op, BufferKind::kGradOutput, own.slot(BufferKind::kGradOutput, micro_batch));
    }
    name_slot(op, BufferKind::kGradInput, grad_input);
    name_slot(op, BufferKind::kState, own.slot(BufferKind::kState, micro_batch));
    if (!ends_use(action.kind, schedule_.forward_only)) return;
    if (!forward) {
      std::int32_t& before = last_weight_[local(stage)];
      exact_ = exact_ && micro_batch > before;
      before = micro_batch;
    }
    used_ = action;
    if (issues_ != nullptr) release_kept();
  }

  // Everything kept for the action that used it last, then the receives that now find a slot. Sends
  // of what the action computed come first: another rank waits for them.
  void release_kept() {
    if (!used_) return;
    const Action action = *std::exchange(used_, std::nullopt);
    const StageView own = view(action.stage);
    PlanOp& op = emit(OpKind::kRelease, action);
    const auto release = [&](BufferKind kind) {
      const std::int32_t index = own.slot(kind, action.micro_batch);
      name_slot(op, kind, index);
      own.pool(kind).free.push_back(index);
    };
    if (action.stage > 0) release(BufferKind::kInput);
    release(BufferKind::kState);
    if (is_last(action.stage)) {
      release(BufferKind::kOutput);
    } else if (!schedule_.forward_only) {
      release(BufferKind::kGradOutput);
    }
    if (issues_ != nullptr) return issue_ahead();
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
        const Pool& sized = pools_[i * kKinds + at(kind)];
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
  const std::vector<Issue>* const issues_;  // null: receives are posted ahead
  const int rank_;
  const std::size_t micro_batches_;
  const std::vector<int>& own_;      // this rank's stages
  std::vector<Pool> pools_;          // [own stage][kind]
  std::vector<SendQueue> sends_;     // [own stage][kind]
  std::vector<std::int32_t> slots_;  // [own stage][kind][micro_batch]
  std::vector<Inbound> inbound_;
  std::vector<std::int32_t> last_weight_;  // [own stage] micro-batch, -1: none yet
  bool exact_ = true;
  std::optional<Action> used_;  // what it kept is not released yet
  std::size_t tail_ = 0;        // the first step behind all compute and messages
  std::size_t issued_ = 0;      // of issues_
  std::size_t tied_cursor_ = 0;
  RankPlan plan_;
};

}  // namespace

PlannedRank plan_rank(const Schedule& lowered, const PlanMessages& messages,
                      const std::vector<TiedStages>& tied, const PlanOptions& options, int rank) {
  return RankPlanner(lowered, messages, tied, options, rank).run();
}

}  // namespace sluice
