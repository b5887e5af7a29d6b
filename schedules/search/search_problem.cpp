#include "schedules/search/search_problem.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "schedules/model/actions.hpp"
#include "schedules/model/index.hpp"
#include "schedules/simulate/simulation_costs.hpp"

namespace sluice::search {
namespace {

constexpr std::size_t kNothing = std::numeric_limits<std::size_t>::max();

// Who waits for whom, and how long a tensor travels where its link is free.
void set_dependencies(Problem& problem, const SimulationTimes& times) {
  const Handovers handovers = handovers_of(times, problem.placement);
  const auto slots = 3 * at(problem.stages());
  problem.duration.resize(slots);
  problem.delay.resize(slots);
  problem.need.assign(slots, -1);
  problem.feeds.assign(slots, -1);
  for (int slot = 0; slot < 3 * problem.stages(); ++slot) {
    problem.rank_of_slot.push_back(problem.placement.rank_of(problem.stage(slot)));
  }
  const auto join = [&](std::int32_t from, std::int32_t to, const Handover& handover) {
    problem.need[at(to)] = from;
    problem.feeds[at(from)] = to;
    problem.delay[at(to)] = handover.seconds + handover.latency;
  };
  for (int stage = 1; stage < problem.stages(); ++stage) {
    const auto s = at(stage);
    join(problem.slot(Part::kForward, stage - 1), problem.slot(Part::kForward, stage),
         handovers.forward[s - 1]);
    join(problem.slot(Part::kInput, stage), problem.slot(Part::kInput, stage - 1),
         handovers.backward[s]);
  }
}

}  // namespace

Problem make_problem(const Placement& placement, int micro_batches, bool split,
                     const SimulationTimes& times, const Memory& memory, int tensors_moving) {
  require_costs(times, empty_schedule("", placement, micro_batches));
  Problem problem;
  problem.placement = placement;
  problem.micro_batches = micro_batches;
  problem.split = split;
  problem.limit = memory.limit;
  problem.reduce.resize(memory.limit.size());
  set_dependencies(problem, times);
  std::vector<double> moving(memory.limit.size());
  for (int stage = 0; stage < placement.stages(); ++stage) {
    const auto rank = at(placement.rank_of(stage));
    const StageTimes& cost = of_stage(times.stages, stage);
    problem.duration[at(problem.slot(Part::kForward, stage))] = cost.forward;
    problem.duration[at(problem.slot(Part::kInput, stage))] =
        cost.backward_input + (split ? 0 : cost.backward_weight);
    problem.duration[at(problem.slot(Part::kWeight, stage))] = split ? cost.backward_weight : 0;
    const StageBytes bytes = times.bytes.empty() ? StageBytes{} : of_stage(times.bytes, stage);
    if (!times.reduce_overlap) {
      double seconds = 0;
      if (bytes.reduced > 0) {
        seconds = times.reduce_link.latency + transfer_seconds(times.reduce_link, bytes.reduced);
      }
      problem.reduce[rank] += cost.reduce + seconds;
    }
    if (memory.unit == Memory::Unit::kBytes) {
      problem.held.push_back(static_cast<double>(bytes.until_input + bytes.until_weight));
      problem.released_by_input.push_back(static_cast<double>(bytes.until_input));
      problem.limit[rank] -= static_cast<double>(bytes.resident);
      moving[rank] =
          std::max(moving[rank], static_cast<double>(bytes.output + gradient_bytes(bytes)));
    } else {
      const auto chunks = placement.stages_of(placement.rank_of(stage)).size();
      problem.held.push_back(1 / static_cast<double>(chunks));
      problem.released_by_input.push_back(0);
    }
  }
  for (std::size_t rank = 0; rank < moving.size(); ++rank) {
    problem.limit[rank] -= tensors_moving * moving[rank];
  }
  return problem;
}

double least_memory(const Problem& problem, int rank) {
  double sum = 0;
  for (const int stage : problem.placement.stages_of(rank)) {
    sum += problem.held[at(stage)];
  }
  return sum;
}

double peak_memory(const Problem& problem, const std::vector<Op>& list) {
  double now = 0;
  double peak = 0;
  for (const Op& op : list) {
    now += problem.change(op.slot);
    peak = std::max(peak, now);
  }
  return peak;
}

bool fits(const Problem& problem, const Order& order) {
  for (std::size_t rank = 0; rank < order.size(); ++rank) {
    if (exceeds(peak_memory(problem, order[rank]), problem.limit[rank])) return false;
  }
  return true;
}

Clock::Clock(const Problem& problem)
    : problem_(problem),
      start_(problem.ops()),
      end_(problem.ops()),
      at_(problem.ops()),
      position_(at(problem.ranks())),
      free_(position_.size()),
      waits_for_(position_.size()) {}

bool Clock::play(const Order& order) {
  std::fill(end_.begin(), end_.end(), -1.0);
  std::fill(position_.begin(), position_.end(), 0U);
  std::fill(free_.begin(), free_.end(), 0.0);
  std::fill(waits_for_.begin(), waits_for_.end(), kNothing);
  ready_.clear();
  for (std::size_t rank = order.size(); rank-- > 0;) ready_.push_back(rank);
  while (!ready_.empty()) {
    const std::size_t rank = ready_.back();
    ready_.pop_back();
    advance(rank, order[rank]);
  }
  makespan_ = span_ = mean_end_ = mean_span_ = 0;
  for (std::size_t rank = 0; rank < order.size(); ++rank) {
    if (position_[rank] < order[rank].size()) return false;
    free_[rank] += problem_.reduce[rank];
    const double span = free_[rank] - start(order[rank].front());
    makespan_ = std::max(makespan_, free_[rank]);
    span_ = std::max(span_, span);
    mean_end_ += free_[rank] / static_cast<double>(order.size());
    mean_span_ += span / static_cast<double>(order.size());
  }
  return true;
}

void Clock::advance(std::size_t rank, const std::vector<Op>& list) {
  const auto m = at(problem_.micro_batches);
  for (; position_[rank] < list.size(); ++position_[rank]) {
    const Op op = list[position_[rank]];
    const auto slot = at(op.slot);
    const auto k = at(op.micro_batch);
    double begin = free_[rank];
    if (const std::int32_t need = problem_.need[slot]; need >= 0) {
      const std::size_t needed = at(need) * m + k;
      if (end_[needed] < 0) {
        waits_for_[rank] = needed;
        return;
      }
      begin = std::max(begin, end_[needed] + problem_.delay[slot]);
    }
    const std::size_t index = slot * m + k;
    at_[index] = position_[rank];
    start_[index] = begin;
    free_[rank] = end_[index] = begin + problem_.duration[slot];
    if (const std::int32_t fed = problem_.feeds[slot]; fed >= 0) {
      const auto other = at(problem_.rank_of_slot[at(fed)]);
      if (waits_for_[other] == index) {
        waits_for_[other] = kNothing;
        ready_.push_back(other);
      }
    }
  }
}

Schedule to_schedule(const Problem& problem, const Order& order, std::string_view name) {
  const auto kind_of = [&](Part part) {
    if (part == Part::kForward) return ActionKind::kForward;
    if (part == Part::kWeight) return ActionKind::kBackwardWeight;
    return problem.split ? ActionKind::kBackwardInput : ActionKind::kBackward;
  };
  Schedule schedule = empty_schedule(name, problem.placement, problem.micro_batches);
  for (const std::vector<Op>& list : order) {
    for (const Op& op : list) {
      append(schedule, kind_of(problem.part(op.slot)), problem.stage(op.slot), op.micro_batch);
    }
  }
  return schedule;
}

Order to_order(const Problem& problem, const Schedule& schedule) {
  Order order(schedule.ranks.size());
  for (std::size_t rank = 0; rank < order.size(); ++rank) {
    for_each_action(schedule.ranks[rank], [&](const Action& action) {
      const auto add = [&](Part part) {
        order[rank].push_back({problem.slot(part, action.stage), action.micro_batch});
      };
      if (action.kind == ActionKind::kForward) add(Part::kForward);
      if (makes_gradient(action.kind)) add(Part::kInput);
      if (problem.split && ends_backward(action.kind)) add(Part::kWeight);
    });
  }
  return order;
}

}  // namespace sluice::search
