// Event-driven simulation of a lowered schedule: when would each action start and end, what waits
// for what, and how many bytes does each rank hold meanwhile? And drawings of schedules and their
// times, as text and as SVG, which are in the library Sluice::search. Pure and thread-safe.
//
// Compute actions of a rank run one after another in list order; sends never block and receives are
// posted ahead, so a compute action starts when its rank is free and its inputs are there. A pair
// of a forward and a backward overlaps where the stages of both have a time for it: it starts when
// the inputs of both are there, both fill its time, and it hands over at its end. Any other pair is
// two actions, one after the other.
//
// A message leaves when the action that produced it ends, and occupies its link for bytes /
// bandwidth. A link is one rank to one other, in one direction. The message arrives `latency` after
// its last byte left. Messages of one link queue up in the order they were produced; links do not
// disturb each other, nor compute.
//
// With in-order queues, as NCCL's communicators are, a message also waits for its turn at both
// ends: ranks issue in the order of the plan that NCCL gets, and a receive that is issued holds
// back the sends behind it. That is the model under which verify() proves such a plan. One message
// moves at a time in a queue, so none waits for a link. Computation goes on meanwhile, but waits
// for free slots. Pairs run one after the other.
//
// The sum of a stage's gradients over replicas takes `reduce`, plus what its bytes take on
// `reduce_link`. A rank reduces one stage at a time: without overlap after its last action, in
// stage order; with overlap concurrently with its compute, each stage once its last W or B has
// ended and earlier reductions have finished.
//
// Where replicas gather a stage's parameters once a step, its rank does so before the stage's first
// action: that takes what `gathered` bytes take on `reduce_link`. Per use each F, and each I or B,
// is longer by as much, and busy: on CPUs the ranks copy themselves.
//
// Moves (OFFLOAD, FETCH) of a rank are made one after the other, beside its actions, in list order:
// each takes what StageBytes::until_input and until_weight take on `move_link`. A backward waits
// for its FETCH, an F for all that was offloaded before the action before it. Where messages have
// in-order queues, moves take no time.
//
// The collectives within an action make it longer by their costs, one after the other, and count as
// busy. A forward-only schedule makes none over replicas.
//
// Units of time and bytes are the caller's; bandwidth is bytes per unit of time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <sluice/detail/planned_collective.hpp>
#include <sluice/schedule.hpp>

