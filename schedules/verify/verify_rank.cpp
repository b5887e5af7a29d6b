#include "schedules/verify/verify_rank.hpp"

#include <algorithm>
#include <array>
#include <string>

#include "schedules/model/index.hpp"
#include "schedules/verify/verify_slot.hpp"

namespace sluice {
namespace {

constexpr std::array kAllBuffers = {BufferKind::kInput, BufferKind::kOutput,
                                    BufferKind::kGradOutput, BufferKind::kGradInput,
                                    BufferKind::kState};

class RankReplay {
 public:
  RankReplay(const Plan& plan, int rank, const std::vector<int>& local_stage, PlanTrace& trace)
      : plan_(plan),
        placement_(plan.placement),
        rank_(rank),
        own_(plan.placement.stages_of(rank)),
        local_stage_(local_stage),
        trace_(trace),
        events_(trace.events[at(rank)]),
        stages_(own_.size()),
        done_(own_.size() * at(plan.micro_batches)),
        tied_reduced_(plan.tied.size()) {}

  std::optional<Violation> run() {
    if (!lay_out_pools()) return about_rank();
    const std::vector<PlanOp>& ops = plan_.ranks[at(rank_)].ops;
    events_.reserve(ops.size());
    for (std::size_t i = 0; i < ops.size(); ++i) {
      if (!replay(ops[i])) return violation_at(plan_, rank_, static_cast<int>(i), objection_);
    }
    trace_.peak_in_flight[at(rank_)] = peak_;
    if (!check_end()) return about_rank();
    return std::nullopt;
  }

 private:
  // Remembers why the list is refused; every check returns false then.
  [[gnu::cold, gnu::noinline]] bool object(std::string why) {
    objection_ = std::move(why);
    return false;
  }
  // For the paths that every op takes: the text is put together out of their way.
  template <class Why>
  [[gnu::cold, gnu::noinline]] bool object_lazily(const Why& why) {
    return object(why());
  }
  Violation about_rank() const {
    return {rank_, -1, "rank " + std::to_string(rank_) + ": " + objection_};
  }

  struct PoolRange {
    std::size_t offset = 0;  // into slots_
    std::int32_t count = 0;
    std::int32_t stage = -1;
    BufferKind kind = BufferKind::kInput;
  };

  struct OwnStage {
    int stage = -1;
    std::array<PoolRange, kBufferKinds> pools;
    // Where a compute op writes: its own pools, or at a local hand-over the neighbour's.
    std::array<const PoolRange*, kBufferKinds> written{};
    std::uint8_t* done = nullptr;   // [micro_batch] bits
    std::int32_t weights_done = 0;  // micro-batches complete
    std::int32_t last_weight = -1;  // micro-batch, -1: none yet
    bool reduced = false;
  };

  bool lay_out_pools() {
    for (std::size_t i = 0; i < own_.size(); ++i) {
      OwnStage& own = stages_[i];
      own.stage = own_[i];
      own.done = &done_[i * at(plan_.micro_batches)];
      for (const BufferKind kind : kAllBuffers) {
        PoolRange& range = own.pools[at(kind)];
        range.stage = own.stage;
        range.kind = kind;
        own.written[at(kind)] = &range;
      }
      hand_over(own, BufferKind::kOutput, own.stage + 1, BufferKind::kInput);
      hand_over(own, BufferKind::kGradInput, own.stage - 1, BufferKind::kGradOutput);
    }
    std::size_t total = 0;
    for (const BufferPool& pool : plan_.ranks[at(rank_)].pools) {
      const std::string name =
          "pool " + std::string(name_of(pool.kind)) + " of stage " + std::to_string(pool.stage);
      OwnStage* own = find_own(pool.stage);
      if (own == nullptr) return object(name + " belongs to no stage of this rank");
      PoolRange& range = own->pools[at(pool.kind)];
      if (range.count != 0) return object(name + " is listed twice");
      if (pool.count < 1) {
        return object(name + " has " + std::to_string(pool.count) + " slots; at least 1 is needed");
      }
      range.offset = total;
      range.count = pool.count;
      total += at(pool.count);
    }
    slots_.resize(total);
    return true;
  }

  void hand_over(OwnStage& own, BufferKind mine, int neighbour, BufferKind theirs) {
    const OwnStage* other = find_own(neighbour);
    if (other == nullptr) return;
    own.written[at(mine)] = &other->pools[at(theirs)];
  }

