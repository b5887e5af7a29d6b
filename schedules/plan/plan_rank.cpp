#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "schedules/model/actions.hpp"
#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"
#include "schedules/plan/collectives.hpp"
#include "schedules/plan/plan_parts.hpp"

namespace sluice {
namespace {

// What is counted while pools are sized; unused afterwards.
struct Demand {
  std::vector<std::int32_t>
      index_of;  // [micro_batch] position in the order, where that is no count
  int needed = 0, waits = 0, released = 0, most = 0;

  void need(int posts) {
    needed = std::max(needed, posts);
    most = std::max(most, needed - released);
  }
};

// Receives of one channel, in the sender's order.
struct Inbound {
  int channel = -1;
  ActionKind action = ActionKind::kRecvForward;
  BufferKind kind = BufferKind::kInput;
  int stage = -1;
  const std::vector<int>* order = nullptr;  // micro-batches, of PlanMessages
  std::size_t posted = 0;                   // for the walk: how many of them
  int slots = 0;                            // as many as must be posted at once, and receive_ahead
  Demand demand = {};
};

Inbound& inbound_of(std::vector<Inbound>& all, int channel) {
  return *std::find_if(all.begin(), all.end(),
                       [&](const Inbound& inbound) { return inbound.channel == channel; });
}

struct RankReceives {
  std::vector<Inbound> inbound;
  std::size_t ops = 0;  // the rank's whole list becomes
};

// A receive can be waited for only when all before it in the channel are posted too, and where the
// order is global, all before it in that order. So a pool needs, at each wait, a slot for every
// message up to the furthest one that must be posted and is not released. Throws
// Error(kUsage) for receives that are not all there.
class ReceiveFinder {
 public:
  ReceiveFinder(const Schedule& lowered, const PlanMessages& messages, const PlanOptions& options,
                int rank)
      : schedule_(lowered),
        steps_(lowered.ranks[at(rank)]),
        messages_(messages),
        options_(options),
        rank_(rank) {}

  RankReceives run() {
    for (const int stage : schedule_.placement.stages_of(rank_)) {
      if (stage > 0) {
        add_inbound(messages_.forward[at(stage) - 1], ActionKind::kRecvForward, BufferKind::kInput,
                    stage);
      }
      if (stage + 1 < schedule_.placement.stages()) {
        add_inbound(messages_.backward[at(stage) + 1], ActionKind::kRecvBackward,
                    BufferKind::kGradOutput, stage);
      }
    }
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      count_issues(i);
      count(steps_[i].action);
      if (steps_[i].overlapped) count(*steps_[i].overlapped);
    }
    for (Inbound& inbound : result_.inbound) set_slots(inbound);
    return std::move(result_);
  }

 private:
  void add_inbound(int channel, ActionKind action, BufferKind kind, int stage) {
    if (channel < 0) return;
    const std::vector<int>& order = messages_.orders[at(channel)];
    result_.inbound.push_back({channel, action, kind, stage, &order});
    if (std::is_sorted(order.begin(), order.end())) return;
    std::vector<std::int32_t>& index_of = result_.inbound.back().demand.index_of;
    index_of.resize(order.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
      index_of[at(order[i])] = static_cast<std::int32_t>(i);
    }
  }

  // Counts what the global order issues before the step.
  void count_issues(std::size_t step) {
    if (messages_.issues.empty()) return;
    const std::vector<Issue>& issues = messages_.issues[at(rank_)];
    for (; issued_ < issues.size(); ++issued_) {
      const Issue& issue = issues[issued_];
      if (at(issue.before_step) > step) return;
      if (!issue.receives) continue;
      Demand& demand = inbound_of(result_.inbound, issue.channel).demand;
      demand.need(demand.needed + 1);
    }
  }

