// Event-driven simulation of a lowered schedule: when would each action start and end, what waits
// for what, and how many bytes does each rank hold meanwhile?
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
// Units of time and bytes are the caller's; bandwidth is bytes per unit of time.
#pragma once

#include <cstdint>
#include <vector>

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
  std::int64_t reduced = 0;  // what one replica moves to sum the gradients; takes no memory
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
  LinkCost reduce_link = {};         // for StageBytes::reduced
  bool reduce_overlap = false;
  MessageQueues queues = MessageQueues::kNone;
};

// The link that messages from one rank to another take.
[[nodiscard]] LinkCost link_between(const SimulationTimes& times, int from, int to);

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
// one of `old_stages` alike). A border within an old stage passes on what that stage does.
// Throws Error(kUsage) as simulate() does.
[[nodiscard]] SimulationTimes recut(const SimulationTimes& times, int old_stages, int new_stages);

}  // namespace sluice
#pragma GCC visibility pop
