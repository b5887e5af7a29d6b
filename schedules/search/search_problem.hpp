// What search_schedule() works on: one placement with its costs, orders of its actions, and how
// long an order takes and what it holds. Times are those of simulate(): a rank's actions run one
// after another, sends never block, receives are posted ahead.
//
// Internal to schedules/search*.cpp. Everything here is deterministic; floating-point comparisons
// of times and memory allow for `kTolerance`, relative to the larger side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include <sluice/schedule.hpp>
#include <sluice/search.hpp>

#include "schedules/model/index.hpp"

namespace sluice::search {

inline constexpr double kTolerance = 1e-9;

[[nodiscard]] inline bool exceeds(double value, double bound) {
  return value > bound + kTolerance * (bound < 0 ? -bound : bound);
}

enum class Part : std::int8_t { kForward, kInput, kWeight };

// An action as a slot, part * stages + stage, and its micro-batch.
struct Op {
  std::int32_t slot = 0, micro_batch = 0;
  friend bool operator==(const Op&, const Op&) = default;
};

using Order = std::vector<std::vector<Op>>;  // [rank], in list order

struct Problem {
  Placement placement = Placement::linear(1);
  int micro_batches = 1;
  // Backward passes are split. Otherwise an input part stands for a whole B: it takes the time of
  // both and releases everything, and there are no weight parts.
  bool split = true;

  std::vector<double> duration;     // [slot]
  std::vector<double> delay;        // [slot] from the end of what is waited for to its arrival
  std::vector<std::int32_t> need;   // [slot] the slot waited for, of the same micro-batch; -1: none
  std::vector<std::int32_t> feeds;  // [slot] the slot that waits for it on another list; -1: none
  std::vector<int> rank_of_slot;    // [slot]
  std::vector<double> held;         // [stage] of one micro-batch, from the start of F
  std::vector<double> released_by_input;  // [stage] of it, at the end of I
  std::vector<double> limit;              // [rank]
  std::vector<double> reduce;             // [rank] after its last action

  [[nodiscard]] int stages() const { return placement.stages(); }
  [[nodiscard]] int ranks() const { return placement.ranks(); }
  [[nodiscard]] std::int32_t slot(Part part, int stage) const {
    return static_cast<std::int32_t>(part) * stages() + stage;
  }
  [[nodiscard]] Part part(std::int32_t slot_of) const {
    return static_cast<Part>(slot_of / stages());
  }
  [[nodiscard]] int stage(std::int32_t slot_of) const { return slot_of % stages(); }
  [[nodiscard]] std::size_t index(Op op) const {
    return at(op.slot) * at(micro_batches) + at(op.micro_batch);
  }
  [[nodiscard]] std::size_t ops() const { return duration.size() * at(micro_batches); }
  // By how much the op changes what its rank holds: at its start for F, else at its end.
  [[nodiscard]] double change(std::int32_t slot_of) const {
    const auto s = at(stage(slot_of));
    switch (part(slot_of)) {
      case Part::kForward:
        return held[s];
      case Part::kInput:
        return split ? -released_by_input[s] : -held[s];
      default:
        return released_by_input[s] - held[s];
    }
  }
};

// What a rank may hold, and of what.
struct Memory {
  enum class Unit : std::uint8_t { kBytes, kMicroBatches };
  Unit unit = Unit::kMicroBatches;
  std::vector<double> limit;  // [rank]
};

// Bytes: activations; what a rank holds all the time counts against its limit, and so do
// `tensors_moving` outputs and as many gradients of its largest stage. Throws Error(kUsage)
// as simulate() does.
[[nodiscard]] Problem make_problem(const Placement& placement, int micro_batches, bool split,
                                   const SimulationTimes& times, const Memory& memory,
                                   int tensors_moving = 0);

// What one rank needs to run anything: a micro-batch on each of its stages.
[[nodiscard]] double least_memory(const Problem& problem, int rank);

// The most each rank's list holds at a time.
[[nodiscard]] double peak_memory(const Problem& problem, const std::vector<Op>& list);
[[nodiscard]] bool fits(const Problem& problem, const Order& order);

// Plays orders of one problem; keeps its buffers between calls.
class Clock {
 public:
  explicit Clock(const Problem& problem);

  // False where the order cannot run to its end.
  bool play(const Order& order);

  [[nodiscard]] double makespan() const { return makespan_; }
  [[nodiscard]] double span() const { return span_; }
  [[nodiscard]] double mean_end() const { return mean_end_; }
  [[nodiscard]] double mean_span() const { return mean_span_; }
  [[nodiscard]] double end(Op op) const { return end_[problem_.index(op)]; }
  [[nodiscard]] double start(Op op) const { return start_[problem_.index(op)]; }
  [[nodiscard]] std::size_t position(Op op) const { return at_[problem_.index(op)]; }
  [[nodiscard]] double end_of_rank(std::size_t rank) const { return free_[rank]; }

 private:
  void advance(std::size_t rank, const std::vector<Op>& list);

  const Problem& problem_;
  std::vector<double> start_, end_;     // [index], end negative: not played
  std::vector<std::size_t> at_;         // [index] position in its list
  std::vector<std::size_t> position_;   // [rank]
  std::vector<double> free_;            // [rank]
  std::vector<std::size_t> waits_for_;  // [rank] index, or npos
  std::vector<std::size_t> ready_;
  double makespan_ = 0, span_ = 0, mean_end_ = 0, mean_span_ = 0;
};

[[nodiscard]] Schedule to_schedule(const Problem& problem, const Order& order,
                                   std::string_view name);
// B becomes I and W, pairs come apart. Requires: a forward and a backward everywhere.
[[nodiscard]] Order to_order(const Problem& problem, const Schedule& schedule);

// As SearchResult::lower_bound. Linear in the stages times micro-batches.
[[nodiscard]] double makespan_bound(const Problem& problem);
// The same for the longest own span of a rank.
[[nodiscard]] double span_bound(const Problem& problem);

}  // namespace sluice::search