  // What the action asks of the pools, and how many ops it becomes: a receive is posted and waited
  // for, a send started and waited for, each micro-batch's buffers are released once.
  void count(const Action& action) {
    result_.ops += is_message(action.kind) || is_move(action.kind) ? 2 : 1;
    if (is_receive(action.kind)) {
      for (Inbound& inbound : result_.inbound) {
        if (inbound.stage != action.stage || inbound.action != action.kind) continue;
        Demand& demand = inbound.demand;
        demand.need(1 + (demand.index_of.empty() ? action.micro_batch
                                                 : demand.index_of[at(action.micro_batch)]));
        ++demand.waits;
      }
      return;
    }
    if (!ends_use(action.kind, schedule_.forward_only)) return;
    ++result_.ops;
    for (Inbound& inbound : result_.inbound) {
      if (inbound.stage == action.stage) ++inbound.demand.released;
    }
  }

  void set_slots(Inbound& inbound) const {
    const Demand& demand = inbound.demand;
    const int micro_batches = schedule_.micro_batches;
    if (demand.waits != micro_batches) {
      refuse("plan of '", schedule_.name, "': rank ", rank_, " receives ", demand.waits, " of ",
             micro_batches, " messages for stage ", inbound.stage,
             "; pass a schedule that lower() returned");
    }
    int most = demand.most;
    if (!messages_.depths.empty()) {
      most = std::max(most, messages_.depths[at(inbound.channel)]);
    }
    inbound.slots = std::min(micro_batches, most + std::min(options_.receive_ahead, micro_batches));
  }

  const Schedule& schedule_;
  const std::vector<Step>& steps_;
  const PlanMessages& messages_;
  const PlanOptions& options_;
  const int rank_;
  std::size_t issued_ = 0;
  RankReceives result_;
};

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

// The pools of a rank's stages, and where in them the tensors of each micro-batch lie.
class RankBuffers {
 public:
  RankBuffers(const std::vector<int>& own, int micro_batches)
      : own_(own),
        micro_batches_(at(micro_batches)),
        pools_(own.size() * kBufferKinds),
        slots_(pools_.size() * micro_batches_, -1) {}

  struct StageView {
    Pool* pools = nullptr;          // [kind]
    std::int32_t* slots = nullptr;  // [kind][micro_batch]
    std::size_t micro_batches = 0;

    [[nodiscard]] Pool& pool(BufferKind kind) const { return pools[at(kind)]; }
    [[nodiscard]] std::int32_t& slot(BufferKind kind, int micro_batch) const {
      return slots[at(kind) * micro_batches + at(micro_batch)];
    }
  };

  // Position of one of the rank's stages, which ascend.
  [[nodiscard]] std::size_t local(int stage) const {
    return at(std::lower_bound(own_.begin(), own_.end(), stage) - own_.begin());
  }
  StageView view(int stage) {
    const std::size_t first = local(stage) * kBufferKinds;
    return {&pools_[first], &slots_[first * micro_batches_], micro_batches_};
  }
  Pool& pool(int stage, BufferKind kind) { return view(stage).pool(kind); }

  [[nodiscard]] std::vector<BufferPool> used_pools() const {
    std::vector<BufferPool> used;
    for (std::size_t i = 0; i < pools_.size(); ++i) {
      if (pools_[i].count == 0) continue;
      used.push_back(
          {own_[i / kBufferKinds], static_cast<BufferKind>(i % kBufferKinds), pools_[i].count});
    }
    return used;
  }

 private:
  const std::vector<int>& own_;
  const std::size_t micro_batches_;
  std::vector<Pool> pools_;          // [own stage][kind]
  std::vector<std::int32_t> slots_;  // [own stage][kind][micro_batch]
};

// A message with its slot.
struct Message {
  std::int32_t channel = -1, stage = -1, micro_batch = -1, slot = -1;
  ActionKind action = ActionKind::kSendForward;
  BufferKind buffer = BufferKind::kOutput;
};

void name_slot(PlanOp& op, BufferKind kind, std::int32_t index) { op.slots[at(kind)] = index; }

PlanOp& emit(std::vector<PlanOp>& ops, OpKind kind, const Action& action) {
  PlanOp& op = ops.emplace_back();
  op.kind = kind;
  op.action = action.kind;
  op.stage = action.stage;
  op.micro_batch = action.micro_batch;
  return op;
}

void emit_message(std::vector<PlanOp>& ops, OpKind kind, const Message& message) {
  PlanOp& op = ops.emplace_back();
  op.kind = kind;
  op.action = message.action;
  op.stage = message.stage;
  op.micro_batch = message.micro_batch;
  op.channel = message.channel;
  name_slot(op, message.buffer, message.slot);
}

// The sends of a rank that are started and not yet waited for.
class OpenSends {
 public:
  OpenSends(const std::vector<int>& own, int send_slots, RankBuffers& buffers,
            std::vector<PlanOp>& ops)
      : own_(own),
        send_slots_(send_slots),
        buffers_(buffers),
        ops_(ops),
        queues_(own.size() * kBufferKinds) {}

