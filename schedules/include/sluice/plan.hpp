// Plans: every post-receive, start-send, wait, compute and buffer release of a rank, in order.
// lower() adds to a schedule the messages and reductions that a plan is made of. verify() proves
// that a plan is right and ends under each transport model. make_plan() makes one that does where
// assemble_plan() alone would not. Pure and thread-safe.
//
// The plan is the only rule book: verify() replays exactly this list under each transport model,
// the engine executes exactly this list, and neither knows another rule.
//
// Buffers. A stage owns pools, addressed by slot:
//   kInput       its input activations, filled by a receive, or written by the previous stage when
//                that stage is on the same rank (then the previous stage has no kOutput pool).
//                Stage 0 has none: its inputs come from the data. Held until W (or B) is done.
//   kOutput      activations on their way to the next stage: held until the send is done. The last
//                stage's outputs are held until W (or B): the loss turns them into their gradient.
//   kGradOutput  gradients with respect to its outputs, received, or written by the next stage when
//                that is on the same rank (then the next stage has no kGradInput pool). Held until
//                W (or B) is done. The last stage has none.
//   kGradInput   gradients on their way to the previous stage: held until the send is done.
//   kState       what the stage keeps of the micro-batch between F and W (or B).
//   kStored      what it keeps while that is away from the device (OFFLOAD, FETCH).
// Slots named by a compute op: kInput, kState, kGradOutput are the stage's own pools; kOutput means
// the stage's own kOutput pool or, at a local hand-over, stage + 1's kInput pool; kGradInput its
// own kGradInput pool or, at a local hand-over, stage - 1's kGradOutput pool. Message and release
// ops always name the stage's own pools.
//
// Moves. OFFLOAD takes a micro-batch's state to a slot of kStored, FETCH brings it to a slot of
// kState, which may be another one. A rank's moves are made one after the other, in the order of
// their starts. So a FETCH may start into the slot that an OFFLOAD before it leaves, and from one
// that it fills. A compute op needs the end of both.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/detail/planned_collective.hpp>
#include <sluice/schedule.hpp>

