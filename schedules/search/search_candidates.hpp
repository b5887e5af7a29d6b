// The stage maps of a search, which are placements with the model cut into their stages; and its
// candidates: orders of the actions of one stage map, each simulated, and what compares them.
//
// Internal to schedules/search*.cpp.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <sluice/search.hpp>

#include "schedules/search/search_orders.hpp"

namespace sluice::search {

inline constexpr int kMaxLayers = 10'000;  // cutting takes their square

struct StageMap {
  std::string name;  // "linear", "looped", "V", "zigzag" (there and back, several times)
  int chunks = 1;
  Placement placement = Placement::linear(1);
  std::vector<int> first_layer;  // as SearchResult::first_layer
  SimulationTimes times;         // of its stages
};

// The maps for the request, fewest chunks first. Numbers of chunks that the layers do not
// allow leave a sentence in `left_out`. Throws Error(kUsage) where none is left.
[[nodiscard]] std::vector<StageMap> stage_maps_of(const SearchRequest& request,
                                                  std::vector<std::string>& left_out);

// F, I and W together.
[[nodiscard]] double work_of(const StageTimes& times);

// Moves each border between stages by one layer, in place, and keeps the move where is_better()
// says so; round by round while one is kept, at most `rounds`. True where any was.
bool move_borders(std::vector<int>& first, int rounds, const std::function<bool()>& is_better);

// `costs` cut into as many runs as `placement` has stages, none empty: the smallest possible
// largest run, by dynamic programming, then borders moved by one while that makes the most loaded
// rank lighter. Requires: at least as many costs as stages.
[[nodiscard]] std::vector<int> cut(const std::vector<double>& costs, const Placement& placement);

struct Candidate {
  std::size_t map = 0;  // index into SearchSpace::maps
  bool split = true;    // backward passes are
  int tensors_moving = 0;
  Order order;
  std::string origin;
  Simulation simulation;
  SimulationTimes times;
  std::vector<int> first_layer;
};

// What a search works on, from the request, which outlives this.
struct SearchSpace {
  explicit SearchSpace(const SearchRequest& request);

  const SearchRequest& request;
  std::vector<std::string> left_out;  // as SearchResult::left_out
  std::vector<StageMap> maps;
  Memory memory;

  [[nodiscard]] Problem problem_of(const Candidate& candidate) const;
  // Of a Simulation or a Clock's figures.
  [[nodiscard]] double objective(double makespan, double span) const {
    return request.objective == Objective::kSpan ? span : makespan;
  }
  [[nodiscard]] double objective_of(const Candidate& candidate) const {
    return objective(candidate.simulation.makespan, candidate.simulation.span);
  }
  // As SearchResult::lower_bound, of orders with what the candidate restricts itself to.
  [[nodiscard]] double bound_of(Candidate candidate) const;
  // As a rank runs it: with moves and RECOMPUTE.
  [[nodiscard]] Schedule lowered(const Candidate& candidate, const Schedule& schedule) const;
  [[nodiscard]] SearchCandidate described(const Candidate& candidate) const;
  // Simulates the candidate. Adds it if it runs, is exact and fits the memory.
  void consider(Candidate candidate, const Problem& problem,
                std::vector<Candidate>& candidates) const;
  // Best first: the objective, then the smaller makespan, memory, number of chunks.
  void sort(std::vector<Candidate>& candidates) const;
};

// Every generator that applies, the best of greedy insertion and the best of the list scheduler, on
// each stage map. Throws Error(kUsage), with the least limit that would do, where nothing
// fits the memory.
[[nodiscard]] std::vector<Candidate> collect_candidates(const SearchSpace& space);

}  // namespace sluice::search