  void start(ActionKind action, int stage, int micro_batch, int channel) {
    const BufferKind kind =
        action == ActionKind::kSendForward ? BufferKind::kOutput : BufferKind::kGradInput;
    const std::int32_t slot = buffers_.view(stage).slot(kind, micro_batch);
    const Message send{channel, stage, micro_batch, slot, action, kind};
    emit_message(ops_, OpKind::kStartSend, send);
    queue_of(stage, kind).push_back(send);
  }

  // A slot of its send pool for a tensor about to be sent. Waits for the oldest send where all
  // slots are taken; the pool exceeds send_slots only where more tensors than that are computed and
  // not sent yet.
  int acquire_slot(Pool& pool, int stage, BufferKind kind) {
    if (pool.free.empty() && pool.count >= send_slots_) wait_for_oldest(stage, kind);
    return pool.acquire_or_grow();
  }

  void wait_for_all() {
    for (const int stage : own_) {
      for (const BufferKind kind : {BufferKind::kOutput, BufferKind::kGradInput}) {
        while (wait_for_oldest(stage, kind)) continue;
      }
    }
  }

 private:
  std::deque<Message>& queue_of(int stage, BufferKind kind) {
    return queues_[buffers_.local(stage) * kBufferKinds + at(kind)];
  }

  // False where no send is open.
  bool wait_for_oldest(int stage, BufferKind kind) {
    std::deque<Message>& queue = queue_of(stage, kind);
    if (queue.empty()) return false;
    const Message send = queue.front();
    queue.pop_front();
    emit_message(ops_, OpKind::kWaitSend, send);
    buffers_.pool(stage, kind).free.push_back(send.slot);
    return true;
  }

  const std::vector<int>& own_;
  const int send_slots_;
  RankBuffers& buffers_;
  std::vector<PlanOp>& ops_;
  std::vector<std::deque<Message>> queues_;  // [own stage][kind] oldest first
};

// Posts receives, and where the order is global, starts sends too.
class Issuer {
 public:
  // `issues` is null where receives are posted ahead. Makes the receive pools.
  Issuer(std::vector<Inbound> inbound, const std::vector<Issue>* issues,
         const std::vector<Channel>& channels, RankBuffers& buffers, OpenSends& sends,
         std::vector<PlanOp>& ops)
      : inbound_(std::move(inbound)),
        issues_(issues),
        channels_(channels),
        buffers_(buffers),
        sends_(sends),
        ops_(ops) {
    for (const Inbound& each : inbound_) {
      Pool& pool = buffers_.pool(each.stage, each.kind);
      pool.count = each.slots;
      for (int i = pool.count; i-- > 0;) pool.free.push_back(i);
    }
  }

  [[nodiscard]] bool is_global() const { return issues_ != nullptr; }

  // Issues what can go now though no action needs it yet: receives for `stage`, -1: for any.
  void issue_ahead(int stage = -1) {
    if (is_global()) {
      while (receives_fit()) issue_group();
      return;
    }
    for (Inbound& inbound : inbound_) {
      if (stage >= 0 && inbound.stage != stage) continue;
      while (inbound.posted < inbound.order->size() &&
             !buffers_.pool(inbound.stage, inbound.kind).free.empty()) {
        post_receive(inbound, (*inbound.order)[inbound.posted++]);
      }
    }
  }

  // Issues what must go before the step.
  void issue_before(std::size_t step) {
    if (!is_due(step)) return;
    while (is_due(step)) issue_group();
    issue_ahead();
  }

