#include "schedules/verify_rank.hpp"

#include <algorithm>
#include <array>
#include <string>

namespace sluice {
namespace {

constexpr std::array kAllBuffers = {BufferKind::kInput, BufferKind::kOutput,
                                    BufferKind::kGradOutput, BufferKind::kGradInput,
                                    BufferKind::kState};

enum class SlotState : std::uint8_t { kFree, kPosted, kFilled, kSending, kSent };
constexpr std::array<std::string_view, 5> kStateNames = {"free", "posted and not waited for",
                                                         "filled", "being sent", "sent"};

struct Slot {
  SlotState state = SlotState::kFree;
  std::int32_t micro_batch = -1;
};

// What has been computed for one (stage, micro-batch), as bits.
constexpr std::uint8_t kForwardDone = 1, kInputDone = 2, kWeightDone = 4;

using Objection = std::optional<std::string>;

class RankReplay {
 public:
  RankReplay(const Plan& plan, int rank, const std::vector<int>& local_stage, PlanTrace& trace)
      : plan_(plan),
        placement_(plan.placement),
        rank_(rank),
        own_(plan.placement.stages_of(rank)),
        local_stage_(local_stage),
        trace_(trace),
        events_(trace.events[static_cast<std::size_t>(rank)]),
        pools_(own_.size() * kBufferKinds),
        done_(own_.size() * static_cast<std::size_t>(plan.micro_batches)),
        weights_done_(own_.size()),
        last_weight_(own_.size(), -1),
        reduced_(own_.size()),
        tied_reduced_(plan.tied.size()) {}

  std::optional<Violation> run() {
    if (const auto objection = lay_out_pools()) {
      return Violation{rank_, -1, "rank " + std::to_string(rank_) + ": " + *objection};
    }
    const std::vector<PlanOp>& ops = plan_.ranks[static_cast<std::size_t>(rank_)].ops;
    events_.reserve(static_cast<std::size_t>(std::count_if(
        ops.begin(), ops.end(), [](const PlanOp& op) { return leaves_event(op.kind); })));
    for (std::size_t i = 0; i < ops.size(); ++i) {
      if (const auto objection = replay(ops[i])) {
        return violation_at(plan_, rank_, static_cast<int>(i), *objection);
      }
    }
    trace_.peak_in_flight[static_cast<std::size_t>(rank_)] = peak_;
    if (const auto objection = check_end()) {
      return Violation{rank_, -1, "rank " + std::to_string(rank_) + ": " + *objection};
    }
    return std::nullopt;
  }

 private:
  struct PoolRange {
    std::size_t offset = 0;
    std::int32_t count = 0;
  };

  Objection lay_out_pools() {
    std::size_t total = 0;
    for (const BufferPool& pool : plan_.ranks[static_cast<std::size_t>(rank_)].pools) {
      const std::string name =
          "pool " + std::string(name_of(pool.kind)) + " of stage " + std::to_string(pool.stage);
      if (!is_own(pool.stage)) return name + " belongs to no stage of this rank";
      PoolRange& range = range_of(pool.stage, pool.kind);
      if (range.count != 0) return name + " is listed twice";
      if (pool.count < 1) {
        return name + " has " + std::to_string(pool.count) + " slots; at least 1 is needed";
      }
      range = PoolRange{total, pool.count};
      total += static_cast<std::size_t>(pool.count);
    }
    slots_.resize(total);
    return std::nullopt;
  }

  Objection replay(const PlanOp& op) {
    if (!is_own(op.stage)) {
      return "stage " + std::to_string(op.stage) + " is not a stage of this rank";
    }
    if (optimized_) return "nothing may follow the optimizer";
    const bool issues = op.kind == OpKind::kPostRecv || op.kind == OpKind::kStartSend;
    if (op.with_previous && !(issues && after_issue_)) {
      return "only a post or a start right after another one can be in a group with the op before";
    }
    after_issue_ = issues;
    switch (op.kind) {
      case OpKind::kPostRecv:
      case OpKind::kWaitRecv:
      case OpKind::kStartSend:
      case OpKind::kWaitSend:
        return replay_message(op);
      case OpKind::kCompute:
        return replay_compute(op);
      case OpKind::kRelease:
        return replay_release(op);
      default:
        return replay_collective(op);
    }
  }