  bool replay(const PlanOp& op) {
    OwnStage* own = find_own(op.stage);
    if (own == nullptr) {
      return object_lazily(
          [&] { return "stage " + std::to_string(op.stage) + " is not a stage of this rank"; });
    }
    if (optimized_) return object_lazily([&] { return "nothing may follow the optimizer"; });
    const bool issues = op.kind == OpKind::kPostRecv || op.kind == OpKind::kStartSend;
    if (op.with_previous) {
      if (!issues || !after_issue_) {
        return object_lazily([&] {
          return "only a post or a start right after another one can be in a group with the op "
                 "before";
        });
      }
      trace_.grouped = true;
    }
    after_issue_ = issues;
    switch (op.kind) {
      case OpKind::kPostRecv:
      case OpKind::kWaitRecv:
      case OpKind::kStartSend:
      case OpKind::kWaitSend:
        return replay_message(op, *own);
      case OpKind::kCompute:
        return replay_compute(op, *own);
      case OpKind::kRelease:
        return replay_release(op, *own);
      default:
        return replay_collective(op, *own);
    }
  }

  // The message's channel, buffer kind and named slot, then the op's own step.
  bool replay_message(const PlanOp& op, OwnStage& own) {
    if (op.channel < 0 || at(op.channel) >= plan_.channels.size()) {
      return object_lazily([&] {
        return "channel " + std::to_string(op.channel) + " does not exist; legal are 0 to " +
               std::to_string(static_cast<int>(plan_.channels.size()) - 1);
      });
    }
    if (!check_micro_batch(op)) return false;
    const Channel& channel = plan_.channels[at(op.channel)];
    const bool sends = op.kind == OpKind::kStartSend || op.kind == OpKind::kWaitSend;
    const bool forward = channel.kind == ActionKind::kSendForward;
    const ActionKind received = forward ? ActionKind::kRecvForward : ActionKind::kRecvBackward;
    if (op.stage != (sends ? channel.from_stage : channel.to_stage) ||
        op.action != (sends ? channel.kind : received)) {
      return object_lazily([&] {
        return "channel " + std::to_string(op.channel) + " carries " +
               std::string(name_of(channel.kind)) + " from stage " +
               std::to_string(channel.from_stage) + " to stage " + std::to_string(channel.to_stage);
      });
    }
    const BufferKind kind = sends ? (forward ? BufferKind::kOutput : BufferKind::kGradInput)
                                  : (forward ? BufferKind::kInput : BufferKind::kGradOutput);
    if (!check_named(op, mask(kind))) return false;
    ReplaySlot* slot = find_slot(own.pools[at(kind)], op.slot(kind));
    return slot != nullptr && step_message(op, *slot);
  }

  bool step_message(const PlanOp& op, ReplaySlot& slot) {
    ChannelTrace& channel = trace_.channels[at(op.channel)];
    const bool posts = op.kind == OpKind::kPostRecv || op.kind == OpKind::kWaitRecv;
    MessageOrderTrace& order = posts ? channel.posted : channel.sent;
    std::int32_t index = -1;
    switch (op.kind) {
      case OpKind::kPostRecv:
        index = order.add(op.micro_batch, plan_.micro_batches);
        if (index < 0) return object_lazily([&] { return "this message has a receive already"; });
        if (slot.state != ReplayState::kFree)
          return object_lazily([&] { return not_in(slot, ReplayState::kFree, -1); });
        slot = ReplaySlot{ReplayState::kPosted, op.micro_batch};
        break;
      case OpKind::kWaitRecv:
        if (!holds(slot, ReplayState::kPosted, op)) {
          return object_lazily([&] {
            return "no receive of this message is posted before the wait; " +
                   not_in(slot, ReplayState::kPosted, op.micro_batch);
          });
        }
        index = order.index_of(op.micro_batch);
        slot.state = ReplayState::kFilled;
        break;
      case OpKind::kStartSend: {
        index = order.add(op.micro_batch, plan_.micro_batches);
        if (index < 0) return object_lazily([&] { return "this message is sent already"; });
        if (!holds(slot, ReplayState::kFilled, op)) {
          return object_lazily([&] { return not_in(slot, ReplayState::kFilled, op.micro_batch); });
        }
        slot.state = ReplayState::kSending;
        channel.depth = std::max(channel.depth, ++channel.open);
        PairTrace& pair = trace_.pairs[at(channel.pair)];
        pair.depth.depth = std::max(pair.depth.depth, ++pair.open);
        break;
      }
      default:
        if (!holds(slot, ReplayState::kSending, op)) {
          return object_lazily([&] {
            return "no send of this message is started before the wait; " +
                   not_in(slot, ReplayState::kSending, op.micro_batch);
          });
        }
        index = order.index_of(op.micro_batch);
        slot = ReplaySlot{};
        --channel.open;
        --trace_.pairs[at(channel.pair)].open;
        break;
    }
    events_.emplace_back(op, op.channel, index);
    return true;
  }

