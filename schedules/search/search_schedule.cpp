#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#include <sluice/generate.hpp>
#include <sluice/plan.hpp>
#include <sluice/search.hpp>
#include <sluice/verify.hpp>

#include "schedules/model/index.hpp"
#include "schedules/search/search_orders.hpp"
#include "schedules/search/search_stage_maps.hpp"

namespace sluice {
namespace search {
namespace {

// How long building orders from rules may take per placement, in actions; about 5 million a second.
constexpr std::int64_t kRuleEffort = 3'000'000;
constexpr std::size_t kRefined = 3;  // candidates whose borders and actions are moved
constexpr int kBorderRounds = 20;

struct Candidate {
  std::size_t map = 0;
  bool split = true;
  int tensors_moving = 0;
  Order order;
  std::string origin;
  Simulation simulation;
  SimulationTimes times;
  std::vector<int> first_layer;
};

std::string on_off(bool value) { return value ? "on" : "off"; }

std::string name_of(const GreedySettings& settings) {
  return "greedy insertion (delay first I " + on_off(settings.delay_first_input) +
         ", skip forwards " + on_off(settings.skip_forwards) + ", fill small gaps " +
         on_off(settings.fill_small_gaps) + ")";
}

std::string name_of(const ListRule& rule) {
  std::string text = "list scheduler (";
  text += rule.alternate ? "F and I in turn" : "I first";
  text += rule.latest_stage ? ", latest stage" : ", earliest micro-batch";
  text += ", at most " + std::to_string(rule.most_open) + " open, W may delay by " +
          std::to_string(static_cast<int>(std::lround(rule.patience * 100))) + " %)";
  return text;
}

// F of one micro-batch through all stages, I and W back; then the next: the least any order holds.
Order one_at_a_time(const Problem& problem) {
  Order order(at(problem.ranks()));
  const auto add = [&](Part part, int stage, int k) {
    order[at(problem.placement.rank_of(stage))].push_back({problem.slot(part, stage), k});
  };
  for (int k = 0; k < problem.micro_batches; ++k) {
    for (int stage = 0; stage < problem.stages(); ++stage) add(Part::kForward, stage, k);
    for (int stage = problem.stages(); stage-- > 0;) {
      add(Part::kInput, stage, k);
      if (problem.split) add(Part::kWeight, stage, k);
    }
  }
  return order;
}

class Search {
 public:
  explicit Search(const SearchRequest& request)
      : request_(request), maps_(stage_maps_of(request, left_out_)) {
    const auto ranks = at(request.ranks);
    memory_.limit.assign(ranks, std::numeric_limits<double>::infinity());
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      if (!request.byte_limit.empty()) {
        memory_.limit[rank] = static_cast<double>(of_rank(request.byte_limit, rank));
      } else if (!request.in_flight_limit.empty()) {
        memory_.limit[rank] = of_rank(request.in_flight_limit, rank);
      }
    }
    if (!request.byte_limit.empty()) memory_.unit = Memory::Unit::kBytes;
  }

  SearchResult run() {
    for (std::size_t map = 0; map < maps_.size(); ++map) collect(map);
    if (candidates_.empty()) refuse();
    sort();
    SearchResult result;
    for (const Candidate& each : candidates_) result.candidates.push_back(described(each));
    refine();
    sort();
    for (const Candidate& each : candidates_) {
      if (accept(each, result)) return result;
    }
    throw std::invalid_argument("schedule search: verify() refuses all that was found");
  }

 private:
  template <class T>
  static T of_rank(const std::vector<T>& entries, std::size_t rank) {
    return entries[entries.size() == 1 ? 0 : rank];
  }

  Problem problem_of(const Candidate& candidate) const {
    return make_problem(maps_[candidate.map].placement, request_.micro_batches, candidate.split,
                        candidate.times, memory_, candidate.tensors_moving);
  }

  double objective_of(const Simulation& simulation) const {
    return request_.objective == Objective::kSpan ? simulation.span : simulation.makespan;
  }

  double bound_of(const Problem& problem) const {
    return request_.objective == Objective::kSpan ? span_bound(problem) : makespan_bound(problem);
  }

  int most_in_flight(const Simulation& simulation) const {
    return *std::max_element(simulation.peak_in_flight.begin(), simulation.peak_in_flight.end());
  }

