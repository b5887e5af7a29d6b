#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "schedules/model/actions.hpp"
#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"
#include "schedules/plan/collectives.hpp"
#include "schedules/plan/plan_parts.hpp"
#include "schedules/verify/verify_trace.hpp"

namespace sluice {
namespace {

// Why a list is refused.
struct Refusal {
  std::string why;

  // Always false. Joins the parts of the reason outside the paths that every op takes.
  template <class... Parts>
  [[gnu::cold, gnu::noinline]] bool object(const Parts&... parts) {
    why = concat(parts...);
    return false;
  }
};

enum class ReplayState : std::uint8_t { kFree, kPosted, kFilled, kSending };
constexpr std::array<std::string_view, 4> kReplayStateNames = {"free", "posted and not waited for",
                                                               "filled", "being sent"};

struct ReplaySlot {
  ReplayState state = ReplayState::kFree;
  std::int32_t micro_batch = -1;
};

bool holds(const ReplaySlot& slot, ReplayState state, const PlanOp& op) {
  return slot.state == state && slot.micro_batch == op.micro_batch;
}

// "the slot is ..., it must be `required` with `micro_batch`"; -1: any micro-batch.
std::string not_in(const ReplaySlot& slot, ReplayState required, std::int32_t micro_batch) {
  const auto state = [](ReplayState which, std::int32_t holds) {
    return concat(kReplayStateNames[at(which)],
                  holds < 0 ? std::string() : concat(" with micro-batch ", holds));
  };
  return concat("the slot is ", state(slot.state, slot.micro_batch), ", it must be ",
                state(required, micro_batch));
}

// The buffers of one rank while its list is replayed: which slots there are, and what each holds.
// Every check that fails notes its reason in the Refusal and returns false or null.
class BufferReplay {
 public:
  // All outlive this. `own` are the rank's stages; a stage is named by its index there, -1: not one
  // of them.
  BufferReplay(const std::vector<int>& own, Refusal& refusal)
      : refusal_(refusal), stages_(own.size()) {
    for (std::size_t i = 0; i < own.size(); ++i) {
      for (const BufferKind kind : kAllBuffers) {
        Pool& pool = stages_[i].pools[at(kind)];
        pool.stage = own[i];
        pool.kind = kind;
        stages_[i].written[at(kind)] = &pool;
      }
      if (i == 0 || own[i - 1] + 1 != own[i]) continue;
      // Both stages are on this rank: each writes into the other's pool.
      stages_[i - 1].written[at(BufferKind::kOutput)] = &stages_[i].pools[at(BufferKind::kInput)];
      stages_[i].written[at(BufferKind::kGradInput)] =
          &stages_[i - 1].pools[at(BufferKind::kGradOutput)];
    }
  }
  BufferReplay(const BufferReplay&) = delete;

  bool add_pool(const BufferPool& pool, int own) {
    const auto object = [&](const auto&... why) {
      return refusal_.object("pool ", name_of(pool.kind), " of stage ", pool.stage, why...);
    };
    if (own < 0) return object(" belongs to no stage of this rank");
    Pool& added = stages_[at(own)].pools[at(pool.kind)];
    if (added.count != 0) return object(" is listed twice");
    if (pool.count < 1) return object(" has ", pool.count, " slots; at least 1 is needed");
    added.offset = slots_.size();
    added.count = pool.count;
    slots_.resize(slots_.size() + at(pool.count));
    return true;
  }

  static constexpr unsigned mask(BufferKind kind) { return 1U << static_cast<unsigned>(kind); }

  // The op names a slot of each kind in `required` and of no other.
  bool check_named(const PlanOp& op, unsigned required) {
    unsigned named = 0;
    for (const BufferKind kind : kAllBuffers) named |= op.slot(kind) >= 0 ? mask(kind) : 0U;
    if (named == required) return true;
    std::size_t kind = 0;
    while (((named ^ required) & mask(kAllBuffers[kind])) == 0) ++kind;
    return refusal_.object((named & mask(kAllBuffers[kind])) != 0
                               ? "it names a slot it has no use for: "
                               : "it names no slot for its ",
                           name_of(kAllBuffers[kind]));
  }