 private:
  [[nodiscard]] bool is_due(std::size_t step) const {
    return is_global() && issued_ < issues_->size() && at((*issues_)[issued_].before_step) <= step;
  }

  void post_receive(const Inbound& inbound, int micro_batch) {
    const RankBuffers::StageView own = buffers_.view(inbound.stage);
    const int slot = own.pool(inbound.kind).acquire_or_grow();
    own.slot(inbound.kind, micro_batch) = slot;
    emit_message(ops_, OpKind::kPostRecv,
                 {inbound.channel, inbound.stage, micro_batch, slot, inbound.action, inbound.kind});
  }

  // Does the next group receive only, and is there a slot for each of its messages?
  bool receives_fit() {
    if (issued_ == issues_->size()) return false;
    std::size_t end = issued_;
    do {
      const Issue& issue = (*issues_)[end];
      if (!issue.receives) return false;
      const Inbound& inbound = inbound_of(inbound_, issue.channel);
      const auto taken =
          std::count_if(issues_->begin() + static_cast<std::ptrdiff_t>(issued_),
                        issues_->begin() + static_cast<std::ptrdiff_t>(end),
                        [&](const Issue& earlier) { return earlier.channel == issue.channel; });
      if (buffers_.pool(inbound.stage, inbound.kind).free.size() <= at(taken)) return false;
    } while (++end < issues_->size() && (*issues_)[end].with_previous);
    return true;
  }

  void issue_group() {
    do {
      const Issue& issue = (*issues_)[issued_];
      if (issue.receives) {
        post_receive(inbound_of(inbound_, issue.channel), issue.micro_batch);
      } else {
        const Channel& channel = channels_[at(issue.channel)];
        sends_.start(channel.kind, channel.from_stage, issue.micro_batch, issue.channel);
      }
      ops_.back().with_previous = issue.with_previous;
    } while (++issued_ < issues_->size() && (*issues_)[issued_].with_previous);
  }

  std::vector<Inbound> inbound_;
  const std::vector<Issue>* const issues_;
  const std::vector<Channel>& channels_;
  RankBuffers& buffers_;
  OpenSends& sends_;
  std::vector<PlanOp>& ops_;
  std::size_t issued_ = 0;  // of issues_
};

// The states of a rank's stages that are away from its device, or on their way.
class OpenMoves {
 public:
  // Both outlive this.
  OpenMoves(RankBuffers& buffers, std::vector<PlanOp>& ops) : buffers_(buffers), ops_(ops) {}

  void computed() { ++computed_; }

  // A slot for the state of an F. One whose state has left during an earlier action of the rank is
  // free once that is waited for.
  std::int32_t acquire(const RankBuffers::StageView& own, int stage) {
    Pool& pool = own.pool(BufferKind::kState);
    const auto oldest = find(stage);
    if (!pool.free.empty() || oldest == leaving_.end() || oldest->after == computed_) {
      return pool.acquire_or_grow();
    }
    return end(oldest);
  }

  void offload(const RankBuffers::StageView& own, const Action& action) {
    std::int32_t& from = own.slot(BufferKind::kState, action.micro_batch);
    std::int32_t& to = own.slot(BufferKind::kStored, action.micro_batch);
    to = own.pool(BufferKind::kStored).acquire_or_grow();
    emit_start(action, from, to);
    leaving_.push_back({action, from, computed_});
    from = -1;
  }

  // Into the slot that the last action's state leaves, which no F could take yet; else into one
  // that is free, or that an earlier state leaves.
  void fetch(const RankBuffers::StageView& own, const Action& action) {
    std::int32_t& to = own.slot(BufferKind::kState, action.micro_batch);
    std::int32_t& from = own.slot(BufferKind::kStored, action.micro_batch);
    Pool& pool = own.pool(BufferKind::kState);
    auto leaving = find(action.stage);
    if (!leaving_.empty() && leaving_.back().action.stage == action.stage &&
        leaving_.back().after == computed_) {
      leaving = std::prev(leaving_.end());
    } else if (!pool.free.empty()) {
      leaving = leaving_.end();
    }
    if (leaving == leaving_.end()) {
      to = pool.acquire_or_grow();
    } else {
      to = leaving->slot;
      leaving_.erase(leaving);
    }
    emit_start(action, to, from);
    own.pool(BufferKind::kStored).free.push_back(std::exchange(from, -1));
    coming_.push_back({action, to, computed_});
  }