  bool within_limits(const Candidate& candidate) const {
    const std::vector<int>& chunks = candidate.simulation.peak_in_flight;
    for (std::size_t rank = 0; rank < chunks.size(); ++rank) {
      const double held = memory_.unit == Memory::Unit::kBytes
                              ? static_cast<double>(candidate.simulation.peak_bytes[rank])
                              : static_cast<double>(chunks[rank]) / maps_[candidate.map].chunks;
      if (exceeds(held, memory_.limit[rank])) return false;
    }
    return true;
  }

  // Adds the candidate if it runs and fits.
  void consider(Candidate candidate, const Problem& problem) {
    const Schedule schedule = to_schedule(problem, candidate.order, "auto");
    if (check(schedule) || !is_exact(schedule)) return;
    candidate.simulation = simulate(schedule, candidate.times, {.timeline = false});
    if (within_limits(candidate)) candidates_.push_back(std::move(candidate));
  }

  Candidate start(std::size_t map, bool split) const {
    Candidate candidate;
    candidate.map = map;
    candidate.split = split;
    candidate.times = maps_[map].times;
    candidate.first_layer = maps_[map].first_layer;
    return candidate;
  }

  void collect(std::size_t map) {
    collect_generated(map);
    Candidate serial = start(map, request_.split_backward);
    const Problem problem = problem_of(serial);
    serial.order = one_at_a_time(problem);
    serial.origin = "one micro-batch at a time";
    const Simulation alone =
        simulate(to_schedule(problem, serial.order, "auto"), serial.times, {.timeline = false});
    note_least(alone);
    consider(std::move(serial), problem);
    const bool tensors_count = memory_.unit == Memory::Unit::kBytes;
    for (const int moving : {0, 2, 6}) {
      if (moving == 0 || tensors_count) collect_built(map, moving);
    }
  }

  void collect_generated(std::size_t map) {
    const StageMap& place = maps_[map];
    for (const std::string& name : schedule_names()) {
      if (name == "forward-only") continue;
      Schedule schedule;
      try {
        schedule = generate(name, {request_.ranks, request_.micro_batches, place.chunks});
      } catch (const std::invalid_argument&) {
        continue;  // not of this many chunks or micro-batches
      }
      if (schedule.placement != place.placement) continue;
      bool parted = false;
      bool paired = false;
      for (const Step& step : schedule.ranks.front()) {
        parted = parted || step.action.kind == ActionKind::kBackwardInput;
        paired = paired || step.overlapped.has_value();
      }
      if (paired || (parted && !request_.split_backward)) continue;
      Candidate candidate = start(map, parted);
      candidate.origin = name;
      const Problem problem = problem_of(candidate);
      candidate.order = to_order(problem, schedule);
      consider(std::move(candidate), problem);
    }
  }

  // The best of greedy insertion and the best of the list scheduler.
  void collect_built(std::size_t map, int tensors_moving) {
    Candidate candidate = start(map, request_.split_backward);
    candidate.tensors_moving = tensors_moving;
    const Problem problem = problem_of(candidate);
    for (int rank = 0; rank < request_.ranks; ++rank) {
      if (exceeds(least_memory(problem, rank), problem.limit[at(rank)])) {
        return;
      }
    }
    if (maps_[map].chunks == 1 && problem.split) {
      Best<GreedySettings> best;
      try_all(problem, greedy_grid(), greedy_insertion, best);
      keep(candidate, problem, best);
    }
    Best<ListRule> best;
    try_all(problem, rule_grid(problem), list_order, best);
    if (best.setting) try_all(problem, neighbours_of(*best.setting), list_order, best);
    keep(candidate, problem, best);
  }

  template <class Setting>
  struct Best {
    std::optional<Setting> setting;
    double objective = 0, memory = 0;
    Order order;
  };

  // Of equal objectives the one that holds less.
  template <class Setting, class Build>
  void try_all(const Problem& problem, const std::vector<Setting>& settings, const Build& build,
               Best<Setting>& best) const {
    Clock clock(problem);
    for (const Setting& setting : settings) {
      Order order = build(problem, setting);
      if (!clock.play(order)) continue;
      const double objective =
          request_.objective == Objective::kSpan ? clock.span() : clock.makespan();
      if (best.setting && exceeds(objective, best.objective)) continue;
      double memory = 0;
      for (const std::vector<Op>& list : order) {
        memory = std::max(memory, peak_memory(problem, list));
      }
      if (best.setting && !exceeds(best.objective, objective) && memory >= best.memory) continue;
      best = {setting, objective, memory, std::move(order)};
    }
  }