  // The slot of the stage's own pool that the op names; null where there is none.
  ReplaySlot* find(const PlanOp& op, int own, BufferKind kind) {
    return find(stages_[at(own)].pools[at(kind)], op.slot(kind));
  }

  // The slot, filled with the op's micro-batch; null where it is not.
  ReplaySlot* read(const PlanOp& op, int own, BufferKind kind, const char* verb = " is read: ") {
    ReplaySlot* slot = find(op, own, kind);
    if (slot == nullptr || holds(*slot, ReplayState::kFilled, op)) return slot;
    refusal_.object(name_of(kind), verb, not_in(*slot, ReplayState::kFilled, op.micro_batch));
    return nullptr;
  }

  // Writes the stage's own pool or, at a local hand-over, the neighbour's.
  bool write(const PlanOp& op, int own, BufferKind kind) {
    ReplaySlot* slot = find(*stages_[at(own)].written[at(kind)], op.slot(kind));
    if (slot == nullptr) return false;
    if (slot->state != ReplayState::kFree) {
      return refusal_.object(name_of(kind), " is written: ", not_in(*slot, ReplayState::kFree, -1));
    }
    *slot = ReplaySlot{ReplayState::kFilled, op.micro_batch};
    return true;
  }

  // Every slot that the op names.
  bool release(const PlanOp& op, int own) {
    bool any = false;
    for (const BufferKind kind : kAllBuffers) {
      if (op.slot(kind) < 0) continue;
      any = true;
      ReplaySlot* slot = read(op, own, kind, " is released: ");
      if (slot == nullptr) return false;
      *slot = ReplaySlot{};
    }
    return any || refusal_.object("no slot is named");
  }

  // At the list's end.
  bool check_all_free() {
    for (const Stage& stage : stages_) {
      for (const Pool& pool : stage.pools) {
        for (std::int32_t i = 0; i < pool.count; ++i) {
          const ReplaySlot& slot = slots_[pool.offset + at(i)];
          if (slot.state == ReplayState::kFree) continue;
          return refusal_.object(name_of(pool.kind), '[', i, "] of stage ", pool.stage,
                                 " is still ", kReplayStateNames[at(slot.state)],
                                 " with micro-batch ", slot.micro_batch, " at the end");
        }
      }
    }
    return true;
  }

 private:
  struct Pool {
    std::size_t offset = 0;  // into slots_
    std::int32_t count = 0;
    std::int32_t stage = -1;
    BufferKind kind = BufferKind::kInput;
  };

  struct Stage {
    std::array<Pool, kBufferKinds> pools;
    std::array<const Pool*, kBufferKinds> written{};  // by compute ops
  };

  ReplaySlot* find(const Pool& pool, std::int32_t index) {
    if (index >= 0 && index < pool.count) return &slots_[pool.offset + at(index)];
    refusal_.object(name_of(pool.kind), '[', index, "] does not exist; stage ", pool.stage, " has ",
                    pool.count, " such slots");
    return nullptr;
  }

  Refusal& refusal_;
  std::vector<Stage> stages_;
  std::vector<ReplaySlot> slots_;
};

// Finds the stages of one rank by their index among them.
struct OwnStages {
  const Placement& placement;
  int rank = 0;