  bool replay_compute(const PlanOp& op, OwnStage& own) {
    if (!is_compute(op.action)) {
      return object_lazily([&] {
        return std::string(name_of(op.action)) + " does not compute; legal are F, B, I and W";
      });
    }
    if (!check_micro_batch(op)) return false;
    if (!advance_done(op, own)) return false;
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
    if (!check_named(op, reads | writes)) return false;
    for (const BufferKind kind : kAllBuffers) {
      if ((reads & mask(kind)) != 0 && !read(op, own, kind)) return false;
      if ((writes & mask(kind)) != 0 && !write(op, own, kind)) return false;
    }
    return true;
  }

  bool read(const PlanOp& op, const OwnStage& own, BufferKind kind) {
    const ReplaySlot* slot = find_slot(own.pools[at(kind)], op.slot(kind));
    if (slot == nullptr) return false;
    if (holds(*slot, ReplayState::kFilled, op)) return true;
    return object_lazily([&] {
      return std::string(name_of(kind)) +
             " is read: " + not_in(*slot, ReplayState::kFilled, op.micro_batch);
    });
  }

  bool write(const PlanOp& op, const OwnStage& own, BufferKind kind) {
    ReplaySlot* slot = find_slot(*own.written[at(kind)], op.slot(kind));
    if (slot == nullptr) return false;
    if (slot->state != ReplayState::kFree) {
      return object_lazily([&] {
        return std::string(name_of(kind)) + " is written: " + not_in(*slot, ReplayState::kFree, -1);
      });
    }
    *slot = ReplaySlot{ReplayState::kFilled, op.micro_batch};
    return true;
  }

  // Each F once, then B once, or I once and W once; counts what is in flight.
  bool advance_done(const PlanOp& op, OwnStage& own) {
    std::uint8_t& done = own.done[op.micro_batch];
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
    if (plan_.forward_only && adds != kForwardDone)
      return object_lazily([&] { return "the plan is forward-only"; });
    if ((done & adds) != 0) return object_lazily([&] { return "this was computed before"; });
    if ((done & needs) != needs) {
      return object_lazily([&] {
        return (done & kForwardDone) == 0 ? "its forward has not been computed"
                                          : "its backward input has not been computed";
      });
    }
    done |= adds;
    if (adds == kForwardDone) peak_ = std::max(peak_, ++in_flight_);
    const std::uint8_t final_bit = plan_.forward_only ? kForwardDone : kWeightDone;
    if ((adds & final_bit) != 0) {
      --in_flight_;
      if (op.micro_batch < own.last_weight && !plan_.forward_only) trace_.exact = false;
      own.last_weight = op.micro_batch;
      ++own.weights_done;
    }
    return true;
  }

  bool replay_release(const PlanOp& op, OwnStage& own) {
    bool any = false;
    for (const BufferKind kind : kAllBuffers) {
      if (op.slot(kind) < 0) continue;
      any = true;
      ReplaySlot* slot = find_slot(own.pools[at(kind)], op.slot(kind));
      if (slot == nullptr) return false;
      if (!holds(*slot, ReplayState::kFilled, op)) {
        return object_lazily([&] {
          return std::string(name_of(kind)) +
                 " is released: " + not_in(*slot, ReplayState::kFilled, op.micro_batch);
        });
      }
      *slot = ReplaySlot{};
    }
    if (!any) return object_lazily([&] { return "no slot is named"; });
    return true;
  }

  bool replay_collective(const PlanOp& op, OwnStage& own) {
    if (op.kind == OpKind::kReduceGrad) {
      if (own.reduced) return object("this stage's gradients are reduced already");
      if (std::find(tied_reduced_.begin(), tied_reduced_.end(), true) != tied_reduced_.end()) {
        return object("tied parameters are reduced over replicas first, then over their uses");
      }
      own.reduced = true;
      return check_complete(own);
    }
    if (op.kind == OpKind::kReduceTied) {
      if (op.channel < 0 || at(op.channel) >= plan_.tied.size()) {
        return object("tied group " + std::to_string(op.channel) + " does not exist; there are " +
                      std::to_string(plan_.tied.size()));
      }
      const auto group = at(op.channel);
      if (tied_reduced_[group]) return object("this tied group is reduced already");
      tied_reduced_[group] = true;
      if (!check_tied_complete(plan_.tied[group])) return false;
    } else {
      optimized_ = true;
      if (!check_reduced()) return false;
    }
    events_.emplace_back(op, op.kind == OpKind::kReduceTied ? op.channel : 0, 0);
    return true;
  }

  // Before the optimizer: every own stage, and every tied group this rank has a part in.
  bool check_reduced() {
    for (const OwnStage& own : stages_) {
      if (!check_complete(own)) return false;
      if (!own.reduced) {
        return object("the gradients of stage " + std::to_string(own.stage) + " are not reduced");
      }
    }
    for (std::size_t group = 0; group < plan_.tied.size(); ++group) {
      const std::vector<int>& stages = plan_.tied[group].stages;
      const bool takes_part = std::any_of(stages.begin(), stages.end(),
                                          [this](int stage) { return find_own(stage) != nullptr; });
      if (takes_part && !tied_reduced_[group]) {
        return object("tied group " + std::to_string(group) + " is not reduced");
      }
    }
    return true;
  }