#pragma GCC visibility push(default)
namespace sluice {

struct StageTimes {
  double forward = 1;
  double backward_input = 1;  // B takes backward_input + backward_weight
  double backward_weight = 1;
  double reduce = 0;  // of the stage's gradients over replicas, once per step
  // Of a forward and a whole backward of the stage together, on other micro-batches; negative: they
  // do not overlap. A pair saves the smaller of what its two stages save, an input or weight half
  // its share of that, and takes no less than its longer action.
  double overlap = -1;
  // Of backward_input, what RECOMPUTE does where a schedule lists it; B or I then takes the rest.
  double recompute = 0;
};

// Of one stage. Activations and messages are those of one micro-batch.
struct StageBytes {
  std::int64_t until_input = 0;   // activations held from the start of F to the end of I (or B)
  std::int64_t until_weight = 0;  // activations held from the start of F to the end of W (or B)
  // The tensor handed to the next stage. It takes memory as well. The rank that makes it holds it
  // from the start of that action until its last byte has left. The rank that takes it holds it
  // from the first byte on to the end of the action that uses it. One rank holds it once.
  std::int64_t output = 0;
  std::int64_t output_gradient = -1;  // what the next stage sends back; negative: as `output`
  std::int64_t resident = 0;          // held all the time: parameters, gradients, optimizer state
  // What one replica moves to sum the gradients, and gets of the others' parts of parameters; both
  // take no memory.
  std::int64_t reduced = 0, gathered = 0;
};

// From one rank to another, in one direction.
struct LinkCost {
  double latency = 0;
  double bandwidth = 0;  // 0: without limit
};

struct RankLink {
  int from = 0, to = 0;
  LinkCost link;
};

enum class MessageQueues : std::uint8_t {
  kNone,     // as MPI's: no message waits for another but on its link
  kPerRank,  // one communicator for the pipeline, as TransportModel::kNccl
  kPerPair,  // one per ordered pair of ranks, as TransportModel::kNcclEdges
};

struct SimulationTimes {
  std::vector<StageTimes> stages;      // one entry for all stages alike, or one per stage
  double message = 0;                  // latency of a message between two ranks
  double bandwidth = 0;                // of a link between two ranks; 0: without limit
  std::vector<StageBytes> bytes = {};  // empty: none; else as `stages`
  // Above 0: ranks 0 to ranks_per_node - 1 share a node, the next as many the next node, and so on;
  // links between nodes are `between_nodes`.
  int ranks_per_node = 0;
  LinkCost between_nodes = {};
  std::vector<RankLink> links = {};  // links that differ from all that; of equal ones the last
  LinkCost reduce_link = {};         // for StageBytes::reduced and gathered
  LinkCost move_link = {};           // of a rank, for what it offloads and fetches
  std::vector<StageCollectives> collectives = {};  // within actions; empty: none; else as `stages`
  // [CollectiveAxis][CollectiveKind] What one takes, for PlannedCollective::bytes.
  std::array<std::array<LinkCost, kCollectiveKinds>, kCollectiveAxes> collective_costs = {};
  bool reduce_overlap = false;
  Gather gather = Gather::kNever;
  MessageQueues queues = MessageQueues::kNone;
};

struct SimulatedAction {
  Action action;
  double start = 0, end = 0;
};

// What a rank holds from `time` on, until the next entry.
struct MemoryStep {
  double time = 0;
  std::int64_t bytes = 0;
};

// A message between two ranks.
struct SimulatedMessage {
  Action made_by;        // F, B or I
  int from = 0, to = 0;  // ranks
  double made = 0;       // the end of that action
  double arrives = 0;
};

// What a simulation keeps besides its figures; all grow with the number of actions.
struct SimulationDetail {
  bool timeline = true;
  bool memory = false;
  bool messages = false;
};

// For each rank, makespan = idle before its first action + span + idle after its last, and its span
// = busy + waiting.
struct Simulation {
  double makespan = 0;              // last end over all ranks, reductions too; the step's barrier
  double span = 0;                  // longest own span: first start to last end of one rank
  std::vector<double> busy;         // [rank] computing
  std::vector<double> waiting;      // [rank] for tensors or reductions, within its own span
  double bubble_makespan = 0;       // mean over ranks of (makespan - busy) / makespan
  double bubble_span = 0;           // (span - busy) / span on the rank with the longest span
  std::vector<int> peak_in_flight;  // [rank], chunks
  std::vector<std::int64_t> peak_bytes;  // [rank]; empty where no bytes are given
  std::int64_t messages = 0;
  // [rank] compute actions in order; empty where not asked for.
  std::vector<std::vector<SimulatedAction>> timeline;
  std::vector<SimulatedMessage> transfers;  // in no order; empty where not asked for
  // [rank] REDUCE_GRAD of each stage; empty where reductions take no time.
  std::vector<std::vector<SimulatedAction>> reductions;
  // [rank] in order of time, the first at time 0; empty where not asked for or no bytes are given.
  std::vector<std::vector<MemoryStep>> memory;
};

// `lowered` may come from lower() or be compute-only (messages are then implied).
// Requires: check() found nothing. Throws Error(kUsage) naming what is negative, missing,
// not finite or too large to be counted.
[[nodiscard]] Simulation simulate(const Schedule& lowered, const SimulationTimes& times,
                                  const SimulationDetail& detail = {});

// The same model cut into another number of stages of equal extent each: what a stage gets of an
// old one is its share of it. `times.stages` and `times.bytes` may have one entry (which is then
// one of `old_stages` alike). A border within an old stage passes on what that stage does. What its
// collectives cost becomes part of its times.
// Throws Error(kUsage) as simulate() does.
[[nodiscard]] SimulationTimes recut(const SimulationTimes& times, int old_stages, int new_stages);

// A training step as it ran, beside its plan: step_timeline() of <sluice/pipeline.hpp>. Times are
// in seconds, from the first action of any rank on.
struct StepTimeline {
  Schedule schedule;    // what replica 0 ran: compute actions, each in a step of its own
  Simulation measured;  // as it ran; peak_in_flight follows from the order
  Simulation planned;   // with the mean time of each stage's actions, and messages that take none
  // The largest error in seconds of a rank's clock against that of rank 0. An action may seem to
  // begin that much before its input was there.
  double clock_error = 0;
};

// --- drawings ---
// The schedule as text: one row per rank, one column per unit of time, cells `F0 B0 I0 W0` (stage
// index in front where a rank has several), idle cells blank. Every compute step takes one unit, a
// pair prints as `F7+B3`. `mark` brackets one cell and points at its row; a schedule that cannot
// run, or whose marked step does not compute, is drawn by list position instead of time. Any
// schedule can be drawn, also a broken one. Rows end in a line feed, without trailing blanks.
[[nodiscard]] std::string draw_grid(const Schedule& schedule, const Violation* mark = nullptr);

// The violation's message, then its grid with the offending cell marked.
[[nodiscard]] std::string describe(const Schedule& schedule, const Violation& violation);

// The times of a simulation, or of a step that ran, as text: one row per rank, time from left to
// right over at most `columns` columns of 1 and more. An action begins with its name, `F0` (with
// the stage in front where a rank has several), as far as it has columns, and goes on with `-`; one
// that has no column is left out. A line with the makespan and the bubble follows. Throws
// Error(kUsage) for a simulation without timeline.
[[nodiscard]] std::string draw_timeline(const Schedule& schedule, const Simulation& simulation,
                                        int columns = 80);

// Beyond that many boxes viewers choke.
inline constexpr std::size_t kMaxSvgActions = 100'000;

// Pictures read like the papers' figures: time from left to right, one row per rank. Forwards are
// blue, backwards green (the input half teal), weight gradients violet, idle time white; later
// chunks of a rank are lighter. Boxes show the micro-batch; an overlapped pair is two halves of one
// box. A pointer over a box shows its rank, action and times. Thin lines lead from the end of an
// action to where its message arrives, where the simulation has transfers that take time. Below the
// rows, the bytes that each rank holds over time, where it has them. A legend and a caption with
// bubbles and peak memory follow.
//
// Boxes are as wide as their actions are long in the simulation; the shortest one has room for its
// number, as long as the picture then stays below `most_width` pixels. At most 500 bytes per
// action. Requires: `simulation` is simulate()'s of this schedule or of what lower() made of it, or
// of step_timeline(), as `schedule` then is. Throws Error(kUsage) for a simulation of another
// schedule, and for more than kMaxSvgActions actions.
[[nodiscard]] std::string draw_svg(const Schedule& schedule, const Simulation& simulation,
                                   int most_width = 20'000);

}  // namespace sluice
#pragma GCC visibility pop