  [[nodiscard]] const std::vector<int>& all() const { return placement.stages_of(rank); }
  // -1: not a stage of this rank.
  [[nodiscard]] int find(int stage) const {
    const auto found = std::lower_bound(all().begin(), all().end(), stage);
    return found == all().end() || *found != stage ? -1 : static_cast<int>(found - all().begin());
  }
};

// What the rank's stages have computed and reduced.
class ProgressReplay {
 public:
  ProgressReplay(const Plan& plan, const OwnStages& own, Refusal& refusal)
      : plan_(plan),
        own_(own),
        refusal_(refusal),
        stages_(own.all().size()),
        done_(stages_.size() * at(plan.micro_batches)),
        tied_reduced_(plan.tied.size()) {
    for (std::size_t i = 0; i < stages_.size(); ++i) {
      stages_[i].done = &done_[i * at(plan.micro_batches)];
    }
  }

  [[nodiscard]] bool optimized() const { return optimized_; }

  // Each F once, then B once, or I once and W once.
  bool compute(const PlanOp& op, int own) {
    constexpr std::uint8_t kForwardDone = 1, kInputDone = 2, kWeightDone = 4;
    // By ActionKind.
    static constexpr std::array<std::uint8_t, 4> kAdds = {kForwardDone, kInputDone | kWeightDone,
                                                          kInputDone, kWeightDone};
    static constexpr std::array<std::uint8_t, 4> kNeeds = {0, kForwardDone, kForwardDone,
                                                           kForwardDone | kInputDone};
    Stage& stage = stages_[at(own)];
    if (stage.shard == Shard::kAway) {
      return refusal_.object("the stage's parameters are not there: UNSHARD comes before");
    }
    std::uint8_t& done = stage.done[op.micro_batch];
    if (op.action == ActionKind::kRecompute) return recompute(op, stage, done == kForwardDone);
    if (stage.recomputed >= 0 &&
        !(stage.recomputed == op.micro_batch && makes_gradient(op.action))) {
      return refusal_.object("the stage holds what it has recomputed of micro-batch ",
                             stage.recomputed, ", whose B or I must come first");
    }
    const std::uint8_t adds = kAdds[at(op.action)], needs = kNeeds[at(op.action)];
    if (plan_.forward_only && adds != kForwardDone) {
      return refusal_.object("the plan is forward-only");
    }
    if ((done & adds) != 0) return refusal_.object("this was computed before");
    if ((done & needs) != needs) {
      return refusal_.object((done & kForwardDone) == 0
                                 ? "its forward has not been computed"
                                 : "its backward input has not been computed");
    }
    const std::size_t pass = (adds & kForwardDone) != 0 ? 0 : 1;
    const bool folds = plan_.fold_every > 0 && adds != kInputDone;
    if (folds && !check_group(op, stage.folds[pass])) return false;
    if (!check_collectives(op, stage)) return false;
    done |= adds;
    if (makes_gradient(op.action)) stage.recomputed = -1;
    if (folds) ++stage.since_fold[pass];
    if ((adds & (plan_.forward_only ? kForwardDone : kWeightDone)) != 0) ++stage.complete;
    return true;
  }

  // Of the group of micro-batches that all F, or all W and B, since the last fold belong to.
  bool fold(const PlanOp& op, int own) {
    const bool forward = op.action == ActionKind::kForward;
    if (plan_.fold_every == 0) return refusal_.object("the plan has one group of micro-batches");
    if (!forward && !ends_backward(op.action)) {
      return refusal_.object("a fold follows F, B or W, not ", name_of(op.action));
    }
    const std::size_t pass = forward ? 0 : 1;
    Stage& stage = stages_[at(own)];
    std::int32_t& since = stage.since_fold[pass];
    if (since != plan_.fold_every) {
      return refusal_.object("since the last fold ", since, " of ", plan_.fold_every,
                             " micro-batches are computed");
    }
    since = 0;
    const std::int32_t last = ++stage.folds[pass] * plan_.fold_every - 1;
    return op.micro_batch == last || refusal_.object("the last micro-batch of the group is ", last);
  }

  // Stages of which the list has an UNSHARD begin without their parameters.
  void begin_away(int own) { stages_[at(own)].shard = Shard::kAway; }

