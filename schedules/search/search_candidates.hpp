// The candidates of a search: orders of the actions of one stage map, each simulated, and what
// compares them.
//
// Internal to schedules/search*.cpp.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <sluice/search.hpp>

#include "schedules/search/search_bound.hpp"
#include "schedules/search/search_orders.hpp"
#include "schedules/search/search_stage_maps.hpp"

namespace sluice::search {

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
  [[nodiscard]] double bound_of(const Problem& problem) const {
    return request.objective == Objective::kSpan ? span_bound(problem) : makespan_bound(problem);
  }
  [[nodiscard]] SearchCandidate described(const Candidate& candidate) const;
  // Simulates the candidate. Adds it if it runs, is exact and fits the memory.
  void consider(Candidate candidate, const Problem& problem,
                std::vector<Candidate>& candidates) const;
  // Best first: the objective, then the smaller makespan, memory, number of chunks.
  void sort(std::vector<Candidate>& candidates) const;
};

// Every generator that applies, the best of greedy insertion and the best of the list scheduler, on
// each stage map. Throws std::invalid_argument, with the least limit that would do, where nothing
// fits the memory.
[[nodiscard]] std::vector<Candidate> collect_candidates(const SearchSpace& space);

}  // namespace sluice::search
