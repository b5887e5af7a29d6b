// Schedules: who computes what in which order, before any message exists.
//
//   generate(name, shape) -> check(order) -> lower(add messages, reductions)
//     -> make_plan(slots, tags, posts) -> verify(plan) -> simulate | draw | execute
//
// Plain data over integers: no tensors, no MPI, no device. Functions are pure and thread-safe.
// Malformed requests throw std::invalid_argument, with the nearest legal values in the message.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "schedules/action.hpp"

namespace sluice {

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
  // All four throw std::invalid_argument naming what does not fit.
  static Placement custom(int ranks, std::vector<int> stage_to_rank);

  [[nodiscard]] int ranks() const { return ranks_; }
  [[nodiscard]] int stages() const { return static_cast<int>(stage_to_rank_.size()); }
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
  int chunks = 1;         // v >= 1, stages per rank
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

// Appends an action that computes `micro_batch` on `stage` to the list of the stage's rank.
inline void append(Schedule& schedule, ActionKind kind, int stage, int micro_batch) {
  Step step;
  step.action.kind = kind;
  step.action.stage = stage;
  step.action.micro_batch = micro_batch;
  schedule.ranks[static_cast<std::size_t>(schedule.placement.rank_of(stage))].push_back(step);
}

// Names generate() accepts, in the order they are presented to users.
[[nodiscard]] const std::vector<std::string>& schedule_names();

// Compute actions only. Throws std::invalid_argument for an unknown name (listing the known ones)
// and for shapes the algorithm cannot serve (with the nearest legal values).
[[nodiscard]] Schedule generate(std::string_view name, const ScheduleShape& shape);

// How many stages generate(name, shape) places. Throws as generate() does.
[[nodiscard]] int stages_of(std::string_view name, const ScheduleShape& shape);

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
// pair up one to one, be all there, and stand behind what makes and before what uses the tensor.
// The first offence in rank-major order, or nothing; offences of single actions (range, rank,
// repetition) go before missing partners, those before missing actions, then order, then cycles.
// A missing action's position is the first one of its stage and micro-batch, a cycle's where the
// lowest rank of it stands. Overlapped actions must not need each other. Linear.
[[nodiscard]] std::optional<Violation> check(const Schedule& schedule);

// The violation's message, then the grid (see draw_grid) with the offending cell marked.
[[nodiscard]] std::string describe(const Schedule& schedule, const Violation& violation);

// True if every stage's weight gradients accumulate in ascending micro-batch order, so results are
// bit-identical to any other such schedule.
[[nodiscard]] bool is_exact(const Schedule& schedule);

// Most forwards of one stage's micro-batches held at a time, from start of F to end of W or B;
// [rank] sums over the rank's stages as the list runs, in chunks. Forward-only schedules hold a
// micro-batch during its F alone.
[[nodiscard]] std::vector<int> peak_in_flight(const Schedule& schedule);

// A parameter used by several stages (input embedding and output head), ascending, may repeat none.
struct TiedStages {
  std::vector<int> stages;
};

struct LowerOptions {
  bool reduce_grad = true;       // REDUCE_GRAD per stage and OPTIMIZER per rank (training)
  std::vector<TiedStages> tied;  // one REDUCE_TIED on every rank that owns one of the stages
  // [stage] Its sum over replicas runs beside computation and blocks nobody, as NCCL's do. Empty:
  // no stage's does.
  std::vector<bool> sums_beside = {};
};

// Adds SEND right after the action that produces and RECV right before the action that uses, where
// the neighbouring stage is on another rank (for an overlapped pair: around the pair); then
// reductions and the optimizer, which a forward-only schedule has none of. REDUCE_GRAD stands right
// behind the last B or W of its stage, before the messages that follow, where the sum runs beside
// computation; else at the list's end, where a sum that blocks holds up no other rank. A
// REDUCE_TIED names the first stage of its group on that rank; groups come in the order of `tied`.
// Requires: check() found nothing. Throws std::invalid_argument for schedules with messages, for
// illegal groups and where `sums_beside` has not one entry per stage.
[[nodiscard]] Schedule lower(const Schedule& schedule, const LowerOptions& options);

// The schedule as text: one row per rank, one column per unit of time, cells `F0 B0 I0 W0` (stage
// index in front where a rank has several), idle cells blank. Every compute step takes one unit, a
// pair prints as `F7+B3`. `mark` brackets one cell and points at its row; a schedule that cannot
// run, or whose marked step does not compute, is drawn by list position instead of time. Any
// schedule can be drawn, also a broken one. Rows end in a line feed, without trailing blanks.
[[nodiscard]] std::string draw_grid(const Schedule& schedule, const Violation* mark = nullptr);

}  // namespace sluice