  bool unshard(int own) {
    Shard& shard = stages_[at(own)].shard;
    if (shard == Shard::kThere) return refusal_.object("the stage has its parameters already");
    shard = Shard::kThere;
    return true;
  }

  bool reshard(int own) {
    Shard& shard = stages_[at(own)].shard;
    if (shard != Shard::kThere) return refusal_.object("no UNSHARD of the stage comes before");
    shard = Shard::kAway;
    return true;
  }

  bool reduce_grad(int own) {
    Stage& stage = stages_[at(own)];
    if (stage.reduced) return refusal_.object("this stage's gradients are reduced already");
    if (std::find(tied_reduced_.begin(), tied_reduced_.end(), true) != tied_reduced_.end()) {
      return refusal_.object(
          "tied parameters are reduced over replicas first, then over their uses");
    }
    stage.reduced = true;
    return check_complete(own);
  }

  bool reduce_tied(std::int32_t group) {
    if (group < 0 || at(group) >= plan_.tied.size()) {
      return refusal_.object("tied group ", group, " does not exist; there are ",
                             plan_.tied.size());
    }
    if (tied_reduced_[at(group)]) return refusal_.object("this tied group is reduced already");
    tied_reduced_[at(group)] = true;
    for (const int stage : plan_.tied[at(group)].stages) {
      if (own_.find(stage) >= 0 && !check_complete(own_.find(stage))) return false;
    }
    return takes_part(at(group)) || refusal_.object("this rank owns no stage of the group");
  }

  // Needs the sums of every own stage, and of every tied group this rank has a part in.
  bool optimize() {
    optimized_ = true;
    for (int own = 0; at(own) < stages_.size(); ++own) {
      if (!check_complete(own)) return false;
      if (!stages_[at(own)].reduced) {
        return refusal_.object("the gradients of stage ", own_.all()[at(own)], " are not reduced");
      }
    }
    if (!check_all_away()) return false;
    for (std::size_t group = 0; group < plan_.tied.size(); ++group) {
      if (!takes_part(group) || tied_reduced_[group]) continue;
      return refusal_.object("tied group ", group, " is not reduced");
    }
    return true;
  }

  // At the list's end.
  bool check_all_complete() {
    const auto is_reduced = [](const Stage& stage) { return stage.reduced; };
    if (!optimized_ && std::any_of(stages_.begin(), stages_.end(), is_reduced)) {
      return refusal_.object("gradients are reduced and no optimizer follows");
    }
    for (int own = 0; at(own) < stages_.size(); ++own) {
      if (!check_complete(own)) return refusal_.object(refusal_.why, " at the end");
    }
    return check_all_away();
  }

 private:
  // Of the parameters of a stage: whole at all times; where each replica has a part, that alone, or
  // all of them.
  enum class Shard : std::uint8_t { kWhole, kAway, kThere };
  struct Stage {
    std::uint8_t* done = nullptr;  // [micro_batch] bits
    std::int32_t complete = 0;     // micro-batches
    std::int32_t recomputed = -1;  // micro-batch, up to its B or I; -1: none
    bool reduced = false;
    Shard shard = Shard::kWhole;
    // Of F; of W and B.
    std::array<std::int32_t, 2> folds = {}, since_fold = {};
    // [F, B, I, W, RECOMPUTE] whose collectives all others make
    std::array<const PlanOp*, 5> firsts = {};
    [[nodiscard]] const PlanOp*& first(ActionKind kind) {
      return firsts[kind == ActionKind::kRecompute ? 4 : at(kind)];
    }
  };

  // `waits`: the micro-batch is between its F and its B or I.
  bool recompute(const PlanOp& op, Stage& stage, bool waits) {
    if (!waits) return refusal_.object("it comes between F and B or I of its micro-batch");
    if (stage.recomputed >= 0) {
      return refusal_.object("the stage has recomputed micro-batch ", stage.recomputed,
                             ", whose B or I must come first");
    }
    stage.recomputed = op.micro_batch;
    return check_collectives(op, stage);
  }

