#include "schedules/simulate/simulation_costs.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"
#include "schedules/plan/collectives.hpp"

namespace sluice {
namespace {

void require_time(const std::string& what, double time) {
  if (!std::isfinite(time) || time < 0) {
    refuse("simulation: the ", what, " is ", time, "; legal is a finite time of 0 or more");
  }
}

void require_link(const std::string& what, const LinkCost& link) {
  require_time("latency of " + what, link.latency);
  if (!std::isfinite(link.bandwidth) || link.bandwidth < 0) {
    refuse("simulation: the bandwidth of ", what, " is ", link.bandwidth,
           "; legal is a finite number above 0, or 0 for no limit");
  }
}

void require_entries(const std::string& what, std::size_t entries, int stages) {
  if (entries == 1 || entries == at(stages)) return;
  refuse("simulation: ", what, " for ", entries,
         " stages; legal is 1 for all alike or one for each of ", stages, " stages");
}

void require_bytes(const std::string& what, std::int64_t bytes) {
  if (bytes < 0) {
    refuse("simulation: the ", what, " are ", bytes, "; legal is 0 or more");
  }
}

// No order then makes a rank hold more than an int64 counts.
void require_countable(const SimulationTimes& times, int stages, int micro_batches) {
  constexpr double kMost = 9e18;
  double total = 0;
  for (const StageBytes& each : times.bytes) {
    const double moving =
        static_cast<double>(each.until_input) + static_cast<double>(each.until_weight) +
        2 * static_cast<double>(each.output) + 2 * static_cast<double>(gradient_bytes(each));
    total += static_cast<double>(each.resident) + moving * micro_batches;
  }
  if (times.bytes.size() == 1) total *= stages;
  if (total > kMost) {
    refuse("simulation: the bytes of ", micro_batches,
           " micro-batches over all stages exceed what 63 bits count");
  }
}

void require_valid(const SimulationTimes& times, int stages) {
  require_entries("times", times.stages.size(), stages);
  for (std::size_t i = 0; i < times.stages.size(); ++i) {
    const std::string stage = concat(" time of stage ", i);
    require_time("forward" + stage, times.stages[i].forward);
    require_time("backward-input" + stage, times.stages[i].backward_input);
    require_time("backward-weight" + stage, times.stages[i].backward_weight);
    require_time("reduction" + stage, times.stages[i].reduce);
    if (!(times.stages[i].overlap < 0)) require_time("overlap" + stage, times.stages[i].overlap);
  }
  require_time("message time", times.message);
  require_link("a link", {times.message, times.bandwidth});
  require_link("a link between nodes", times.between_nodes);
  require_link("the link for reductions", times.reduce_link);
  require_link("the link for moves", times.move_link);
  if (times.ranks_per_node < 0) {
    refuse("simulation: ", times.ranks_per_node,
           " ranks per node; legal is 1 or more, or 0 for a single node");
  }
  if (!times.collectives.empty()) {
    require_entries("collectives", times.collectives.size(), stages);
  }
  for (const auto& of_axis : times.collective_costs) {
    for (const LinkCost& cost : of_axis) require_link("a collective", cost);
  }
  if (!times.bytes.empty()) require_entries("bytes", times.bytes.size(), stages);
  for (std::size_t i = 0; i < times.bytes.size(); ++i) {
    const std::string stage = concat(" bytes of stage ", i);
    require_bytes("activation" + stage, times.bytes[i].until_input);
    require_bytes("weight-activation" + stage, times.bytes[i].until_weight);
    require_bytes("output" + stage, times.bytes[i].output);
    require_bytes("resident" + stage, times.bytes[i].resident);
    require_bytes("reduced" + stage, times.bytes[i].reduced);
    require_bytes("gathered" + stage, times.bytes[i].gathered);
  }
}

// [rank pair] the link that is not as all others are.
using Exceptions = std::map<std::pair<int, int>, LinkCost>;

LinkCost link_of(const SimulationTimes& times, const Exceptions& exceptions, int from, int to) {
  const auto found = exceptions.find({from, to});
  if (found != exceptions.end()) return found->second;
  const int size = times.ranks_per_node;
  if (size > 0 && from / size != to / size) return times.between_nodes;
  return {times.message, times.bandwidth};
}

double cost_of(const SimulationTimes& times, const StageCollectives& stage, ActionKind kind,
               bool forward_only) {
  double cost = 0;
  for (const PlannedCollective& each : collectives_of(stage, kind, forward_only)) {
    const LinkCost& link = times.collective_costs[at(each.axis)][at(each.kind)];
    cost += link.latency + transfer_seconds(link, static_cast<std::int64_t>(each.bytes));
  }
  return cost;
}

// The pieces of the old stages that new stage `stage` is made of.
std::vector<StagePiece> pieces_of(int stage, int old_stages, int new_stages) {
  // In units of which an old stage has `width` and a new one `step`.
  const std::int64_t divisor = std::gcd(old_stages, new_stages);
  const std::int64_t width = new_stages / divisor;
  const std::int64_t step = old_stages / divisor;
  const std::int64_t end = (stage + std::int64_t{1}) * step;
  std::vector<StagePiece> pieces;
  for (std::int64_t begin = stage * step; begin < end;) {
    const std::int64_t next = std::min(end, (begin / width + 1) * width);
    pieces.push_back({static_cast<int>(begin / width), static_cast<double>(next - begin),
                      static_cast<double>(width)});
    begin = next;
  }
  return pieces;
}

}  // namespace

void require_costs(const SimulationTimes& times, const Schedule& schedule) {
  require_valid(times, schedule.placement.stages());
  require_countable(times, schedule.placement.stages(), schedule.micro_batches);
  const int ranks = schedule.placement.ranks();
  for (const RankLink& each : times.links) {
    const std::string name = concat(each.from, " to ", each.to);
    const bool legal = each.from >= 0 && each.from < ranks && each.to >= 0 && each.to < ranks;
    if (!legal || each.from == each.to) {
      refuse("simulation: a link from rank ", name, "; legal are two of ranks 0 to ", ranks - 1);
    }
    require_link("the link from rank " + name, each.link);
  }
}

double gather_time(const SimulationTimes& times, int stage) {
  const std::int64_t bytes = times.bytes.empty() ? 0 : of_stage(times.bytes, stage).gathered;
  if (bytes == 0) return 0;
  return times.reduce_link.latency + transfer_seconds(times.reduce_link, bytes);
}

SimulationTimes with_collectives(const SimulationTimes& times, int stages, bool forward_only) {
  SimulationTimes result = times;
  const bool gathers = times.gather == Gather::kPerUse;
  if (times.collectives.empty() && !gathers) return result;
  if (gathers) result.gather = Gather::kNever;
  result.collectives.clear();
  result.stages.clear();
  for (int stage = 0; stage < stages; ++stage) {
    StageTimes& made = result.stages.emplace_back(of_stage(times.stages, stage));
    const auto add = [&](double& time, double cost) {
      time += cost;
      if (made.overlap >= 0) made.overlap += cost;  // a pair makes them one after the other
    };
    if (gathers) {
      for (double* time : {&made.forward, &made.backward_input}) {
        add(*time, gather_time(times, stage));
      }
    }
    if (times.collectives.empty()) continue;
    const StageCollectives& own = of_stage(times.collectives, stage);
    const auto add_to = [&](double& time, ActionKind kind) {
      add(time, cost_of(times, own, kind, forward_only));
    };
    add_to(made.forward, ActionKind::kForward);
    add_to(made.backward_input, ActionKind::kBackwardInput);
    add_to(made.backward_input, ActionKind::kRecompute);
    made.recompute += cost_of(times, own, ActionKind::kRecompute, forward_only);
    add_to(made.backward_weight, ActionKind::kBackwardWeight);
  }
  return result;
}

Handovers handovers_of(const SimulationTimes& times, const Placement& placement) {
  Exceptions exceptions;
  for (const RankLink& each : times.links) exceptions[{each.from, each.to}] = each.link;
  std::map<std::pair<int, int>, int> links;
  const auto make = [&](int from_stage, int to_stage, std::int64_t bytes) {
    Handover handover;
    handover.from = placement.rank_of(from_stage);
    handover.to = placement.rank_of(to_stage);
    handover.bytes = bytes;
    if (handover.from == handover.to) return handover;
    const LinkCost link = link_of(times, exceptions, handover.from, handover.to);
    handover.link =
        links.emplace(std::pair{handover.from, handover.to}, static_cast<int>(links.size()))
            .first->second;
    handover.seconds = transfer_seconds(link, bytes);
    handover.latency = link.latency;
    return handover;
  };
  const auto stages = at(placement.stages());
  Handovers result{std::vector<Handover>(stages), std::vector<Handover>(stages), 0};
  const StageBytes none;
  for (int stage = 0; stage + 1 < placement.stages(); ++stage) {
    const StageBytes& bytes = times.bytes.empty() ? none : of_stage(times.bytes, stage);
    result.forward[at(stage)] = make(stage, stage + 1, bytes.output);
    result.backward[at(stage) + 1] = make(stage + 1, stage, gradient_bytes(bytes));
  }
  result.links = static_cast<int>(links.size());
  return result;
}

double transfer_seconds(const LinkCost& link, std::int64_t bytes) {
  return link.bandwidth > 0 ? static_cast<double>(bytes) / link.bandwidth : 0;
}

double duration_of(const SimulationTimes& times, const Action& action) {
  const StageTimes& stage = of_stage(times.stages, action.stage);
  switch (action.kind) {
    case ActionKind::kForward:
      return stage.forward;
    case ActionKind::kBackwardInput:
      return stage.backward_input;
    case ActionKind::kBackwardWeight:
      return stage.backward_weight;
    case ActionKind::kRecompute:
      return stage.recompute;
    default:
      return stage.backward_input + stage.backward_weight;
  }
}

std::optional<double> pair_time(const SimulationTimes& times, const Action& one,
                                const Action& two) {
  const bool forward_first = one.kind == ActionKind::kForward;
  const Action &forward = forward_first ? one : two, &backward = forward_first ? two : one;
  if (forward.kind != ActionKind::kForward || backward.kind == ActionKind::kForward) {
    return std::nullopt;
  }
  const StageTimes& first = of_stage(times.stages, forward.stage);
  const StageTimes& second = of_stage(times.stages, backward.stage);
  if (first.overlap < 0 || second.overlap < 0) return std::nullopt;
  const auto saving = [](const StageTimes& each) {
    return each.forward + each.backward_input + each.backward_weight - each.overlap;
  };
  const double whole = second.backward_input + second.backward_weight;
  const double part = duration_of(times, backward);
  const double saved = std::min(saving(first), saving(second)) * (whole > 0 ? part / whole : 0);
  return std::max({first.forward, part, first.forward + part - saved});
}

void append_stage(const SimulationTimes& old, const std::vector<StagePiece>& pieces,
                  SimulationTimes& times) {
  StageTimes sum{0, 0, 0, 0, 0};
  double until_input = 0, until_weight = 0, resident = 0, reduced = 0, gathered = 0;
  StageBytes bytes;
  for (const StagePiece& piece : pieces) {
    const auto share = [&](double value) { return value * piece.numerator / piece.denominator; };
    const StageTimes& part = of_stage(old.stages, piece.stage);
    sum.forward += share(part.forward);
    sum.backward_input += share(part.backward_input);
    sum.backward_weight += share(part.backward_weight);
    sum.recompute = share(part.recompute);  // ahead of a wait the last one's alone can run
    sum.reduce += share(part.reduce);
    sum.overlap = sum.overlap < 0 || part.overlap < 0 ? -1 : sum.overlap + share(part.overlap);
    if (old.bytes.empty()) continue;
    bytes = of_stage(old.bytes, piece.stage);  // the last one's output passes the border
    until_input += share(static_cast<double>(bytes.until_input));
    until_weight += share(static_cast<double>(bytes.until_weight));
    resident += share(static_cast<double>(bytes.resident));
    reduced += share(static_cast<double>(bytes.reduced));
    gathered += share(static_cast<double>(bytes.gathered));
  }
  times.stages.push_back(sum);
  if (old.bytes.empty()) return;
  bytes.until_input = std::llround(until_input);
  bytes.until_weight = std::llround(until_weight);
  bytes.resident = std::llround(resident);
  bytes.reduced = std::llround(reduced);
  bytes.gathered = std::llround(gathered);
  times.bytes.push_back(bytes);
}

SimulationTimes recut(const SimulationTimes& times, int old_stages, int new_stages) {
  if (old_stages < 1 || new_stages < 1) {
    refuse("simulation: ", old_stages, " stages cut into ", new_stages, "; legal is 1 or more");
  }
  require_valid(times, old_stages);
  const SimulationTimes old = with_collectives(times, old_stages, /*forward_only=*/false);
  SimulationTimes result = old;
  result.stages.clear();
  result.bytes.clear();
  for (int stage = 0; stage < new_stages; ++stage) {
    append_stage(old, pieces_of(stage, old_stages, new_stages), result);
  }
  return result;
}

}  // namespace sluice