  template <class Setting>
  void keep(Candidate candidate, const Problem& problem, Best<Setting>& best) {
    if (!best.setting) return;
    candidate.order = std::move(best.order);
    candidate.origin = name_of(*best.setting);
    consider(std::move(candidate), problem);
  }

  static std::vector<GreedySettings> greedy_grid() {
    std::vector<GreedySettings> grid;
    for (const bool delay : {false, true}) {
      for (const bool skip : {false, true}) {
        for (const bool fill : {false, true}) grid.push_back({delay, skip, fill});
      }
    }
    return grid;
  }

  std::vector<ListRule> rule_grid(const Problem& problem) const {
    const int p = request_.ranks;
    std::set<int> open;
    for (int eighths = 4; eighths <= 24; eighths += 2) {
      open.insert(std::clamp((p * eighths + 4) / 8, 1, request_.micro_batches));
    }
    open.insert(request_.micro_batches);
    std::vector<ListRule> rules;
    for (const double patience : {0.5, 1.0, 0.0}) {
      for (const bool alternate : {true, false}) {
        for (const bool latest : {true, false}) {
          if (!latest && problem.stages() == problem.ranks()) continue;
          for (const int each : open) rules.push_back({alternate, latest, each, patience});
        }
      }
    }
    // Spread over the whole grid where it is too long. A rule looks at every rank for each action.
    const auto affordable = kRuleEffort * 20 / (p + 12) / static_cast<std::int64_t>(problem.ops());
    const std::size_t count = std::min(rules.size(), at(affordable));
    std::vector<ListRule> some;
    for (std::size_t i = 0; i < count; ++i) some.push_back(rules[i * rules.size() / count]);
    return some;
  }

  std::vector<ListRule> neighbours_of(const ListRule& rule) const {
    std::vector<ListRule> rules;
    for (const int step : {-3, -2, -1, 1, 2, 3}) {
      ListRule other = rule;
      other.most_open = rule.most_open + step;
      if (other.most_open >= 1 && other.most_open <= request_.micro_batches) {
        rules.push_back(other);
      }
    }
    return rules;
  }

  // Best first: the objective, of equal ones the smaller makespan, memory, number of chunks.
  void sort() {
    const double unit = kTolerance * std::max(objective_of(candidates_.front().simulation), 1e-300);
    const auto key = [&](const Candidate& each) {
      const int chunks = maps_[each.map].chunks;
      return std::tuple(std::llround(objective_of(each.simulation) / unit),
                        std::llround(each.simulation.makespan / unit),
                        static_cast<double>(most_in_flight(each.simulation)) / chunks, chunks);
    };
    std::stable_sort(candidates_.begin(), candidates_.end(),
                     [&](const Candidate& a, const Candidate& b) { return key(a) < key(b); });
  }

  // Moves borders and actions of the best candidates of different placements.
  void refine() {
    std::set<std::size_t> seen;
    std::vector<Candidate> chosen;
    const double best = objective_of(candidates_.front().simulation);
    for (const Candidate& each : candidates_) {
      if (chosen.size() == kRefined || !seen.insert(each.map).second) continue;
      // What cannot win is left as it is, unless other borders could change that.
      if (request_.whole_layers || exceeds(best, bound_of(problem_of(each)))) {
        chosen.push_back(each);
      }
    }
    for (Candidate& each : chosen) {
      move_borders(each);
      const Problem problem = problem_of(each);
      const std::int64_t plays = request_.effort / static_cast<std::int64_t>(chosen.size()) /
                                 static_cast<std::int64_t>(problem.ops());
      const Goal goal = {request_.objective, bound_of(problem)};
      Order order = improved(problem, each.order, goal, plays);
      if (order != each.order) each.origin += ", annealed";
      each.order = std::move(order);
      consider(std::move(each), problem);
    }
  }

