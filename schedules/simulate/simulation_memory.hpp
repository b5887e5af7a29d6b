// The bytes each rank holds over time, from the actions and messages of a simulation in any order.
#pragma once

#include <cstdint>
#include <vector>

#include <sluice/simulate.hpp>

#include "schedules/simulate/simulation_costs.hpp"

namespace sluice {

class MemoryRecorder {
 public:
  // Both outlive this.
  MemoryRecorder(const Schedule& schedule, const SimulationTimes& times);

  // What the action itself takes and releases on its rank.
  void compute(int rank, const Action& action, double start, double end);
  // The tensor that the action from `start` on produces and whose bytes leave from `leaves` to
  // `left`; on a shared rank, which keeps it until received(), nothing leaves.
  void produced(const Handover& handover, double start, double leaves, double left);
  // The action that uses it ran from `start` to `end`.
  void received(const Handover& handover, double start, double end);

  // Sets peak_bytes, and `memory` where asked for. Sorts what came out of order.
  void finish(Simulation& result, bool curves);

 private:
  struct Change {
    double time = 0;
    std::int64_t bytes = 0;
    // Of changes at one time, releases go before what is taken, unless they end a holding that
    // takes no time at all.
    std::uint8_t turn = 0;
  };

  void take(int rank, double time, std::int64_t bytes);
  // `held`: since before `time`.
  void release(int rank, double time, std::int64_t bytes, bool held);

  const Schedule& schedule_;
  const SimulationTimes& times_;
  std::vector<std::vector<Change>> changes_;  // [rank]
};

}  // namespace sluice