  // `folds`: of the stage so far, of what this action adds to.
  bool check_group(const PlanOp& op, std::int32_t folds) {
    const std::int32_t every = plan_.fold_every;
    if (op.micro_batch / every == folds) return true;
    return refusal_.object("micro-batches ", folds * every, " to ", folds * every + every - 1,
                           " are not folded yet; legal are schedules in which a stage computes F, "
                           "and B or W, of each ",
                           every, " micro-batches before those of later ones");
  }

  // "collective 2 of 3 is a sum of ..., that of the stage's first F an all-gather of ...".
  // Requires that they differ.
  bool differ(std::span<const PlannedCollective> mine, std::span<const PlannedCollective> theirs,
              std::string_view whose) {
    const auto place = static_cast<std::size_t>(
        std::mismatch(mine.begin(), mine.end(), theirs.begin(), theirs.end()).first - mine.begin());
    if (place == mine.size() || place == theirs.size()) {
      return refusal_.object("it makes ", mine.size(), " collectives, ", whose, " makes ",
                             theirs.size());
    }
    return refusal_.object("collective ", place + 1, " of ", mine.size(), " is ",
                           in_sentence(mine[place]), ", that of ", whose, ' ',
                           in_sentence(theirs[place]));
  }

  // Every action of a stage makes the same list; B's is I's, then W's.
  bool check_collectives(const PlanOp& op, Stage& stage) {
    const std::size_t all = plan_.collectives.size();
    if (op.first_collective < 0 || op.collectives < 0 || at(op.first_collective) > all ||
        at(op.collectives) > all - at(op.first_collective)) {
      return refusal_.object("it names ", op.collectives, " collectives from ", op.first_collective,
                             " on; the plan has ", all);
    }
    const PlanOp*& first = stage.first(op.action);
    const bool is_first = first == nullptr;
    if (is_first) first = &op;
    if (!is_first && op.first_collective == first->first_collective &&
        op.collectives == first->collectives) {
      return true;
    }
    const std::span<const PlannedCollective> mine = collectives_of(plan_, op);
    const std::span<const PlannedCollective> theirs = collectives_of(plan_, *first);
    if (!std::equal(mine.begin(), mine.end(), theirs.begin(), theirs.end())) {
      return differ(mine, theirs, concat("the stage's first ", name_of(op.action)));
    }
    if (plan_.forward_only &&
        std::any_of(mine.begin(), mine.end(), [](const PlannedCollective& each) {
          return each.axis == CollectiveAxis::kReplica;
        })) {
      return refusal_.object("it makes collectives over the replicas in a forward-only plan");
    }
    return check_halves(stage);
  }

  bool check_halves(Stage& stage) {
    const PlanOp *const whole = stage.first(ActionKind::kBackward),
                        *input = stage.first(ActionKind::kBackwardInput),
                        *weight = stage.first(ActionKind::kBackwardWeight);
    if (whole == nullptr || input == nullptr || weight == nullptr) return true;
    std::vector<PlannedCollective> halves;
    for (const PlanOp* half : {input, weight}) {
      const std::span<const PlannedCollective> list = collectives_of(plan_, *half);
      halves.insert(halves.end(), list.begin(), list.end());
    }
    const std::span<const PlannedCollective> list = collectives_of(plan_, *whole);
    if (std::equal(list.begin(), list.end(), halves.begin(), halves.end())) return true;
    return differ(halves, list,
                  concat("the stage's ", to_string(*whole), ", whose halves these are,"));
  }

  // An update would leave what was gathered behind.
  bool check_all_away() {
    for (int own = 0; at(own) < stages_.size(); ++own) {
      if (stages_[at(own)].shard != Shard::kThere) continue;
      return refusal_.object("no RESHARD follows the UNSHARD of stage ", own_.all()[at(own)]);
    }
    return true;
  }