  // Before an action that reads the micro-batch's state.
  void await(const Action& action) {
    const auto found = std::find_if(coming_.begin(), coming_.end(), [&](const Move& move) {
      return move.action.stage == action.stage && move.action.micro_batch == action.micro_batch;
    });
    if (found == coming_.end()) return;
    emit_end(*found);
    coming_.erase(found);
  }

  void await_all() {
    while (!leaving_.empty()) {
      const int stage = leaving_.front().action.stage;
      const std::int32_t slot = end(leaving_.begin());
      buffers_.pool(stage, BufferKind::kState).free.push_back(slot);
    }
  }

 private:
  struct Move {
    Action action;
    std::int32_t slot = -1;  // of kState
    std::int64_t after = 0;  // actions that the rank has computed before
  };
  using Moves = std::deque<Move>;

  // The oldest that leaves a slot of the stage.
  Moves::iterator find(int stage) {
    return std::find_if(leaving_.begin(), leaving_.end(),
                        [&](const Move& move) { return move.action.stage == stage; });
  }

  std::int32_t end(const Moves::iterator& move) {
    emit_end(*move);
    const std::int32_t slot = move->slot;
    leaving_.erase(move);
    return slot;
  }

  void emit_start(const Action& action, std::int32_t state, std::int32_t stored) {
    PlanOp& op = emit(ops_, OpKind::kStartMove, action);
    name_slot(op, BufferKind::kState, state);
    name_slot(op, BufferKind::kStored, stored);
  }

  void emit_end(const Move& move) {
    name_slot(emit(ops_, OpKind::kWaitMove, move.action), BufferKind::kState, move.slot);
  }

  RankBuffers& buffers_;
  std::vector<PlanOp>& ops_;
  Moves leaving_, coming_;  // started and not waited for, oldest first
  std::int64_t computed_ = 0;
};

class RankPlanner {
 public:
  RankPlanner(const Schedule& lowered, const PlanMessages& messages,
              const std::vector<TiedStages>& tied, const PlanOptions& options,
              const CollectiveLists& collectives, int rank, RankReceives receives)
      : schedule_(lowered),
        placement_(lowered.placement),
        messages_(messages),
        tied_(tied),
        collectives_(collectives),
        fold_every_(options.fold_every),
        rank_(rank),
        buffers_(placement_.stages_of(rank), lowered.micro_batches),
        sends_(placement_.stages_of(rank), options.send_slots, buffers_, plan_.ops),
        moves_(buffers_, plan_.ops),
        issuer_(std::move(receives.inbound),
                messages.issues.empty() ? nullptr : &messages.issues[at(rank)], messages.channels,
                buffers_, sends_, plan_.ops),
        last_weight_(placement_.stages_of(rank).size(), -1),
        computed_(last_weight_.size()) {
    plan_.ops.reserve(receives.ops);
  }

  PlannedRank run() {
    const std::vector<Step>& steps = schedule_.ranks[at(rank_)];
    // The reductions and the optimizer at the list's end may block the rank. A sum before that end
    // does not (LowerOptions::overlapped_grad_sums).
    const auto tail = std::find_if(steps.rbegin(), steps.rend(), [](const Step& step) {
                        return is_compute(step.action.kind) || is_message(step.action.kind);
                      }).base();
    issuer_.issue_ahead();
    for (auto step = steps.begin(); step != steps.end(); ++step) {
      issuer_.issue_before(at(step - steps.begin()));
      if (step == tail) finish_messages();
      add(step->action);
      if (step->overlapped) add(*step->overlapped);
    }
    finish_messages();
    plan_.pools = buffers_.used_pools();
    return {std::move(plan_), exact_};
  }

 private:
  bool is_last(int stage) const { return stage + 1 == placement_.stages(); }