  // The message's channel, buffer kind and named slot, then the op's own step.
  Objection replay_message(const PlanOp& op) {
    if (op.channel < 0 || static_cast<std::size_t>(op.channel) >= plan_.channels.size()) {
      return "channel " + std::to_string(op.channel) + " does not exist; legal are 0 to " +
             std::to_string(static_cast<int>(plan_.channels.size()) - 1);
    }
    if (const auto objection = check_micro_batch(op)) return objection;
    const Channel& channel = plan_.channels[static_cast<std::size_t>(op.channel)];
    const bool sends = op.kind == OpKind::kStartSend || op.kind == OpKind::kWaitSend;
    const bool forward = channel.kind == ActionKind::kSendForward;
    const ActionKind received = forward ? ActionKind::kRecvForward : ActionKind::kRecvBackward;
    if (op.stage != (sends ? channel.from_stage : channel.to_stage) ||
        op.action != (sends ? channel.kind : received)) {
      return "channel " + std::to_string(op.channel) + " carries " +
             std::string(name_of(channel.kind)) + " from stage " +
             std::to_string(channel.from_stage) + " to stage " + std::to_string(channel.to_stage);
    }
    const BufferKind kind = sends ? (forward ? BufferKind::kOutput : BufferKind::kGradInput)
                                  : (forward ? BufferKind::kInput : BufferKind::kGradOutput);
    if (const auto objection = check_named(op, mask(kind))) return objection;
    if (const auto objection = check_index(op.stage, kind, op.slot(kind))) return objection;
    return step_message(op, slot_of(op.stage, kind, op.slot(kind)));
  }

  Objection step_message(const PlanOp& op, Slot& slot) {
    const bool posts = op.kind == OpKind::kPostRecv || op.kind == OpKind::kWaitRecv;
    auto& indices = posts ? trace_.post_index : trace_.send_index;
    std::int32_t& index = indices[static_cast<std::size_t>(op.channel) *
                                      static_cast<std::size_t>(plan_.micro_batches) +
                                  static_cast<std::size_t>(op.micro_batch)];
    std::int32_t& open = trace_.open_sends[static_cast<std::size_t>(op.channel)];
    const auto pair_index =
        static_cast<std::size_t>(trace_.pairs[static_cast<std::size_t>(op.channel)]);
    PairDepth& pair = trace_.pair_depths[pair_index];
    std::int32_t& open_of_pair = trace_.open_of_pair[pair_index];
    switch (op.kind) {
      case OpKind::kPostRecv:
        if (index >= 0) return "this message has a receive already";
        if (slot.state != SlotState::kFree) return not_in(slot, SlotState::kFree, -1);
        slot = Slot{SlotState::kPosted, op.micro_batch};
        break;
      case OpKind::kWaitRecv:
        if (!holds(slot, SlotState::kPosted, op)) {
          return "no receive of this message is posted before the wait; " +
                 not_in(slot, SlotState::kPosted, op.micro_batch);
        }
        slot.state = SlotState::kFilled;
        break;
      case OpKind::kStartSend:
        if (index >= 0) return "this message is sent already";
        if (!holds(slot, SlotState::kFilled, op)) {
          return not_in(slot, SlotState::kFilled, op.micro_batch);
        }
        slot.state = SlotState::kSending;
        trace_.queue_depth[static_cast<std::size_t>(op.channel)] =
            std::max(trace_.queue_depth[static_cast<std::size_t>(op.channel)], ++open);
        pair.depth = std::max(pair.depth, ++open_of_pair);
        break;
      default:
        if (!holds(slot, SlotState::kSending, op)) {
          return "no send of this message is started before the wait; " +
                 not_in(slot, SlotState::kSending, op.micro_batch);
        }
        slot.state = SlotState::kSent;
        --open;
        --open_of_pair;
        break;
    }
    if (index < 0) {
      index = (posts ? trace_.posted : trace_.sent)[static_cast<std::size_t>(op.channel)]++;
    }
    events_.push_back(ProgressEvent{op.kind, op.with_previous, op.channel, index});
    return std::nullopt;
  }

