// Schedules: who computes what in which order, before any message exists. generate() makes those
// that Sluice knows by name.
//
//   generate(name, shape) -> check(order) -> lower(add messages, reductions)
//     -> make_plan(slots, tags, posts) -> verify(plan) -> simulate | draw | execute
//
// Plain data over integers: no tensors, no MPI, no device. Functions are pure and thread-safe.
// Malformed requests throw Error(kUsage), with the nearest legal values in the message.
//
// A schedule is, per rank, a list of steps; a step is one action or an overlapped pair of two.
// The text form of an action is `<stage><KIND>[micro_batch]`, e.g. `2F0` (stage 2 forwards
// micro-batch 0), `3SEND_B1`, `0REDUCE_GRAD`; it follows torch.distributed.pipelining's `_Action`,
// but is strict: the whole text must match and an unknown kind is refused by name. Numbers are
// decimal without sign or leading zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#pragma GCC visibility push(default)
namespace sluice {

// kBackward is the whole backward pass; kBackwardInput ("I") and kBackwardWeight ("W") are its
// halves, for schedules that split it.
enum class ActionKind : std::uint8_t {
  kForward,         // F
  kBackward,        // B
  kBackwardInput,   // I
  kBackwardWeight,  // W
  kSendForward,     // SEND_F: activation to stage + 1
  kRecvForward,     // RECV_F: activation from stage - 1
  kSendBackward,    // SEND_B: gradient to stage - 1
  kRecvBackward,    // RECV_B: gradient from stage + 1
  kReduceGrad,      // REDUCE_GRAD: this stage's gradients summed over replicas
  kReduceTied,      // REDUCE_TIED: gradients of a tied parameter summed over its uses
  kUnshard,         // UNSHARD: the stage's parameters may be gathered from its replicas
  kReshard,         // RESHARD: each replica keeps its part of them alone
  kOptimizer,       // OPTIMIZER: norm, guard, clip, update; once per rank
  kOffload,         // OFFLOAD: what the stage keeps of the micro-batch leaves its device
  kFetch,           // FETCH: it comes back
  kRecompute,       // RECOMPUTE: what the stage's next action, B or I, would compute again first
};

// True for F, B, I and W.
[[nodiscard]] constexpr bool is_compute(ActionKind kind) {
  return kind <= ActionKind::kBackwardWeight;
}
// True for what a file may say of sharded parameters: UNSHARD, RESHARD, REDUCE_GRAD. A schedule
// keeps it, and check() looks at its stage and rank. lower() places all three itself
// (LowerOptions::gathers): it leaves out those of the schedule.
[[nodiscard]] constexpr bool is_sharding(ActionKind kind) {
  return kind == ActionKind::kUnshard || kind == ActionKind::kReshard ||
         kind == ActionKind::kReduceGrad;
}
// True for the four message kinds.
[[nodiscard]] constexpr bool is_message(ActionKind kind) {
  return kind >= ActionKind::kSendForward && kind <= ActionKind::kRecvBackward;
}
// True for OFFLOAD and FETCH.
[[nodiscard]] constexpr bool is_move(ActionKind kind) {
  return kind == ActionKind::kOffload || kind == ActionKind::kFetch;
}
// True where the text form carries a micro-batch: compute, message and move kinds, RECOMPUTE.
[[nodiscard]] constexpr bool has_micro_batch(ActionKind kind) {
  return is_compute(kind) || is_message(kind) || is_move(kind) || kind == ActionKind::kRecompute;
}
// "F", "SEND_B", ..., and "?" for a number that is no kind.
[[nodiscard]] std::string_view name_of(ActionKind kind);

// When the parameters of a stage, of which each replica has a part, are whole on each of them.
enum class Gather : std::uint8_t {
  kNever,    // each replica has all of them at all times
  kPerStep,  // from the first action of the stage in a step to its last
  kPerUse,   // from unit to unit, one ahead, while actions of the stage follow each other
};

struct Action {
  ActionKind kind = ActionKind::kForward;
  std::int32_t stage = 0;         // global stage index
  std::int32_t micro_batch = -1;  // -1 where the kind has none

  friend bool operator==(const Action&, const Action&) = default;
};

// One entry of a rank's list. `overlapped` runs together with `action` (DualPipe's F and B).
struct Step {
  Action action;
  std::optional<Action> overlapped = std::nullopt;

  friend bool operator==(const Step&, const Step&) = default;
};

[[nodiscard]] std::string to_string(const Action& action);
[[nodiscard]] std::string to_string(const Step& step);  // a pair prints as (0F7;7B3)OVERLAP_F_B

// Throws Error(kUsage) naming the text, the offending part and what would be legal.
[[nodiscard]] Action parse_action(std::string_view text);
[[nodiscard]] Step parse_step(std::string_view text);

// Which rank owns which stage. S = stages(), p = ranks().
class Placement {
 public:
  // Stage s on rank s; S = p.
  static Placement linear(int ranks);
  // Stage s on rank s mod p; S = p * chunks (interleaved schedules).
  static Placement looped(int ranks, int chunks);
  // There and back: ranks 0..p-1, then p-1..0; S = 2p (zb-v, v-half, dualpipe-v).
  static Placement v_shape(int ranks);
  // Any map; every rank in [0, ranks) must own at least one stage.
  // All four throw Error(kUsage) naming what does not fit.
  static Placement custom(int ranks, std::vector<int> stage_to_rank);

