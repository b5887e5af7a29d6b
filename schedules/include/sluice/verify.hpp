// The proof that a plan is right and ends under each transport model, and make_plan(), which makes
// a plan that does where assemble_plan() (plan.hpp) alone would not. Pure and thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>

#pragma GCC visibility push(default)
namespace sluice {

// What ends a wait, and when an op may be issued. A rank works through its list; kPostRecv and
// kStartSend only issue, but for kBounded.
enum class TransportModel : std::uint8_t {
  kEager,       // a send is done at once
  kRendezvous,  // a send is done when its receive is posted
  kBounded,     // rendezvous, and start-send itself blocks while `send_buffers` of the rank's sends
                // are unmatched
  kNccl,  // one communicator for the pipeline: a rank's groups (PlanOp::with_previous) stand in
          // one queue; the first one runs, and ends when the other side of each of its
          // messages runs too; messages are paired by their order between two ranks alone
  kNcclEdges,  // the same with one communicator, and so one queue at each end, per ordered pair of
               // ranks; a group falls into one per queue
};
inline constexpr int kTransportModels = 5;
[[nodiscard]] std::string_view name_of(TransportModel model);  // "eager", ..., "nccl-edges"

struct VerifyOptions {
  int send_buffers = 1;  // for kBounded, at least 1
};

// Why a plan cannot finish under a model: a deadlock's cycle (who waits for whom, on which action),
// or, for queues without tags, the two messages that would meet.
struct Deadlock {
  TransportModel model = TransportModel::kEager;
  Violation violation;
};

// Messages of one ordered pair of ranks, over all its channels.
struct PairDepth {
  int from_rank = 0, to_rank = 0;
  int depth = 0;  // most sends started and not yet waited for
};

struct Verification {
  // Set where a rule is broken, or where no model lets the plan finish: the first offending op of
  // the first rank, in words. position indexes RankPlan::ops.
  std::optional<Violation> violation;
  std::vector<TransportModel> progresses_under;
  std::vector<Deadlock> deadlocks;     // one for each of the other models, in their order
  std::vector<int> peak_in_flight;     // [rank] in chunks, counted from the plan's compute ops
  std::vector<int> queue_depth;        // [channel] most sends started and not yet waited for
  std::vector<PairDepth> pair_depths;  // of each ordered pair of ranks that has a channel
  bool exact = false;  // every stage's weight gradients accumulate in ascending order
  [[nodiscard]] bool ok() const { return !violation.has_value(); }
  [[nodiscard]] bool progresses(TransportModel model) const;
};

// Replays the list. Each slot is free when it is written and filled when it is read. A post or
// start precedes each wait. The ops of a group are adjacent. Messages pair one to one and in order.
// Every F, and B or I then W, of every stage and micro-batch happens once, on the stage's own rank.
// Nothing is posted or held at the end. Reductions come after all backwards of their stage, over
// replicas before over tied uses; the optimizer comes after all of them and last. A broken rule
// ends the search (the other fields are then empty).
// Then replays it under every model; REDUCE_TIED and OPTIMIZER wait for every rank that takes part.
// A wait ends once several things have happened, and nothing that happened is undone. A model that
// a stricter one implies is therefore not replayed (kNccl before kNcclEdges before kRendezvous
// before kEager, kBounded before kRendezvous). An engine that issues earlier than its list says,
// from a host that runs ahead of its device, ends too.
// Sums within F, B or I (PlanOp::sums): every micro-batch of a stage makes as many, so replicas
// make the same ones in the same order. They hold nobody up for ever: all replicas follow this one
// plan, so what one of them can do next, with its messages of the same pipeline, all can, and each
// reaches every sum. Linear in the number of ops. Throws Error(kUsage) for send_buffers
// < 1.
[[nodiscard]] Verification verify(const Plan& plan, const VerifyOptions& options = {});

// assemble_plan() with the options. Under kReceivesAhead, where ranks own several stages and
// verify() finds that the plan does not end under kBounded, once more with unit_time_depths. That
// costs as much as the plan again. Requirements and errors as there.
[[nodiscard]] Plan make_plan(const Schedule& lowered, const std::vector<TiedStages>& tied,
                             const PlanOptions& options = {});

}  // namespace sluice
#pragma GCC visibility pop
