// When actions start where messages go through in-order queues (SimulationTimes::queues). Runs the
// plan that NCCL gets, list by list: computation and queues go on at the same time, the host waits
// for neither. So a group may start as soon as its tensors are made and its slots free, but in its
// queue's order.
#pragma once

#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

#include "schedules/model/pair_table.hpp"

namespace sluice {

// [stage, micro-batch]
struct LaneTimes {
  PairTable<double> forward, backward, weight;       // starts of F, of B or I, of W
  PairTable<double> activation_left, gradient_left;  // the end of what the stage sends
};

// `schedule`: compute actions alone; their pairs run one after the other. Throws
// std::invalid_argument where the schedule cannot run.
[[nodiscard]] LaneTimes lane_times(const Schedule& schedule, const SimulationTimes& times);

}  // namespace sluice