  bool takes_part(std::size_t group) const {
    const std::vector<int>& stages = plan_.tied[group].stages;
    return std::any_of(stages.begin(), stages.end(),
                       [this](int stage) { return own_.find(stage) >= 0; });
  }

  bool check_complete(int own) {
    const Stage& stage = stages_[at(own)];
    if (stage.complete != plan_.micro_batches) {
      return refusal_.object("only ", stage.complete, " of ", plan_.micro_batches,
                             " micro-batches of stage ", own_.all()[at(own)], " are complete");
    }
    const std::int32_t groups = plan_.fold_every == 0 ? 0 : plan_.micro_batches / plan_.fold_every;
    const std::int32_t folds = std::min(stage.folds[0], stage.folds[1]);
    return folds == groups || refusal_.object("only ", folds, " of ", groups, " groups of stage ",
                                              own_.all()[at(own)], " are folded");
  }

  const Plan& plan_;
  const OwnStages& own_;
  Refusal& refusal_;
  std::vector<Stage> stages_;       // [own stage]
  std::vector<std::uint8_t> done_;  // [own stage][micro_batch] bits
  std::vector<bool> tied_reduced_;  // [group]
  bool optimized_ = false;
};

class RankReplay {
 public:
  RankReplay(const Plan& plan, const OwnStages& own, PlanTrace& trace)
      : plan_(plan),
        own_(own),
        trace_(trace),
        events_(trace.events[at(own.rank)]),
        buffers_(own.all(), refusal_),
        progress_(plan, own_, refusal_) {}

  std::optional<Violation> run() {
    const RankPlan& list = plan_.ranks[at(own_.rank)];
    for (const BufferPool& pool : list.pools) {
      if (!buffers_.add_pool(pool, own_.find(pool.stage))) return about_rank();
    }
    for (const PlanOp& op : list.ops) {
      const int own = op.kind == OpKind::kUnshard ? own_.find(op.stage) : -1;
      if (own >= 0) progress_.begin_away(own);
    }
    events_.reserve(list.ops.size());
    for (std::size_t i = 0; i < list.ops.size(); ++i) {
      if (!replay(list.ops[i])) {
        return violation_at(plan_, own_.rank, static_cast<int>(i), refusal_.why);
      }
    }
    if (!progress_.check_all_complete() || !buffers_.check_all_free()) return about_rank();
    return std::nullopt;
  }

 private:
  Violation about_rank() const {
    return {own_.rank, -1, concat("rank ", own_.rank, ": ", refusal_.why)};
  }

  bool replay(const PlanOp& op) {
    const int own = own_.find(op.stage);
    if (own < 0) {
      return refusal_.object("stage ", op.stage, " is not a stage of this rank");
    }
    if (progress_.optimized()) {
      return refusal_.object("nothing may follow the optimizer");
    }
    const bool issues = op.kind == OpKind::kPostRecv || op.kind == OpKind::kStartSend;
    if (op.with_previous) {
      if (!issues || !after_issue_) {
        return refusal_.object(
            "only a post or a start right after another one can be in a group with the op before");
      }
      trace_.grouped = true;
    }
    after_issue_ = issues;
    if (op.kind != OpKind::kCompute && op.collectives != 0) {
      return refusal_.object("it makes collectives; only F, B, I, W and RECOMPUTE do");
    }
    switch (op.kind) {
      case OpKind::kPostRecv:
      case OpKind::kWaitRecv:
      case OpKind::kStartSend:
      case OpKind::kWaitSend:
        return replay_message(op, own);
      case OpKind::kCompute:
        return replay_compute(op, own);
      case OpKind::kRelease:
        return buffers_.release(op, own);
      case OpKind::kFold:
        return check_micro_batch(op) && buffers_.check_named(op, 0) && progress_.fold(op, own);
      case OpKind::kReduceGrad:
        return progress_.reduce_grad(own);
      case OpKind::kStartMove:
        return replay_start_of_move(op, own);
      case OpKind::kWaitMove:
        return replay_end_of_move(op, own);
      case OpKind::kUnshard:
        return progress_.unshard(own);
      case OpKind::kReshard:
        return progress_.reshard(own);
      case OpKind::kReduceTied:
        if (!progress_.reduce_tied(op.channel)) return false;
        events_.emplace_back(op, op.channel, 0);
        return true;
      default:
        if (!progress_.optimize()) return false;
        events_.emplace_back(op, 0, 0);
        return true;
    }
  }