  [[nodiscard]] int ranks() const { return ranks_; }
  [[nodiscard]] int stages() const { return static_cast<int>(stage_to_rank_.size()); }
  // Requires a stage from 0 to stages() - 1; stages_of(): a rank from 0 to ranks() - 1.
  [[nodiscard]] int rank_of(int stage) const { return stage_to_rank_[static_cast<size_t>(stage)]; }
  // Ascending.
  [[nodiscard]] const std::vector<int>& stages_of(int rank) const {
    return rank_to_stages_[static_cast<size_t>(rank)];
  }
  friend bool operator==(const Placement&, const Placement&) = default;

 private:
  Placement(int ranks, std::vector<int> stage_to_rank);
  int ranks_ = 0;
  std::vector<int> stage_to_rank_;
  std::vector<std::vector<int>> rank_to_stages_;
};

// The most that options take: what handles a rank's stages one by one grows with their square.
inline constexpr int kMaxChunks = 1024;

struct ScheduleShape {
  int ranks = 1;          // p >= 1
  int micro_batches = 1;  // m >= 1
  int chunks = 0;         // v, stages per rank; 0: as the schedule has it, 2 if it takes several
};

struct Schedule {
  std::string name;
  Placement placement = Placement::linear(1);
  int micro_batches = 1;
  bool forward_only = false;             // no backward actions at all (evaluation, inference)
  std::vector<std::vector<Step>> ranks;  // [rank][position]
};

// For generators: a schedule of that name, one empty list per rank with room for `steps_per_rank`.
// Requires: micro_batches >= 1.
[[nodiscard]] Schedule empty_schedule(std::string_view name, const Placement& placement,
                                      int micro_batches, int steps_per_rank = 0);

// Appends an action that computes `micro_batch` on `stage` to the list of the stage's rank. Throws
// Error(kUsage) where the placement has no such stage, or the schedule no list for it.
void append(Schedule& schedule, ActionKind kind, int stage, int micro_batch);

// Names generate() accepts, in the order they are presented to users.
[[nodiscard]] const std::vector<std::string>& schedule_names();

// Compute actions only; check() finds nothing in them. Throws Error(kUsage) for an unknown name
// (listing the known ones) and for shapes the algorithm cannot serve (with the nearest legal
// values).
[[nodiscard]] Schedule generate(std::string_view name, const ScheduleShape& shape);

// How many stages generate(name, shape) places. Throws as generate() does.
[[nodiscard]] int stages_of(std::string_view name, const ScheduleShape& shape);
// Where it places them. Throws as stages_of().
[[nodiscard]] Placement placement_of(std::string_view name, const ScheduleShape& shape);

// "forward-only" over any placement: every stage forwards every micro-batch, in an order that
// cannot deadlock. Requires: micro_batches >= 1, stages times micro_batches fits an int.
[[nodiscard]] Schedule generate_forward_only(const Placement& placement, int micro_batches);

// Where a schedule or plan breaks a rule. `position` indexes the rank's list, -1: no one place.
struct Violation {
  int rank = -1;
  int position = -1;
  std::string message;  // one line: what, where, what would be right
};

// Order and completeness of the compute actions: each F, and each B or I + W, of each (stage,
// micro-batch) exactly once, on the stage's own rank; indices in range; backward after forward, W
// after I within a rank; no cycle between ranks (order along stages). Messages, if present, must
// pair up one to one and be complete, after what makes and before what uses the tensor.
// The first offence in rank-major order, or nothing; offences of single actions (range, rank,
// repetition) go before missing partners, those before missing actions, then order, then cycles.
// A missing action's position is the first one of its stage and micro-batch, a cycle's is that
// of its lowest rank. Overlapped actions must not need each other. Linear.
[[nodiscard]] std::optional<Violation> check(const Schedule& schedule);

// True if every stage's weight gradients accumulate in ascending micro-batch order, so results are
// bit-identical to any other such schedule. Throws Error(kUsage) for a backward action of
// a stage that the placement does not have.
[[nodiscard]] bool is_exact(const Schedule& schedule);

// Per rank, the most chunks held at a time as the list runs: a stage holds a micro-batch from the
// start of its F to the end of its W or B. Forward-only schedules hold a micro-batch during its F
// alone.
[[nodiscard]] std::vector<int> peak_in_flight(const Schedule& schedule);

// [stage] The same of one stage, without those of a forward-only schedule.
[[nodiscard]] std::vector<int> most_in_flight(const Schedule& schedule);

// A parameter used by several stages (input embedding and output head), ascending, may repeat none.
struct TiedStages {
  std::vector<int> stages;
};

}  // namespace sluice
#pragma GCC visibility pop
