// What simulate() makes of SimulationTimes before it starts: refusals, what a message between two
// neighbouring stages takes, and when actions start where messages go through in-order queues.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <sluice/simulate.hpp>

#include "schedules/model/index.hpp"
#include "schedules/model/pair_table.hpp"

namespace sluice {

// Of one entry for all stages alike or one per stage.
template <class T>
[[nodiscard]] const T& of_stage(const std::vector<T>& entries, int stage) {
  return entries[entries.size() == 1 ? 0 : at(stage)];
}

[[nodiscard]] inline std::int64_t gradient_bytes(const StageBytes& bytes) {
  return bytes.output_gradient < 0 ? bytes.output : bytes.output_gradient;
}

// Throws Error(kUsage) as simulate() does for costs that do not fit the schedule.
void require_costs(const SimulationTimes& times, const Schedule& schedule);

// What it takes to gather a stage's parameters.
[[nodiscard]] double gather_time(const SimulationTimes& times, int stage);

// The same times, of which those of the collectives, and of gathers per use, are a part: it has
// none, and an entry for each stage where `times` has some. Requires: require_costs() passed.
[[nodiscard]] SimulationTimes with_collectives(const SimulationTimes& times, int stages,
                                               bool forward_only);

// Seconds that the bytes occupy the link, without its latency.
[[nodiscard]] double transfer_seconds(const LinkCost& link, std::int64_t bytes);

// Of a compute action.
[[nodiscard]] double duration_of(const SimulationTimes& times, const Action& action);
// Of a pair that overlaps; nothing where its actions run one after the other.
[[nodiscard]] std::optional<double> pair_time(const SimulationTimes& times, const Action& one,
                                              const Action& two);

// numerator / denominator of a stage. Cutting into v equal pieces thus divides by v and does
// nothing else.
struct StagePiece {
  int stage = 0;
  double numerator = 1, denominator = 1;
};

// Appends the stage that the pieces of `old` make up, in order, to `times`.
void append_stage(const SimulationTimes& old, const std::vector<StagePiece>& pieces,
                  SimulationTimes& times);

// What one stage hands to a neighbour.
struct Handover {
  std::int32_t from = 0, to = 0;  // ranks
  std::int32_t link = -1;         // index of the link; -1: both stages share a rank
  std::int64_t bytes = 0;
  double seconds = 0;  // on the link
  double latency = 0;
};

struct Handovers {
  std::vector<Handover> forward;   // [stage] to the next one; the last stage has none
  std::vector<Handover> backward;  // [stage] to the one before, [0] unused
  int links = 0;
};

// Requires: require_costs() passed.
[[nodiscard]] Handovers handovers_of(const SimulationTimes& times, const Placement& placement);

// [stage, micro-batch]
struct LaneTimes {
  PairTable<double> forward, backward, weight;       // starts of F, of B or I, of W
  PairTable<double> activation_left, gradient_left;  // the end of what the stage sends

  PairTable<double>& starts_of(ActionKind kind) {
    if (kind == ActionKind::kForward) return forward;
    return kind == ActionKind::kBackwardWeight ? weight : backward;
  }
};

// When actions start where messages go through in-order queues (SimulationTimes::queues). Runs the
// plan that NCCL gets, list by list: computation and queues go on at the same time, the host waits
// for neither. So a group may start as soon as its tensors are made and its slots free, but in its
// queue's order.
//
// `schedule`: compute actions alone; their pairs run one after the other. Throws
// Error(kUsage) where the schedule cannot run.
[[nodiscard]] LaneTimes lane_times(const Schedule& schedule, const SimulationTimes& times);

}  // namespace sluice