  Objection replay_compute(const PlanOp& op) {
    if (!is_compute(op.action)) {
      return std::string(name_of(op.action)) + " does not compute; legal are F, B, I and W";
    }
    if (const auto objection = check_micro_batch(op)) return objection;
    if (const auto objection = advance_done(op)) return objection;
    const bool first = op.stage == 0;
    const bool last = op.stage + 1 == placement_.stages();
    const bool forward = op.action == ActionKind::kForward;
    const std::uint8_t input = first ? std::uint8_t{0} : mask(BufferKind::kInput);
    const std::uint8_t kept_output =
        last ? mask(BufferKind::kOutput) : mask(BufferKind::kGradOutput);
    unsigned reads = input, writes = 0;
    if (forward) {
      writes = mask(BufferKind::kState) | mask(BufferKind::kOutput);
    } else {
      reads = input | mask(BufferKind::kState) | kept_output;
      const bool hands_down = op.action != ActionKind::kBackwardWeight && !first;
      writes = hands_down ? mask(BufferKind::kGradInput) : 0U;
    }
    if (const auto objection = check_named(op, reads | writes)) return objection;
    for (const BufferKind kind : kAllBuffers) {
      if (((reads | writes) & mask(kind)) == 0) continue;
      const bool written = (writes & mask(kind)) != 0;
      if (const auto objection = use(op, kind, written)) return objection;
    }
    return std::nullopt;
  }

  Objection use(const PlanOp& op, BufferKind kind, bool written) {
    int owner = op.stage;
    BufferKind held_as = kind;
    if (written && kind == BufferKind::kOutput && is_own(op.stage + 1)) {
      owner = op.stage + 1;
      held_as = BufferKind::kInput;
    } else if (written && kind == BufferKind::kGradInput && is_own(op.stage - 1)) {
      owner = op.stage - 1;
      held_as = BufferKind::kGradOutput;
    }
    if (auto objection = check_index(owner, held_as, op.slot(kind))) return objection;
    Slot& slot = slot_of(owner, held_as, op.slot(kind));
    const std::string_view verb = written ? " is written: " : " is read: ";
    if (written && slot.state != SlotState::kFree) {
      return std::string(name_of(kind)) + std::string(verb) + not_in(slot, SlotState::kFree, -1);
    }
    if (!written && !holds(slot, SlotState::kFilled, op)) {
      return std::string(name_of(kind)) + std::string(verb) +
             not_in(slot, SlotState::kFilled, op.micro_batch);
    }
    if (written) slot = Slot{SlotState::kFilled, op.micro_batch};
    return std::nullopt;
  }

  // Each F once, then B once, or I once and W once; counts what is in flight.
  Objection advance_done(const PlanOp& op) {
    std::uint8_t& done = done_[local(op.stage) * static_cast<std::size_t>(plan_.micro_batches) +
                               static_cast<std::size_t>(op.micro_batch)];
    std::uint8_t adds = 0, needs = kForwardDone;
    switch (op.action) {
      case ActionKind::kForward:
        adds = kForwardDone;
        needs = 0;
        break;
      case ActionKind::kBackward:
        adds = kInputDone | kWeightDone;
        break;
      case ActionKind::kBackwardInput:
        adds = kInputDone;
        break;
      default:
        adds = kWeightDone;
        needs = kForwardDone | kInputDone;
        break;
    }
    if (plan_.forward_only && adds != kForwardDone) return "the plan is forward-only";
    if ((done & adds) != 0) return "this was computed before";
    if ((done & needs) != needs) {
      return (done & kForwardDone) == 0 ? "its forward has not been computed"
                                        : "its backward input has not been computed";
    }
    done |= adds;
    if (adds == kForwardDone) peak_ = std::max(peak_, ++in_flight_);
    const std::uint8_t final_bit = plan_.forward_only ? kForwardDone : kWeightDone;
    if ((adds & final_bit) != 0) {
      --in_flight_;
      std::int32_t& last = last_weight_[local(op.stage)];
      if (op.micro_batch < last && !plan_.forward_only) trace_.exact = false;
      last = op.micro_batch;
      ++weights_done_[local(op.stage)];
    }
    return std::nullopt;
  }

