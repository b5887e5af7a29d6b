// Ways to an order of a problem's actions, from nothing or from another order. All keep ascending
// micro-batches per stage and part, so what they return is exact, and stay within the memory limit.
//
// Internal to schedules/search*.cpp. Requires: the limit of each rank is at least least_memory().
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "schedules/search/search_problem.hpp"

namespace sluice::search {

// The binary settings of the paper's heuristic.
struct GreedySettings {
  bool delay_first_input = false;  // one forward more ahead, though it delays the first I
  bool skip_forwards = false;      // where the next stage has work enough and nothing waits for it
  bool fill_small_gaps = false;    // W also in gaps that do not enlarge the largest idle time
};

// Greedy insertion, the automatic schedule of Qi et al. (2023, arXiv:2401.10241, section 3.1): as
// many forwards ahead of the first I as memory and its arrival allow, then one F and one I in turn;
// W where it fits into a gap, or where it does not but the gap would enlarge the largest idle time
// of all stages, or where memory is full; what is left at the end. Requires: one stage per rank, in
// order, split backward passes.
[[nodiscard]] Order greedy_insertion(const Problem& problem, const GreedySettings& settings);

// How the list scheduler below chooses among what could start.
struct ListRule {
  bool alternate = false;    // F after I and I after F; else I first
  bool latest_stage = true;  // among several stages of a rank; else the earliest micro-batch
  int most_open = std::numeric_limits<int>::max();  // micro-batches between F and I of stage 0
  double patience = 0;  // W may start where it delays what comes next by at most this part of W
};

// A list scheduler: time passes, and a rank that is free starts what its rule prefers among the F
// and I whose inputs are there; W where nothing else can start before W ends, or where memory is
// full. A forward starts only where the micro-batches under way can still all finish in the memory
// (the banker's rule, lowest micro-batch first), so it never gets stuck.
[[nodiscard]] Order list_order(const Problem& problem, const ListRule& rule);

struct Goal {
  Objective objective = Objective::kMakespan;
  double bound = 0;  // no order is better; reaching it ends the search
};

// What the goal looks at, with a small part of the mean over ranks, which shows a way where the
// largest alone is flat.
[[nodiscard]] double value_of(const Clock& clock, const Goal& goal);

// Simulated annealing over single moves: an action jumps over some of its list's others where
// dependencies and memory allow. Plays at most `plays` orders; the same request gives the same
// result on every machine. Requires: `order` runs and fits.
[[nodiscard]] Order improved(const Problem& problem, Order order, const Goal& goal,
                             std::int64_t plays);

}  // namespace sluice::search