  // A rank's moves are made in the order of their starts.
  bool replay_start_of_move(const PlanOp& op, int own) {
    if (!is_move(op.action)) return refusal_.object(name_of(op.action), " moves nothing");
    const auto mask = [](BufferKind kind) { return BufferReplay::mask(kind); };
    if (!check_micro_batch(op) ||
        !buffers_.check_named(op, mask(BufferKind::kState) | mask(BufferKind::kStored))) {
      return false;
    }
    if (op.action == ActionKind::kOffload) {
      ReplaySlot* const from = buffers_.read(op, own, BufferKind::kState, " leaves: ");
      if (from == nullptr || !buffers_.write(op, own, BufferKind::kStored)) return false;
      from->state = ReplayState::kSending;
      return true;
    }
    ReplaySlot* const from = buffers_.read(op, own, BufferKind::kStored, " comes back: ");
    ReplaySlot* const to = buffers_.find(op, own, BufferKind::kState);
    if (from == nullptr || to == nullptr) return false;
    if (to->state != ReplayState::kFree && to->state != ReplayState::kSending) {
      return refusal_.object("state is written: ", not_in(*to, ReplayState::kFree, -1));
    }
    *from = ReplaySlot{};
    *to = ReplaySlot{ReplayState::kPosted, op.micro_batch};
    return true;
  }

  bool replay_end_of_move(const PlanOp& op, int own) {
    if (!is_move(op.action)) return refusal_.object(name_of(op.action), " moves nothing");
    if (!check_micro_batch(op) ||
        !buffers_.check_named(op, BufferReplay::mask(BufferKind::kState))) {
      return false;
    }
    ReplaySlot* const slot = buffers_.find(op, own, BufferKind::kState);
    if (slot == nullptr) return false;
    const bool leaves = op.action == ActionKind::kOffload;
    const ReplayState needed = leaves ? ReplayState::kSending : ReplayState::kPosted;
    if (!holds(*slot, needed, op)) {
      return refusal_.object("no such move is started before the wait; ",
                             not_in(*slot, needed, op.micro_batch));
    }
    *slot = leaves ? ReplaySlot{} : ReplaySlot{ReplayState::kFilled, op.micro_batch};
    return true;
  }