  Objection replay_release(const PlanOp& op) {
    bool any = false;
    for (const BufferKind kind : kAllBuffers) {
      if (op.slot(kind) < 0) continue;
      any = true;
      if (auto objection = check_index(op.stage, kind, op.slot(kind))) return objection;
      Slot& slot = slot_of(op.stage, kind, op.slot(kind));
      if (!holds(slot, SlotState::kFilled, op) && !holds(slot, SlotState::kSent, op)) {
        return std::string(name_of(kind)) +
               " is released: " + not_in(slot, SlotState::kFilled, op.micro_batch);
      }
      slot = Slot{};
    }
    if (!any) return "no slot is named";
    return std::nullopt;
  }

  Objection replay_collective(const PlanOp& op) {
    if (op.kind == OpKind::kReduceGrad) {
      if (reduced_[local(op.stage)]) return "this stage's gradients are reduced already";
      if (std::find(tied_reduced_.begin(), tied_reduced_.end(), true) != tied_reduced_.end()) {
        return "tied parameters are reduced over replicas first, then over their uses";
      }
      reduced_[local(op.stage)] = true;
      return check_complete(op.stage);
    }
    if (op.kind == OpKind::kReduceTied) {
      if (op.channel < 0 || static_cast<std::size_t>(op.channel) >= plan_.tied.size()) {
        return "tied group " + std::to_string(op.channel) + " does not exist; there are " +
               std::to_string(plan_.tied.size());
      }
      const auto group = static_cast<std::size_t>(op.channel);
      if (tied_reduced_[group]) return "this tied group is reduced already";
      tied_reduced_[group] = true;
      if (auto objection = check_tied_complete(plan_.tied[group])) return objection;
    } else {
      optimized_ = true;
      if (auto objection = check_reduced()) return objection;
    }
    events_.push_back(ProgressEvent{op.kind, false, op.channel, -1});
    return std::nullopt;
  }

  // Before the optimizer: every own stage, and every tied group this rank has a part in.
  Objection check_reduced() const {
    for (const int stage : own_) {
      if (auto objection = check_complete(stage)) return objection;
      if (!reduced_[local(stage)]) {
        return "the gradients of stage " + std::to_string(stage) + " are not reduced";
      }
    }
    for (std::size_t group = 0; group < plan_.tied.size(); ++group) {
      const std::vector<int>& stages = plan_.tied[group].stages;
      const bool takes_part =
          std::any_of(stages.begin(), stages.end(), [this](int stage) { return is_own(stage); });
      if (takes_part && !tied_reduced_[group]) {
        return "tied group " + std::to_string(group) + " is not reduced";
      }
    }
    return std::nullopt;
  }

  Objection check_tied_complete(const TiedStages& group) const {
    bool takes_part = false;
    for (const int stage : group.stages) {
      if (!is_own(stage)) continue;
      takes_part = true;
      if (auto objection = check_complete(stage)) return objection;
    }
    if (!takes_part) return "this rank owns no stage of the group";
    return std::nullopt;
  }

  Objection check_complete(int stage) const {
    const int done = weights_done_[local(stage)];
    if (done == plan_.micro_batches) return std::nullopt;
    return "only " + std::to_string(done) + " of " + std::to_string(plan_.micro_batches) +
           " micro-batches of stage " + std::to_string(stage) + " are complete";
  }

  Objection check_end() const {
    if (!optimized_ && std::find(reduced_.begin(), reduced_.end(), true) != reduced_.end()) {
      return "gradients are reduced and no optimizer follows";
    }
    for (const int stage : own_) {
      if (auto objection = check_complete(stage)) return *objection + " at the end";
    }
    for (const int stage : own_) {
      for (const BufferKind kind : kAllBuffers) {
        const PoolRange& range = pools_[pool_index(stage, kind)];
        for (std::int32_t i = 0; i < range.count; ++i) {
          const Slot& slot = slots_[range.offset + static_cast<std::size_t>(i)];
          if (slot.state == SlotState::kFree) continue;
          return std::string(name_of(kind)) + '[' + std::to_string(i) + "] of stage " +
                 std::to_string(stage) + " is still " +
                 std::string(kStateNames[static_cast<std::size_t>(slot.state)]) +
                 " with micro-batch " + std::to_string(slot.micro_batch) + " at the end";
        }
      }
    }
    return std::nullopt;
  }