  void move_borders(Candidate& candidate) const {
    if (!request_.whole_layers) return;
    bool moved = false;
    double value = borders_value(candidate, candidate.first_layer);
    std::vector<int> first = candidate.first_layer;
    bool better = true;
    for (int round = 0; round < kBorderRounds && better; ++round) {
      better = false;
      for (std::size_t border = 1; border + 1 < first.size(); ++border) {
        for (const int step : {-1, 1}) {
          const int there = first[border] + step;
          if (there <= first[border - 1] || there >= first[border + 1]) continue;
          first[border] = there;
          const double now = borders_value(candidate, first);
          if (now < value * (1 - kTolerance)) {
            value = now;
            better = moved = true;
          } else {
            first[border] = there - step;
          }
        }
      }
    }
    if (!moved) return;
    candidate.first_layer = first;
    candidate.times = merged(request_.model, first);
    candidate.origin += ", borders moved";
  }

  double borders_value(Candidate candidate, const std::vector<int>& first) const {
    candidate.times = merged(request_.model, first);
    const Problem problem = problem_of(candidate);
    Clock clock(problem);
    if (!fits(problem, candidate.order) || !clock.play(candidate.order)) {
      return std::numeric_limits<double>::infinity();
    }
    return value_of(clock, {request_.objective, 0});
  }

  SearchCandidate described(const Candidate& candidate) const {
    const StageMap& map = maps_[candidate.map];
    return {candidate.origin,
            map.name,
            map.chunks,
            candidate.simulation.makespan,
            candidate.simulation.span,
            candidate.simulation.bubble_span,
            static_cast<double>(most_in_flight(candidate.simulation)) / map.chunks};
  }

  // Fills the result if the candidate's plan stands up to verify().
  bool accept(const Candidate& candidate, SearchResult& result) const {
    Problem problem = problem_of(candidate);
    result.schedule = to_schedule(problem, candidate.order, "auto");
    // Sends of the transports with tags never block, at worst they go by rendezvous.
    const Verification verification = verify(make_plan(lower(result.schedule, {}), {}));
    if (!verification.progresses(TransportModel::kEager) ||
        !verification.progresses(TransportModel::kRendezvous)) {
      return false;
    }
    result.chosen = described(candidate);
    result.first_layer = candidate.first_layer;
    result.times = candidate.times;
    result.simulation = simulate(result.schedule, candidate.times);
    if (!problem.split) {
      Candidate parted = candidate;
      parted.split = request_.split_backward;
      problem = problem_of(parted);
    }
    result.lower_bound = bound_of(problem);
    const double objective = objective_of(result.simulation);
    result.ratio = result.lower_bound > 0 ? objective / result.lower_bound : 1;
    result.left_out = left_out_;
    return true;
  }

  void note_least(const Simulation& alone) {
    double most = 1;
    if (memory_.unit == Memory::Unit::kBytes) {
      most =
          static_cast<double>(*std::max_element(alone.peak_bytes.begin(), alone.peak_bytes.end()));
    }
    least_limit_ = std::min(least_limit_, most);
  }

  [[noreturn]] void refuse() const {
    const bool bytes = memory_.unit == Memory::Unit::kBytes;
    const double smallest = *std::min_element(memory_.limit.begin(), memory_.limit.end());
    const auto text = [&](double value) {
      std::string digits = std::to_string(value);
      if (bytes || value == std::floor(value)) digits.erase(digits.find('.'));
      if (bytes) return digits + " bytes";
      return digits + (value == 1 ? " micro-batch in flight" : " micro-batches in flight");
    };
    throw std::invalid_argument("schedule search: nothing fits a limit of " + text(smallest) +
                                " per rank; the nearest legal limit is " + text(least_limit_));
  }

  const SearchRequest& request_;
  std::vector<std::string> left_out_;
  std::vector<StageMap> maps_;
  Memory memory_;
  double least_limit_ = std::numeric_limits<double>::infinity();
  std::vector<Candidate> candidates_;
};

}  // namespace
}  // namespace search

SearchResult search_schedule(const SearchRequest& request) { return search::Search(request).run(); }

double makespan_lower_bound(const Placement& placement, int micro_batches,
                            const SimulationTimes& times) {
  search::Memory memory;
  memory.limit.assign(at(placement.ranks()), std::numeric_limits<double>::infinity());
  return search::makespan_bound(
      search::make_problem(placement, micro_batches, true, times, memory));
}

}  // namespace sluice