  // The message's channel, buffer kind and named slot, then the op's own step.
  bool replay_message(const PlanOp& op, int own) {
    if (op.channel < 0 || at(op.channel) >= plan_.channels.size()) {
      return refusal_.object("channel ", op.channel, " does not exist; legal are 0 to ",
                             static_cast<int>(plan_.channels.size()) - 1);
    }
    if (!check_micro_batch(op)) return false;
    const Channel& channel = plan_.channels[at(op.channel)];
    const bool sends = op.kind == OpKind::kStartSend || op.kind == OpKind::kWaitSend;
    const bool forward = channel.kind == ActionKind::kSendForward;
    const ActionKind received = forward ? ActionKind::kRecvForward : ActionKind::kRecvBackward;
    if (op.stage != (sends ? channel.from_stage : channel.to_stage) ||
        op.action != (sends ? channel.kind : received)) {
      return refusal_.object("channel ", op.channel, " carries ", name_of(channel.kind),
                             " from stage ", channel.from_stage, " to stage ", channel.to_stage);
    }
    const BufferKind kind = sends ? (forward ? BufferKind::kOutput : BufferKind::kGradInput)
                                  : (forward ? BufferKind::kInput : BufferKind::kGradOutput);
    if (!buffers_.check_named(op, BufferReplay::mask(kind))) return false;
    ReplaySlot* slot = buffers_.find(op, own, kind);
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
        if (index < 0) return refusal_.object("this message has a receive already");
        if (slot.state != ReplayState::kFree) {
          return refusal_.object(not_in(slot, ReplayState::kFree, -1));
        }
        slot = ReplaySlot{ReplayState::kPosted, op.micro_batch};
        break;
      case OpKind::kWaitRecv:
        if (!holds(slot, ReplayState::kPosted, op)) {
          return refusal_.object("no receive of this message is posted before the wait; ",
                                 not_in(slot, ReplayState::kPosted, op.micro_batch));
        }
        index = order.index_of(op.micro_batch);
        slot.state = ReplayState::kFilled;
        break;
      case OpKind::kStartSend:
        index = order.add(op.micro_batch, plan_.micro_batches);
        if (index < 0) return refusal_.object("this message is sent already");
        if (!holds(slot, ReplayState::kFilled, op)) {
          return refusal_.object(not_in(slot, ReplayState::kFilled, op.micro_batch));
        }
        slot.state = ReplayState::kSending;
        break;
      default:
        if (!holds(slot, ReplayState::kSending, op)) {
          return refusal_.object("no send of this message is started before the wait; ",
                                 not_in(slot, ReplayState::kSending, op.micro_batch));
        }
        index = order.index_of(op.micro_batch);
        slot = ReplaySlot{};
        break;
    }
    events_.emplace_back(op, op.channel, index);
    return true;
  }

  bool replay_compute(const PlanOp& op, int own) {
    const bool again = op.action == ActionKind::kRecompute;
    if (!is_compute(op.action) && !again) {
      return refusal_.object(name_of(op.action),
                             " does not compute; legal are F, B, I, W and RECOMPUTE");
    }
    if (!check_micro_batch(op) || !progress_.compute(op, own)) return false;
    const auto mask = [](BufferKind kind) { return BufferReplay::mask(kind); };
    const bool first = op.stage == 0;
    const bool last = op.stage + 1 == plan_.placement.stages();
    unsigned reads = first ? 0U : mask(BufferKind::kInput);
    unsigned writes = 0;
    if (op.action == ActionKind::kForward) {
      writes = mask(BufferKind::kState) | mask(BufferKind::kOutput);
    } else if (again) {
      reads |= mask(BufferKind::kState);
    } else {
      reads |=
          mask(BufferKind::kState) | mask(last ? BufferKind::kOutput : BufferKind::kGradOutput);
      if (makes_gradient(op.action) && !first) writes = mask(BufferKind::kGradInput);
    }
    if (!buffers_.check_named(op, reads | writes)) return false;
    for (const BufferKind kind : kAllBuffers) {
      if ((reads & mask(kind)) != 0 && buffers_.read(op, own, kind) == nullptr) return false;
      if ((writes & mask(kind)) != 0 && !buffers_.write(op, own, kind)) return false;
    }
    return true;
  }

  bool check_micro_batch(const PlanOp& op) {
    if (op.micro_batch >= 0 && op.micro_batch < plan_.micro_batches) return true;
    return refusal_.object("micro-batch ", op.micro_batch, " does not exist; legal are 0 to ",
                           plan_.micro_batches - 1);
  }

  const Plan& plan_;
  const OwnStages own_;
  PlanTrace& trace_;
  std::vector<ProgressEvent>& events_;
  Refusal refusal_;
  BufferReplay buffers_;
  ProgressReplay progress_;
  bool after_issue_ = false;  // the op before is a post or a start
};

}  // namespace

std::optional<Violation> replay_rank(const Plan& plan, int rank, PlanTrace& trace) {
  return RankReplay(plan, {plan.placement, rank}, trace).run();
}

}  // namespace sluice