  bool check_tied_complete(const TiedStages& group) {
    bool takes_part = false;
    for (const int stage : group.stages) {
      const OwnStage* own = find_own(stage);
      if (own == nullptr) continue;
      takes_part = true;
      if (!check_complete(*own)) return false;
    }
    if (!takes_part) return object("this rank owns no stage of the group");
    return true;
  }

  bool check_complete(const OwnStage& own) {
    if (own.weights_done == plan_.micro_batches) return true;
    return object("only " + std::to_string(own.weights_done) + " of " +
                  std::to_string(plan_.micro_batches) + " micro-batches of stage " +
                  std::to_string(own.stage) + " are complete");
  }

  bool check_end() {
    if (!optimized_ && std::any_of(stages_.begin(), stages_.end(),
                                   [](const OwnStage& own) { return own.reduced; })) {
      return object("gradients are reduced and no optimizer follows");
    }
    for (const OwnStage& own : stages_) {
      if (!check_complete(own)) return object(objection_ + " at the end");
    }
    for (const OwnStage& own : stages_) {
      for (const PoolRange& range : own.pools) {
        for (std::int32_t i = 0; i < range.count; ++i) {
          const ReplaySlot& slot = slots_[range.offset + at(i)];
          if (slot.state == ReplayState::kFree) continue;
          return object(std::string(name_of(range.kind)) + '[' + std::to_string(i) + "] of stage " +
                        std::to_string(range.stage) + " is still " +
                        std::string(kReplayStateNames[at(slot.state)]) + " with micro-batch " +
                        std::to_string(slot.micro_batch) + " at the end");
        }
      }
    }
    return true;
  }

  bool check_micro_batch(const PlanOp& op) {
    if (op.micro_batch >= 0 && op.micro_batch < plan_.micro_batches) return true;
    return object_lazily([&] {
      return "micro-batch " + std::to_string(op.micro_batch) + " does not exist; legal are 0 to " +
             std::to_string(plan_.micro_batches - 1);
    });
  }

  // The op names a slot of each kind in `wanted` and of no other.
  bool check_named(const PlanOp& op, unsigned wanted) {
    unsigned named = 0;
    for (const BufferKind kind : kAllBuffers) named |= op.slot(kind) >= 0 ? mask(kind) : 0U;
    if (named == wanted) return true;
    for (const BufferKind kind : kAllBuffers) {
      if (((named ^ wanted) & mask(kind)) == 0) continue;
      return object_lazily([&] {
        return ((named & mask(kind)) != 0 ? "it names a slot it has no use for: "
                                          : "it names no slot for its ") +
               std::string(name_of(kind));
      });
    }
    return true;
  }

  // Null where the pool has no such slot.
  ReplaySlot* find_slot(const PoolRange& range, std::int32_t index) {
    if (index >= 0 && index < range.count) {
      return &slots_[range.offset + at(index)];
    }
    object_lazily([&] {
      return std::string(name_of(range.kind)) + '[' + std::to_string(index) +
             "] does not exist; stage " + std::to_string(range.stage) + " has " +
             std::to_string(range.count) + " such slots";
    });
    return nullptr;
  }

  static constexpr std::uint8_t mask(BufferKind kind) {
    return static_cast<std::uint8_t>(1U << static_cast<unsigned>(kind));
  }

  OwnStage* find_own(int stage) {
    if (stage < 0 || stage >= placement_.stages() || placement_.rank_of(stage) != rank_) {
      return nullptr;
    }
    return &stages_[at(local_stage_[at(stage)])];
  }

  const Plan& plan_;
  const Placement& placement_;
  const int rank_;
  const std::vector<int>& own_;          // this rank's stages
  const std::vector<int>& local_stage_;  // [stage]
  PlanTrace& trace_;
  std::vector<ProgressEvent>& events_;
  std::vector<OwnStage> stages_;  // as own_
  std::vector<ReplaySlot> slots_;
  std::vector<std::uint8_t> done_;  // [own stage][micro_batch]
  std::vector<bool> tied_reduced_;  // [group]
  int in_flight_ = 0;
  int peak_ = 0;
  std::string objection_;
  bool optimized_ = false;
  bool after_issue_ = false;  // the op before is a post or a start
};

}  // namespace

std::optional<Violation> replay_rank(const Plan& plan, int rank,
                                     const std::vector<int>& local_stage, PlanTrace& trace) {
  return RankReplay(plan, rank, local_stage, trace).run();
}

}  // namespace sluice
