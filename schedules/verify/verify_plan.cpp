#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include <sluice/plan.hpp>

#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"
#include "schedules/plan/collectives.hpp"
#include "schedules/verify/verify_trace.hpp"

namespace sluice {
namespace {

constexpr std::array<std::string_view, kTransportModels> kModelNames = {
    "eager", "rendezvous", "bounded", "nccl", "nccl-edges"};

Violation about_plan(const std::string& message) { return Violation{-1, -1, message}; }

std::optional<Violation> check_shape(const Plan& plan) {
  if (plan.micro_batches < 1) {
    return about_plan(
        concat("the plan has ", plan.micro_batches, " micro-batches; at least 1 is needed"));
  }
  if (plan.fold_every < 0 || (plan.fold_every > 0 && plan.micro_batches % plan.fold_every != 0)) {
    return about_plan(concat("the plan folds every ", plan.fold_every, " of ", plan.micro_batches,
                             " micro-batches; legal are 0 and divisors of their number"));
  }
  if (plan.ranks.size() != at(plan.placement.ranks())) {
    return about_plan(concat("the plan lists ", plan.ranks.size(), " ranks, its placement has ",
                             plan.placement.ranks()));
  }
  for (const TiedStages& group : plan.tied) {
    if (group.stages.empty()) return about_plan("a tied group names no stage");
    for (const int stage : group.stages) {
      if (stage >= 0 && stage < plan.placement.stages()) continue;
      return about_plan(concat("a tied group names stage ", stage, "; legal stages are 0 to ",
                               plan.placement.stages() - 1));
    }
  }
  return std::nullopt;
}

std::optional<Violation> check_collectives(const Plan& plan) {
  for (std::size_t i = 0; i < plan.collectives.size(); ++i) {
    if (const std::string_view why = why_illegal(plan.collectives[i]); !why.empty()) {
      return about_plan(concat("collective ", i, " of the plan cannot be: ", why));
    }
  }
  return std::nullopt;
}

// Each channel joins neighbouring stages on two ranks, under a tag of its own; no two are alike.
std::optional<Violation> check_channels(const Plan& plan) {
  const Placement& placement = plan.placement;
  std::set<std::array<int, 3>> tags;
  std::set<std::array<int, 2>> edges;
  if (std::max(plan.channels.size(), plan.tied.size()) > ProgressEvent::kMostChannels) {
    return about_plan(concat("the plan has more than ", ProgressEvent::kMostChannels,
                             " channels or tied groups"));
  }
  for (std::size_t i = 0; i < plan.channels.size(); ++i) {
    const Channel& channel = plan.channels[i];
    const std::string name = concat("channel ", i);
    const int step = channel.kind == ActionKind::kSendForward ? 1 : -1;
    if (channel.kind != ActionKind::kSendForward && channel.kind != ActionKind::kSendBackward) {
      return about_plan(name + " carries " + std::string(name_of(channel.kind)) +
                        "; legal are SEND_F and SEND_B");
    }
    if (channel.from_stage < 0 || channel.from_stage >= placement.stages() ||
        channel.to_stage < 0 || channel.to_stage >= placement.stages() ||
        channel.to_stage != channel.from_stage + step) {
      return about_plan(concat(name, " joins stages ", channel.from_stage, " and ",
                               channel.to_stage, ", which ", name_of(channel.kind), " does not"));
    }
    if (channel.from_rank != placement.rank_of(channel.from_stage) ||
        channel.to_rank != placement.rank_of(channel.to_stage) ||
        channel.from_rank == channel.to_rank) {
      return about_plan(concat(name, " joins ranks ", channel.from_rank, " and ", channel.to_rank,
                               ", its stages are on ranks ", placement.rank_of(channel.from_stage),
                               " and ", placement.rank_of(channel.to_stage)));
    }
    if (!edges.insert({channel.from_stage, channel.to_stage}).second) {
      return about_plan(name + " repeats an earlier channel of the same stages and direction");
    }
    if (channel.tag < 0 || !tags.insert({channel.from_rank, channel.to_rank, channel.tag}).second) {
      return about_plan(concat(name, " has tag ", channel.tag,
                               ", which is negative or taken by another channel of its ranks"));
    }
  }
  return std::nullopt;
}

// The n-th send of a channel meets the n-th posted receive: both must be of one micro-batch.
std::optional<Violation> check_pairing(const Plan& plan, const PlanTrace& trace) {
  if (std::all_of(trace.channels.begin(), trace.channels.end(),
                  [](const ChannelTrace& channel) { return channel.sent == channel.posted; })) {
    return std::nullopt;
  }
  for (int rank = 0; rank < plan.placement.ranks(); ++rank) {
    const std::vector<PlanOp>& ops = plan.ranks[at(rank)].ops;
    for (std::size_t i = 0; i < ops.size(); ++i) {
      const bool sends = ops[i].kind == OpKind::kStartSend;
      if (!sends && ops[i].kind != OpKind::kPostRecv) continue;
      const ChannelTrace& orders = trace.channels[at(ops[i].channel)];
      const int own = (sends ? orders.sent : orders.posted).index_of(ops[i].micro_batch);
      const int other = (sends ? orders.posted : orders.sent).index_of(ops[i].micro_batch);
      if (own == other) continue;
      const Channel& channel = plan.channels[at(ops[i].channel)];
      const std::string peer = concat("rank ", sends ? channel.to_rank : channel.from_rank);
      const std::string what =
          other < 0 ? peer + (sends ? " posts no receive for it" : " never sends it")
                    : concat("it is number ", own, " of its channel here and number ", other,
                             " on ", peer, "; both sides must keep one order");
      return violation_at(plan, rank, static_cast<int>(i), what);
    }
  }
  return std::nullopt;
}

// True where each message is a group of its own and each ordered pair of ranks has one channel. A
// queue between two ranks then is that channel: its n-th message ends once both sides have issued
// it and those before it, which they have where it is issued, so kNcclEdges is kRendezvous.
bool is_one_by_one(const PlanTrace& trace) {
  return !trace.grouped && std::all_of(trace.pairs.begin(), trace.pairs.end(),
                                       [](const PairTrace& pair) { return pair.channels == 1; });
}

// Fills in what holds under each model. The strict ones go first, since they imply others.
void progress_under_all(const Plan& plan, const PlanTrace& trace, Verification& result) {
  std::array<std::optional<Violation>, kTransportModels> stuck;
  const auto replay = [&](TransportModel model) {
    auto& found = stuck[at(model)];
    found = replay_progress(plan, trace, model);
    return !found.has_value();
  };
  const bool nccl = replay(TransportModel::kNccl);
  const bool bounded = replay(TransportModel::kBounded);
  const bool edges =
      nccl || (bounded && is_one_by_one(trace)) || replay(TransportModel::kNcclEdges);
  const bool rendezvous = bounded || edges || replay(TransportModel::kRendezvous);
  if (!rendezvous) replay(TransportModel::kEager);
  for (int i = 0; i < kTransportModels; ++i) {
    auto& found = stuck[at(i)];
    const auto model = static_cast<TransportModel>(i);
    if (found) {
      result.deadlocks.push_back({model, std::move(*found)});
    } else {
      result.progresses_under.push_back(model);
    }
  }
  if (result.progresses_under.empty()) result.violation = result.deadlocks.front().violation;
}

// True where the plan posts too few receives: a rank of several stages may block in a send for one
// stage while the receiver waits for another. Only such plans are verified, since that costs as
// much as the plan.
bool needs_receives(const Plan& plan) {
  return plan.placement.stages() > plan.placement.ranks() &&
         !verify(plan).progresses(TransportModel::kBounded);
}

}  // namespace

PlanTrace::PlanTrace(const Plan& plan) : events(plan.ranks.size()), channels(plan.channels.size()) {
  std::map<std::pair<int, int>, std::int32_t> found;
  for (const Channel& channel : plan.channels) ++found[{channel.from_rank, channel.to_rank}];
  for (auto& [ranks, number] : found) {
    pairs.push_back({ranks.first, ranks.second, number});
    number = static_cast<std::int32_t>(pairs.size() - 1);
  }
  for (std::size_t i = 0; i < channels.size(); ++i) {
    channels[i].pair = found[{plan.channels[i].from_rank, plan.channels[i].to_rank}];
  }
}

std::int32_t MessageOrderTrace::add_out_of_order(std::int32_t micro_batch,
                                                 std::int32_t micro_batches) {
  if (index_of(micro_batch) >= 0) return -1;
  if (table_.empty()) {
    table_.resize(at(micro_batches), -1);
    std::iota(table_.begin(), table_.begin() + count_, 0);
  }
  return table_[at(micro_batch)] = count_++;
}

Violation violation_at(const Plan& plan, int rank, int position, const std::string& what) {
  const PlanOp& op = plan.ranks[at(rank)].ops[at(position)];
  return Violation{rank, position, concat("rank ", rank, ", op ", position, " (", op, "): ", what)};
}

std::string_view name_of(TransportModel model) { return kModelNames[at(model)]; }

bool Verification::progresses(TransportModel model) const {
  return std::find(progresses_under.begin(), progresses_under.end(), model) !=
         progresses_under.end();
}

Verification verify(const Plan& plan) {
  Verification result;
  result.violation = check_shape(plan);
  if (!result.violation) result.violation = check_channels(plan);
  if (!result.violation) result.violation = check_collectives(plan);
  if (result.violation) return result;

  PlanTrace trace(plan);
  for (int rank = 0; rank < plan.placement.ranks() && !result.violation; ++rank) {
    result.violation = replay_rank(plan, rank, trace);
  }
  if (!result.violation) result.violation = check_pairing(plan, trace);
  if (result.violation) return result;

  progress_under_all(plan, trace, result);
  return result;
}

Plan make_plan(const Schedule& lowered, const std::vector<TiedStages>& tied,
               const PlanOptions& options) {
  Plan plan = assemble_plan(lowered, tied, options);
  if (options.order == MessageOrder::kReceivesAhead && needs_receives(plan)) {
    PlanOptions deeper = options;
    deeper.unit_time_depths = true;
    plan = assemble_plan(lowered, tied, deeper);
  }
  return plan;
}

}  // namespace sluice