  Objection check_micro_batch(const PlanOp& op) const {
    if (op.micro_batch >= 0 && op.micro_batch < plan_.micro_batches) return std::nullopt;
    return "micro-batch " + std::to_string(op.micro_batch) + " does not exist; legal are 0 to " +
           std::to_string(plan_.micro_batches - 1);
  }

  // The op names a slot of each kind in `wanted` and of no other.
  static Objection check_named(const PlanOp& op, unsigned wanted) {
    for (const BufferKind kind : kAllBuffers) {
      const bool named = op.slot(kind) >= 0;
      if (named == ((wanted & mask(kind)) != 0)) continue;
      return (named ? "it names a slot it has no use for: " : "it names no slot for its ") +
             std::string(name_of(kind));
    }
    return std::nullopt;
  }

  Objection check_index(int stage, BufferKind kind, std::int32_t index) const {
    const std::int32_t count = pools_[pool_index(stage, kind)].count;
    if (index >= 0 && index < count) return std::nullopt;
    return std::string(name_of(kind)) + '[' + std::to_string(index) + "] does not exist; stage " +
           std::to_string(stage) + " has " + std::to_string(count) + " such slots";
  }

  static std::string not_in(const Slot& slot, SlotState wanted, std::int32_t micro_batch) {
    std::string text =
        "the slot is " + std::string(kStateNames[static_cast<std::size_t>(slot.state)]);
    if (slot.micro_batch >= 0) text += " with micro-batch " + std::to_string(slot.micro_batch);
    text += ", it must be " + std::string(kStateNames[static_cast<std::size_t>(wanted)]);
    if (micro_batch >= 0) text += " with micro-batch " + std::to_string(micro_batch);
    return text;
  }

  static bool holds(const Slot& slot, SlotState state, const PlanOp& op) {
    return slot.state == state && slot.micro_batch == op.micro_batch;
  }

  static constexpr std::uint8_t mask(BufferKind kind) {
    return static_cast<std::uint8_t>(1U << static_cast<unsigned>(kind));
  }

  bool is_own(int stage) const {
    return stage >= 0 && stage < placement_.stages() && placement_.rank_of(stage) == rank_;
  }
  std::size_t local(int stage) const {
    return static_cast<std::size_t>(local_stage_[static_cast<std::size_t>(stage)]);
  }
  std::size_t pool_index(int stage, BufferKind kind) const {
    return local(stage) * kBufferKinds + static_cast<std::size_t>(kind);
  }
  PoolRange& range_of(int stage, BufferKind kind) { return pools_[pool_index(stage, kind)]; }
  Slot& slot_of(int stage, BufferKind kind, std::int32_t index) {
    return slots_[pools_[pool_index(stage, kind)].offset + static_cast<std::size_t>(index)];
  }

  const Plan& plan_;
  const Placement& placement_;
  const int rank_;
  const std::vector<int>& own_;          // this rank's stages
  const std::vector<int>& local_stage_;  // [stage]
  PlanTrace& trace_;
  std::vector<ProgressEvent>& events_;
  std::vector<PoolRange> pools_;  // [own stage][kind]
  std::vector<Slot> slots_;
  std::vector<std::uint8_t> done_;          // [own stage][micro_batch]
  std::vector<std::int32_t> weights_done_;  // [own stage] micro-batches complete
  std::vector<std::int32_t> last_weight_;   // [own stage] micro-batch, -1: none yet
  std::vector<bool> reduced_;               // [own stage]
  std::vector<bool> tied_reduced_;          // [group]
  int in_flight_ = 0;
  int peak_ = 0;
  bool optimized_ = false;
  bool after_issue_ = false;  // the op before is a post or a start
};

}  // namespace

std::optional<Violation> replay_rank(const Plan& plan, int rank,
                                     const std::vector<int>& local_stage, PlanTrace& trace) {
  return RankReplay(plan, rank, local_stage, trace).run();
}

}  // namespace sluice
