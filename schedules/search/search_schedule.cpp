#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include <sluice/plan.hpp>
#include <sluice/search.hpp>

#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"
#include "schedules/search/search_candidates.hpp"

namespace sluice {
namespace search {
namespace {

constexpr std::size_t kRefined = 3;  // candidates whose borders and actions are moved
constexpr int kBorderRounds = 20;

// What the candidate's order is worth where its stages begin at the layers `first`.
double borders_value(const SearchSpace& space, Candidate candidate, const std::vector<int>& first) {
  candidate.times = join_layers(space.request.model, first);
  const Problem problem = space.problem_of(candidate);
  Clock clock(problem);
  if (!fits(problem, candidate.order) || !clock.play(candidate.order)) {
    return std::numeric_limits<double>::infinity();
  }
  return value_of(clock, {space.request.objective, 0});
}

void improve_borders(const SearchSpace& space, Candidate& candidate) {
  std::vector<int> first = candidate.first_layer;
  double value = borders_value(space, candidate, first);
  const bool moved = move_borders(first, kBorderRounds, [&] {
    const double now = borders_value(space, candidate, first);
    if (!(now < value * (1 - kTolerance))) return false;
    value = now;
    return true;
  });
  if (!moved) return;
  candidate.first_layer = first;
  candidate.times = join_layers(space.request.model, first);
  candidate.origin += ", borders moved";
}

// Moves borders and actions of the best candidates of different placements. Adds the results.
void refine(const SearchSpace& space, std::vector<Candidate>& candidates) {
  std::set<std::size_t> seen;
  std::vector<Candidate> chosen;
  const double best = space.objective_of(candidates.front());
  for (const Candidate& each : candidates) {
    if (chosen.size() == kRefined || !seen.insert(each.map).second) continue;
    // A candidate that cannot win stays as it is, unless other borders could change that.
    if (!space.request.whole_layers && !exceeds(best, space.bound_of(each))) continue;
    if (fits(space.problem_of(each), each.order)) chosen.push_back(each);  // with all that it keeps
  }
  for (Candidate& each : chosen) {
    if (space.request.whole_layers) improve_borders(space, each);
    const Problem problem = space.problem_of(each);
    const std::int64_t plays = space.request.effort / static_cast<std::int64_t>(chosen.size()) /
                               static_cast<std::int64_t>(problem.ops());
    const Goal goal = {space.request.objective, space.bound_of(each)};
    Order order = improved(problem, each.order, goal, plays);
    if (order != each.order) each.origin += ", annealed";
    each.order = std::move(order);
    space.consider(std::move(each), problem, candidates);
  }
}

// Fills the result. False where verify() does not accept the candidate's plan.
bool accept(const SearchSpace& space, const Candidate& candidate, SearchResult& result) {
  const Problem problem = space.problem_of(candidate);
  result.schedule = to_schedule(problem, candidate.order, "auto");
  // Sends of the transports with tags never block, at worst they go by rendezvous.
  const Schedule lowered = space.lowered(candidate, result.schedule);
  const Verification verification = verify(make_plan(lowered, {}));
  if (!verification.progresses(TransportModel::kEager) ||
      !verification.progresses(TransportModel::kRendezvous)) {
    return false;
  }
  result.chosen = space.described(candidate);
  result.first_layer = candidate.first_layer;
  result.times = candidate.times;
  result.simulation = simulate(lowered, candidate.times);
  // Of all orders of the same stages, whatever this candidate restricts itself to.
  Candidate any = candidate;
  any.split = space.request.split_backward;
  any.tensors_moving = 0;
  result.lower_bound = space.bound_of(any);
  const double objective = space.objective(result.simulation.makespan, result.simulation.span);
  result.ratio = result.lower_bound > 0 ? objective / result.lower_bound : 1;
  result.left_out = space.left_out;
  return true;
}

}  // namespace
}  // namespace search

SearchResult search_schedule(const SearchRequest& request) {
  const search::SearchSpace space(request);
  std::vector<search::Candidate> candidates = search::collect_candidates(space);
  space.sort(candidates);
  SearchResult result;
  for (const search::Candidate& each : candidates) {
    result.candidates.push_back(space.described(each));
  }
  search::refine(space, candidates);
  space.sort(candidates);
  for (const search::Candidate& each : candidates) {
    if (search::accept(space, each, result)) return result;
  }
  refuse("schedule search: verify() refuses all that was found");
}

}  // namespace sluice