#pragma GCC visibility push(default)
namespace sluice {

struct LowerOptions {
  bool reduce_grad = true;       // REDUCE_GRAD per stage and OPTIMIZER per rank (training)
  std::vector<TiedStages> tied;  // one REDUCE_TIED on every rank that owns one of the stages
  // [stage] Its sum over replicas overlaps with computation and blocks no rank.
  // Empty: no stage's does.
  std::vector<bool> overlapped_grad_sums = {};
  // [stage] It computes something again before its backward needs a gradient. Empty: none does.
  std::vector<bool> recomputes = {};
  // The schedule's own UNSHARD, RESHARD and REDUCE_GRAD stay in it, for a file that is written of
  // it; excludes `gathers`.
  bool keep_sharding = false;
  // [stage] Empty: kNever.
  std::vector<Gather> gathers = {};
  // [stage] How many micro-batches' states the stage should have on its device at once: a rank
  // offloads those that wait longest for their backward, as few as that takes. Below 2: any
  // number. Empty: no stage offloads. Not of a forward-only schedule.
  std::vector<int> resident = {};
  // Overlapped pairs stay pairs, with the messages of both around them. Else their actions become
  // steps of their own, in order, as the engine runs them: the first hands over while the second
  // runs, and waits for its own input alone.
  bool keep_pairs = false;
};

// Adds SEND right after the action that produces and RECV right before the action that uses, where
// the neighbouring stage is on another rank. For a stage that recomputes, RECOMPUTE comes before
// each B and I and before the RECV_B that it waits for, except in pairs that stay pairs; then
// reductions and the optimizer, except for a forward-only schedule. Where the sum
// overlaps with computation, REDUCE_GRAD comes right after the last B or W of its stage, before the
// messages that follow. Otherwise it comes at the list's end, where it holds up no other rank.
// UNSHARD comes before the first action of a stage, and before the message that it waits for;
// RESHARD right after its last one and what that sends, of a stage with Gather::kPerUse also before
// another stage's action.
// OFFLOAD comes after the F and its message, FETCH one compute action ahead of the B or I and
// before the messages of that action (after PipeOffload, Wan et al. 2025, arXiv 2503.01328). A
// state that leaves takes its slot during the rank's next action, one that comes back during the
// action before its own. A bound that no choice of micro-batches reaches is missed by as little as
// that takes. A REDUCE_TIED names the first stage of its group on that rank; groups come in the
// order of `tied`. Requires: check() found nothing. Throws Error(kUsage) for schedules with
// messages, moves or RECOMPUTE, for illegal groups and where `overlapped_grad_sums`, `recomputes`,
// `gathers` or `resident` has not one entry per stage.
[[nodiscard]] Schedule lower(const Schedule& schedule, const LowerOptions& options);

// LowerOptions::resident by which each stage keeps half of what it has in flight, rounded up; 0,
// any number, where that is at most 2.
[[nodiscard]] std::vector<int> half_resident(const Schedule& schedule);

enum class BufferKind : std::uint8_t { kInput, kOutput, kGradOutput, kGradInput, kState, kStored };
inline constexpr int kBufferKinds = 6;
[[nodiscard]] std::string_view name_of(BufferKind kind);  // "input", "grad-output", ...

enum class OpKind : std::uint8_t {
  kPostRecv,   // action RECV_F | RECV_B: hand the slot to the transport
  kWaitRecv,   // block until that message is there
  kStartSend,  // action SEND_F | SEND_B
  kWaitSend,   // block until that send is done; its slot is free from here on
  kCompute,    // action F | B | I | W | RECOMPUTE
  kRelease,    // after W or B: every slot named is free from here on
  kFold,  // after the last F, and the last W or B, of a group of Plan::fold_every micro-batches
          // (action, micro_batch): what the stage has summed over the group joins that of the
          // groups before it, and starts anew; collective over tensor ranks where it has shares
  kReduceGrad,  // collective over the stage's replicas and tensor ranks; the next kReduceTied or
                // kOptimizer waits for its end, or the first B or W of another stage before that,
                // nothing else
  kReduceTied,  // collective over the ranks that own a use of tied parameter group `channel`
  kOptimizer,   // collective over the job: norm, guard, clip, update
  kStartMove,   // action OFFLOAD | FETCH: between the slots of kState and kStored
  kWaitMove,    // block until that OFFLOAD has left, or that FETCH has filled, the slot of kState
  kUnshard,     // collective over the stage's replicas, as is what it starts: the stage may have
                // its parameters whole from here on
  kReshard,     // each replica has its part of them alone from here on
};

struct PlanOp {
  OpKind kind = OpKind::kCompute;
  ActionKind action = ActionKind::kForward;
  // Posts and starts: issued as one group with the post or start right before this op, as between
  // ncclGroupStart and ncclGroupEnd. Transports with tags need not look at it.
  bool with_previous = false;
  std::int32_t stage = 0;
  std::int32_t micro_batch = -1;
  std::int32_t channel = -1;  // messages: index into Plan::channels; kReduceTied: group index
  // kCompute: the collectives that the stage makes within it, a range of Plan::collectives. Each
  // waits for the same op of all ranks of its group.
  std::int32_t first_collective = 0, collectives = 0;
  // By BufferKind.
  std::array<std::int32_t, kBufferKinds> slots = {-1, -1, -1, -1, -1, -1};

