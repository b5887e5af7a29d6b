// Event-driven simulation of a lowered schedule: when would each action start and end?
//
// Compute actions of a rank run one after another in list order; sends never block, a message
// arrives `message` after the action that produced it ended, and receives are posted ahead, so a
// compute action starts when its rank is free and its inputs are there. An overlapped pair starts
// when the inputs of both are there and hands over at its end; with a time of its own both actions
// fill that time, else they run one after the other. Time unit is the caller's.
#pragma once

#include <vector>

#include "schedules/schedule.hpp"

namespace sluice {

struct StageTimes {
  double forward = 1;
  double backward_input = 1;  // B takes backward_input + backward_weight
  double backward_weight = 1;
};

struct SimulationTimes {
  std::vector<StageTimes> stages;  // one entry for all stages alike, or one per stage
  double message = 0;              // latency of a message between two ranks
  double overlap = -1;             // of an overlapped pair as a whole; negative: the sum of its two
};

struct SimulatedAction {
  Action action;
  double start = 0, end = 0;
};

struct Simulation {
  double makespan = 0;              // last end over all ranks; the step ends with a barrier
  double span = 0;                  // longest own span: first start to last end of one rank
  std::vector<double> busy;         // [rank]
  double bubble_makespan = 0;       // mean over ranks of (makespan - busy) / makespan
  double bubble_span = 0;           // (span - busy) / span on the rank with the longest span
  std::vector<int> peak_in_flight;  // [rank], chunks
  std::vector<std::vector<SimulatedAction>> timeline;  // [rank] compute actions, in order
  std::int64_t messages = 0;
};

// `lowered` may come from lower() or be compute-only (messages are then implied).
// Requires: check() found nothing. Throws std::invalid_argument for negative or missing times.
[[nodiscard]] Simulation simulate(const Schedule& lowered, const SimulationTimes& times);

}  // namespace sluice