  void finish_messages() {
    release_kept();
    fold();
    sends_.wait_for_all();
    moves_.await_all();
  }

  void add(const Action& action) {
    if (!is_send(action.kind)) {
      release_kept();
      fold();
    }
    switch (action.kind) {
      case ActionKind::kForward:
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
      case ActionKind::kBackwardWeight:
        return add_compute(action);
      case ActionKind::kRecompute:
        return add_recompute(action);
      case ActionKind::kRecvForward:
        return add_receive(action, messages_.forward[at(action.stage) - 1], BufferKind::kInput);
      case ActionKind::kRecvBackward:
        return add_receive(action, messages_.backward[at(action.stage) + 1],
                           BufferKind::kGradOutput);
      case ActionKind::kSendForward:
        return add_send(action, messages_.forward);
      case ActionKind::kSendBackward:
        return add_send(action, messages_.backward);
      case ActionKind::kOffload:
        return moves_.offload(buffers_.view(action.stage), action);
      case ActionKind::kFetch:
        return moves_.fetch(buffers_.view(action.stage), action);
      case ActionKind::kUnshard:
        emit(plan_.ops, OpKind::kUnshard, action);
        return;
      case ActionKind::kReshard:
        emit(plan_.ops, OpKind::kReshard, action);
        return;
      case ActionKind::kReduceGrad:
        emit(plan_.ops, OpKind::kReduceGrad, action);
        return;
      case ActionKind::kReduceTied:
        emit(plan_.ops, OpKind::kReduceTied, action).channel = next_tied_group(action);
        return;
      case ActionKind::kOptimizer:
        emit(plan_.ops, OpKind::kOptimizer, action);
        return;
      default:
        refuse("plan of '", schedule_.name, "': rank ", rank_, " lists ", action,
               ", which plans do not carry; legal are F, B, I, W, RECOMPUTE, messages, OFFLOAD, "
               "FETCH, UNSHARD, RESHARD, REDUCE_GRAD, REDUCE_TIED and OPTIMIZER");
    }
  }

  void add_receive(const Action& action, int channel, BufferKind kind) {
    const std::int32_t slot = buffers_.view(action.stage).slot(kind, action.micro_batch);
    emit_message(plan_.ops, OpKind::kWaitRecv,
                 {channel, action.stage, action.micro_batch, slot, action.kind, kind});
  }

  // Where the order is global, the issuer has started it.
  void add_send(const Action& action, const std::vector<int>& channels) {
    if (issuer_.is_global()) return;
    sends_.start(action.kind, action.stage, action.micro_batch, channels[at(action.stage)]);
  }

  // Takes a slot for what `action` hands to `neighbour` and returns it: in the neighbour's pool
  // where that is on this rank, else in the stage's own.
  int acquire_hand_over(const RankBuffers::StageView& own, const Action& action, int neighbour,
                        BufferKind mine, BufferKind theirs) {
    if (placement_.rank_of(neighbour) == rank_) {
      const RankBuffers::StageView other = buffers_.view(neighbour);
      return other.slot(theirs, action.micro_batch) = other.pool(theirs).acquire_or_grow();
    }
    return own.slot(mine, action.micro_batch) =
               sends_.acquire_slot(own.pool(mine), action.stage, mine);
  }