  [[nodiscard]] std::int32_t slot(BufferKind kind_of) const {
    return slots[static_cast<size_t>(kind_of)];
  }
};

// One FIFO of messages: (ordered rank pair, direction, stage edge). Messages are sent in the
// sender's order and received in the same.
struct Channel {
  ActionKind kind = ActionKind::kSendForward;  // kSendForward or kSendBackward
  std::int32_t from_stage = 0, to_stage = 0;
  std::int32_t from_rank = 0, to_rank = 0;
  std::int32_t tag = 0;  // index among the channels of this ordered rank pair, from 0
};

struct BufferPool {
  std::int32_t stage = 0;
  BufferKind kind = BufferKind::kInput;
  std::int32_t count = 0;
};

struct RankPlan {
  std::vector<BufferPool> pools;
  std::vector<PlanOp> ops;
};

struct Plan {
  std::string schedule_name;
  Placement placement = Placement::linear(1);
  int micro_batches = 1;
  bool forward_only = false;
  bool exact = true;  // every stage's weight gradients accumulate in ascending order
  // Micro-batches of a group: 0 to fold_every - 1 are the first. 0: all are one, without folds.
  int fold_every = 0;
  std::vector<TiedStages> tied;
  std::vector<Channel> channels;
  std::vector<PlannedCollective> collectives;  // within actions; each list once per stage
  std::vector<RankPlan> ranks;
};

// In which order a rank posts receives and starts sends.
enum class MessageOrder : std::uint8_t {
  kReceivesAhead,  // for transports with tags: each receive as soon as its slot is free
  kGlobal,         // for in-order queues (NCCL): all ranks follow one order of all messages
};

struct PlanOptions {
  int receive_ahead = 1;  // receives posted beyond what the schedule holds, per channel
  int send_slots = 2;     // slots per send pool; a send's wait comes when its slot is used again
  MessageOrder order = MessageOrder::kReceivesAhead;
  // kReceivesAhead: room for every receive under way where each action takes one unit of time.
  bool unit_time_depths = false;
  std::vector<StageCollectives> collectives = {};  // [stage]; empty: no stage makes any
  int fold_every = 0;  // as Plan; divides the micro-batches. Not of a forward-only plan
};

// The plan of a schedule, in one pass. It is not verified: most callers want make_plan().
//
// The most pairs of stage and micro-batch that the program and pipelines plan: a plan of two
// million takes seconds and more than half a gigabyte. Nothing here refuses more.
inline constexpr std::int64_t kMaxPlannedPairs = 2'000'000;

// Slots are assigned statically, by walking each rank's list once. A send is waited for just before
// its slot is used again, and at the latest before the reductions at the list's end; a REDUCE_GRAD
// that messages or compute follow waits for none. A send pool exceeds send_slots only where a
// schedule computes more tensors than that before it sends them. Of an overlapped pair the first
// action's op comes first.
//
// kReceivesAhead. Receives are posted in the sender's order: at the list's start as many as fit,
// then right after the release that frees a slot. A pool of received tensors holds the most
// messages that must be posted and unreleased at any wait, and receive_ahead more, but no more than
// there are messages; with unit_time_depths at least as many as are under way when every action
// takes one unit of time. Where ranks own several stages, a plan without may deadlock; make_plan()
// finds out and takes the depths where they are needed. Linear in the number of actions.
//
// kGlobal. Messages are ordered by the time they are sent where F, I and W take one unit of time
// and B two; then by pair of ranks, those with an even lower rank first. Messages that the same two
// ranks exchange at one time form a group on both. A rank issues in that order: each send right
// after the action that makes the tensor, each receive at the latest before the rank's first action
// that starts later. A receive goes up to receive_ahead earlier where its turn has come and a slot
// is free. A step then waits only for messages sent before it starts, and a message only for
// earlier steps and messages. So no in-order queue can stop it, at any speed. What is sent when a B
// or W ends goes before a REDUCE_GRAD that follows that action. n log n in the actions of a rank.
//
// Requires: check(schedule) found nothing; `lowered` comes from lower(). `tied` as given there.
// Throws Error(kUsage) for illegal options, messages that are not all there and kinds no op
// exists for.
[[nodiscard]] Plan assemble_plan(const Schedule& lowered, const std::vector<TiedStages>& tied,
                                 const PlanOptions& options = {});

[[nodiscard]] std::string to_string(const PlanOp& op);
// The same with its collectives: "..., collectives: sum of 24 bytes of f64 over the replicas; ...".
[[nodiscard]] std::string to_string(const Plan& plan, const PlanOp& op);

[[nodiscard]] std::string_view name_of(CollectiveAxis axis);  // "the replicas", "the tensor ranks"
[[nodiscard]] std::string_view name_of(CollectiveKind kind);  // "sum", "all-gather", ...
// "sum of 24 bytes of f64 over the replicas".
[[nodiscard]] std::string to_string(const PlannedCollective& collective);

// What ends a wait, and when an op may be issued. A rank works through its list; kPostRecv and
// kStartSend only issue, but for kBounded.
enum class TransportModel : std::uint8_t {
  kEager,       // a send is done at once
  kRendezvous,  // a send is done when its receive is posted
  kBounded,     // rendezvous, and start-send itself blocks while a send of the rank is unmatched
  kNccl,  // one communicator for the pipeline: a rank's groups (PlanOp::with_previous) stand in
          // one queue; the first one runs, and ends when the other side of each of its
          // messages runs too; messages are paired by their order between two ranks alone
  kNcclEdges,  // the same with one communicator, and so one queue at each end, per ordered pair of
               // ranks; a group falls into one per queue
};
inline constexpr int kTransportModels = 5;
[[nodiscard]] std::string_view name_of(TransportModel model);  // "eager", ..., "nccl-edges"

// Why a plan cannot finish under a model: a deadlock's cycle (who waits for whom, on which action),
// or, for queues without tags, the two messages that would meet.
struct Deadlock {
  TransportModel model = TransportModel::kEager;
  Violation violation;
};

struct Verification {
  // Set where a rule is broken, or where no model lets the plan finish: the first offending op of
  // the first rank, in words. position indexes RankPlan::ops.
  std::optional<Violation> violation;
  std::vector<TransportModel> progresses_under;
  std::vector<Deadlock> deadlocks;  // one for each of the other models, in their order
  [[nodiscard]] bool ok() const { return !violation.has_value(); }
  [[nodiscard]] bool progresses(TransportModel model) const;
};

// Replays the list. Each slot is free when it is written and filled when it is read. A post or
// start precedes each wait. The ops of a group are adjacent. Messages pair one to one and in order.
// Every F, and B or I then W, of every stage and micro-batch happens once, on the stage's own rank.
// A RECOMPUTE comes after its F, and the next action of its stage is the B or I of the same
// micro-batch: what was computed lies in memory that the micro-batches of a stage share.
// Where a plan folds, a stage has run all F of a group of micro-batches, and its fold, before any F
// of a later group, and likewise all W or B; all folds come before the stage's reductions.
// What is offloaded is fetched before it is read; a slot that it leaves, or comes back to, is
// written or read after the wait alone. A stage with an UNSHARD computes between it and its RESHARD
// alone. Nothing is posted, held, away or whole at the end. Reductions come
// after all backwards of their stage, over replicas before over tied uses; the optimizer comes
// after all of them and last. A broken rule ends the search (the other fields are then empty). Then
// replays it under every model; REDUCE_TIED and OPTIMIZER wait for every rank that takes part. A
// wait ends once several things have happened, and nothing that happened is undone. A model that a
// stricter one implies is therefore not replayed (kNccl before kNcclEdges before kRendezvous before
// kEager, kBounded before kRendezvous). An engine that issues earlier than its list says, from a
// host that runs ahead of its device, ends too. Collectives within actions: every micro-batch of a
// stage makes the same list in F, in I and in W, and those of I and W in B; none is outside an
// action, or within a group of messages; none is over replicas in a forward-only plan. So replicas,
// and the ranks that share a stage, make the same ones at equal positions. They hold nobody up for
// ever: all of these pipelines follow this one plan, so what one of them can do next, with its
// messages of the same pipeline, all can, and each reaches every collective. Nearly linear in the
// number of ops.
[[nodiscard]] Verification verify(const Plan& plan);

// assemble_plan() with the options. Under kReceivesAhead, where ranks own several stages and
// verify() finds that the plan does not end under kBounded, once more with unit_time_depths. That
// costs as much as the plan again. Requirements and errors as there.
[[nodiscard]] Plan make_plan(const Schedule& lowered, const std::vector<TiedStages>& tied,
                             const PlanOptions& options = {});

}  // namespace sluice
#pragma GCC visibility pop
