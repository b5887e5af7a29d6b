#include "schedules/simulate.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "schedules/dataflow.hpp"

namespace sluice {
namespace {

void require_time(const std::string& what, double time) {
  if (!std::isfinite(time) || time < 0) {
    throw std::invalid_argument("simulation: the " + what + " is " + std::to_string(time) +
                                "; legal is a finite time of 0 or more");
  }
}

void require_times(const SimulationTimes& times, int stages) {
  const std::size_t count = times.stages.size();
  if (count != 1 && count != static_cast<std::size_t>(stages)) {
    throw std::invalid_argument("simulation: times for " + std::to_string(count) +
                                " stages; legal is 1 for all alike or one for each of " +
                                std::to_string(stages) + " stages");
  }
  for (std::size_t i = 0; i < count; ++i) {
    const std::string stage = " time of stage " + std::to_string(i);
    require_time("forward" + stage, times.stages[i].forward);
    require_time("backward-input" + stage, times.stages[i].backward_input);
    require_time("backward-weight" + stage, times.stages[i].backward_weight);
  }
  require_time("message time", times.message);
  if (!(times.overlap < 0)) require_time("overlap time", times.overlap);
}

class Simulator {
 public:
  Simulator(const Schedule& schedule, const SimulationTimes& times)
      : schedule_(schedule),
        placement_(schedule.placement),
        times_(times),
        forward_end_(static_cast<std::size_t>(placement_.stages()) *
                     static_cast<std::size_t>(schedule.micro_batches)),
        gradient_end_(schedule.forward_only ? 0 : forward_end_.size()),
        rank_free_(schedule.ranks.size()) {}

  Simulation run() {
    result_.busy.resize(schedule_.ranks.size());
    result_.timeline.resize(schedule_.ranks.size());
    for (std::size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
      result_.timeline[rank].reserve(computes(schedule_.ranks[rank]));
    }
    Dataflow dataflow(schedule_);
    const bool finished = dataflow.run(
        [this](int rank, int, const Step& step) { visit(static_cast<std::size_t>(rank), step); });
    if (!finished) {
      throw std::invalid_argument("simulation of '" + schedule_.name +
                                  "': the schedule cannot run to its end; check() says why");
    }
    summarise();
    return std::move(result_);
  }

 private:
  static std::size_t computes(const std::vector<Step>& steps) {
    std::size_t count = 0;
    for (const Step& step : steps) {
      count += is_compute(step.action.kind) ? (step.overlapped ? 2U : 1U) : 0U;
    }
    return count;
  }

  std::size_t index(int stage, int micro_batch) const {
    return static_cast<std::size_t>(stage) * static_cast<std::size_t>(schedule_.micro_batches) +
           static_cast<std::size_t>(micro_batch);
  }

  double duration(const Action& action) const {
    const StageTimes& stage =
        times_.stages[times_.stages.size() == 1 ? 0 : static_cast<std::size_t>(action.stage)];
    switch (action.kind) {
      case ActionKind::kForward:
        return stage.forward;
      case ActionKind::kBackwardInput:
        return stage.backward_input;
      case ActionKind::kBackwardWeight:
        return stage.backward_weight;
      default:
        return stage.backward_input + stage.backward_weight;
    }
  }

  // When the tensor that `action` takes from a neighbouring stage is there.
  double arrival(const Action& action) {
    if (action.kind == ActionKind::kBackwardWeight) return 0;
    const bool forward = action.kind == ActionKind::kForward;
    const int neighbour = forward ? action.stage - 1 : action.stage + 1;
    if (neighbour < 0 || neighbour >= placement_.stages()) return 0;
    const double end =
        (forward ? forward_end_ : gradient_end_)[index(neighbour, action.micro_batch)];
    if (placement_.rank_of(neighbour) == placement_.rank_of(action.stage)) return end;
    ++result_.messages;
    return end + times_.message;
  }

  void finish(const Action& action, double end) {
    if (action.kind == ActionKind::kBackwardWeight) return;
    auto& ends = action.kind == ActionKind::kForward ? forward_end_ : gradient_end_;
    ends[index(action.stage, action.micro_batch)] = end;
  }

  void visit(std::size_t rank, const Step& step) {
    if (!is_compute(step.action.kind)) return;
    double start = std::max(rank_free_[rank], arrival(step.action));
    if (step.overlapped) start = std::max(start, arrival(*step.overlapped));
    const double end = step.overlapped ? place_pair(rank, step, start)
                                       : place(rank, step.action, start, duration(step.action));
    if (step.overlapped) finish(*step.overlapped, end);
    finish(step.action, end);
    rank_free_[rank] = end;
  }

  double place_pair(std::size_t rank, const Step& step, double start) {
    if (times_.overlap < 0) {
      const double middle = place(rank, step.action, start, duration(step.action));
      return place(rank, *step.overlapped, middle, duration(*step.overlapped));
    }
    // Both fill the pair's time, which counts as busy once.
    place(rank, step.action, start, times_.overlap);
    result_.busy[rank] -= times_.overlap;
    return place(rank, *step.overlapped, start, times_.overlap);
  }

  double place(std::size_t rank, const Action& action, double start, double time) {
    result_.timeline[rank].push_back(SimulatedAction{action, start, start + time});
    result_.busy[rank] += time;
    return start + time;
  }

  void summarise() {
    result_.peak_in_flight = peak_in_flight(schedule_);
    result_.makespan = *std::max_element(rank_free_.begin(), rank_free_.end());
    double idle = 0;
    for (std::size_t rank = 0; rank < rank_free_.size(); ++rank) {
      idle += result_.makespan - result_.busy[rank];
      const auto& row = result_.timeline[rank];
      if (row.empty()) continue;
      const double span = row.back().end - row.front().start;
      if (span > result_.span) {
        result_.span = span;
        result_.bubble_span = (span - result_.busy[rank]) / span;
      }
    }
    if (result_.makespan > 0) {
      result_.bubble_makespan = idle / (result_.makespan * static_cast<double>(rank_free_.size()));
    }
  }

  const Schedule& schedule_;
  const Placement& placement_;
  const SimulationTimes& times_;
  std::vector<double> forward_end_;   // [stage * micro_batches + micro_batch]
  std::vector<double> gradient_end_;  // the same, of B or I
  std::vector<double> rank_free_;     // [rank]
  Simulation result_;
};

}  // namespace

Simulation simulate(const Schedule& lowered, const SimulationTimes& times) {
  require_times(times, lowered.placement.stages());
  if (lowered.ranks.size() != static_cast<std::size_t>(lowered.placement.ranks())) {
    throw std::invalid_argument("simulation of '" + lowered.name +
                                "': " + std::to_string(lowered.ranks.size()) + " lists for " +
                                std::to_string(lowered.placement.ranks()) + " ranks");
  }
  return Simulator(lowered, times).run();
}

}  // namespace sluice