  void add_compute(const Action& action) {
    const int stage = action.stage;
    const int micro_batch = action.micro_batch;
    const bool forward = action.kind == ActionKind::kForward;
    const bool last = is_last(stage);
    const RankBuffers::StageView own = buffers_.view(stage);
    if (forward) {
      own.slot(BufferKind::kState, micro_batch) = moves_.acquire(own, stage);
    } else {
      moves_.await(action);
    }
    std::int32_t output = -1, grad_input = -1;
    if (forward && !last) {
      output = acquire_hand_over(own, action, stage + 1, BufferKind::kOutput, BufferKind::kInput);
    } else if (last) {
      std::int32_t& kept = own.slot(BufferKind::kOutput, micro_batch);
      if (forward) kept = own.pool(BufferKind::kOutput).acquire_or_grow();
      output = kept;
    }
    if (makes_gradient(action.kind) && stage > 0) {
      grad_input = acquire_hand_over(own, action, stage - 1, BufferKind::kGradInput,
                                     BufferKind::kGradOutput);
    }
    PlanOp& op = emit(plan_.ops, OpKind::kCompute, action);
    if (stage > 0) name_slot(op, BufferKind::kInput, own.slot(BufferKind::kInput, micro_batch));
    name_slot(op, BufferKind::kOutput, output);
    if (!forward && !last) {
      name_slot(op, BufferKind::kGradOutput, own.slot(BufferKind::kGradOutput, micro_batch));
    }
    name_slot(op, BufferKind::kGradInput, grad_input);
    name_slot(op, BufferKind::kState, own.slot(BufferKind::kState, micro_batch));
    collectives_.name(op);
    moves_.computed();
    count_for_fold(action);
    if (!ends_use(action.kind, schedule_.forward_only)) return;
    if (!forward) {
      std::int32_t& before = last_weight_[buffers_.local(stage)];
      exact_ = exact_ && micro_batch > before;
      before = micro_batch;
    }
    used_ = action;
    if (issuer_.is_global()) release_kept();
  }

  void add_recompute(const Action& action) {
    const RankBuffers::StageView own = buffers_.view(action.stage);
    moves_.await(action);
    PlanOp& op = emit(plan_.ops, OpKind::kCompute, action);
    for (const BufferKind kind : {BufferKind::kInput, BufferKind::kState}) {
      if (kind == BufferKind::kInput && action.stage == 0) continue;
      name_slot(op, kind, own.slot(kind, action.micro_batch));
    }
    collectives_.name(op);
  }

  // The action that completes a group is followed by a fold, after the send of what it computed.
  void count_for_fold(const Action& action) {
    const bool forward = action.kind == ActionKind::kForward;
    if (fold_every_ == 0 || (!forward && !ends_backward(action.kind))) return;
    std::int32_t& count = computed_[buffers_.local(action.stage)][forward ? 0 : 1];
    if (++count % fold_every_ == 0) folded_ = make_action(action.kind, action.stage, count - 1);
  }

  void fold() {
    if (folded_) emit(plan_.ops, OpKind::kFold, *std::exchange(folded_, std::nullopt));
  }

  // Everything kept for the action that used it last, then the receives that now find a slot. Sends
  // of what the action computed come first: another rank waits for them.
  void release_kept() {
    if (!used_) return;
    const Action action = *std::exchange(used_, std::nullopt);
    const RankBuffers::StageView own = buffers_.view(action.stage);
    PlanOp& op = emit(plan_.ops, OpKind::kRelease, action);
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
    issuer_.issue_ahead(action.stage);
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
    refuse("plan of '", schedule_.name, "': ", action, " on rank ", rank_,
           " belongs to no tied parameter; pass the groups that lower() got");
  }

  const Schedule& schedule_;
  const Placement& placement_;
  const PlanMessages& messages_;
  const std::vector<TiedStages>& tied_;
  const CollectiveLists& collectives_;
  const int fold_every_;
  const int rank_;
  RankPlan plan_;
  RankBuffers buffers_;
  OpenSends sends_;
  OpenMoves moves_;
  Issuer issuer_;
  std::vector<std::int32_t> last_weight_;              // [own stage] micro-batch, -1: none yet
  std::vector<std::array<std::int32_t, 2>> computed_;  // [own stage] F; W or B
  std::optional<Action> folded_;                       // the fold that is not listed yet
  bool exact_ = true;
  std::optional<Action> used_;  // what it kept is not released yet
  std::size_t tied_cursor_ = 0;
};

}  // namespace

PlannedRank plan_rank(const Schedule& lowered, const PlanMessages& messages,
                      const std::vector<TiedStages>& tied, const PlanOptions& options,
                      const CollectiveLists& collectives, int rank) {
  return RankPlanner(lowered, messages, tied, options, collectives, rank,
                     ReceiveFinder(lowered, messages, options, rank).run())
      .run();
}

}  // namespace sluice
