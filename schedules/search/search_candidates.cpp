#include "schedules/search/search_candidates.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>

#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"

namespace sluice::search {
namespace {

// How long building orders from rules may take per placement, in actions; about 5 million a second.
constexpr std::int64_t kRuleEffort = 3'000'000;

double most_in_flight(const Candidate& candidate) {
  const std::vector<int>& peaks = candidate.simulation.peak_in_flight;
  return *std::max_element(peaks.begin(), peaks.end());
}

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
  text += concat(", at most ", rule.most_open, " open, W may delay by ",
                 static_cast<int>(std::lround(rule.patience * 100)), " %)");
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

std::vector<GreedySettings> greedy_grid() {
  std::vector<GreedySettings> grid;
  for (unsigned i = 0; i < 8; ++i) grid.push_back({(i & 4U) != 0, (i & 2U) != 0, (i & 1U) != 0});
  return grid;
}

std::vector<ListRule> rule_grid(const Problem& problem) {
  const int p = problem.ranks();
  std::set<int> open;
  for (int eighths = 4; eighths <= 24; eighths += 2) {
    open.insert(std::clamp((p * eighths + 4) / 8, 1, problem.micro_batches));
  }
  open.insert(problem.micro_batches);
  std::vector<ListRule> rules;
  for (const double patience : {0.5, 1.0, 0.0}) {
    for (const bool alternate : {true, false}) {
      for (const bool latest : {true, false}) {
        if (!latest && problem.stages() == p) continue;
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

std::vector<ListRule> neighbours_of(const ListRule& rule, int micro_batches) {
  std::vector<ListRule> rules;
  for (const int step : {-3, -2, -1, 1, 2, 3}) {
    ListRule other = rule;
    other.most_open += step;
    if (other.most_open >= 1 && other.most_open <= micro_batches) rules.push_back(other);
  }
  return rules;
}

template <class Setting>
struct Best {
  std::optional<Setting> setting;
  double objective = 0, memory = 0;
  Order order;
};

// Of equal objectives the one that holds less.
template <class Setting, class Build>
void try_all(const SearchSpace& space, const Problem& problem, const std::vector<Setting>& settings,
             const Build& build, Best<Setting>& best) {
  Clock clock(problem);
  for (const Setting& setting : settings) {
    Order order = build(problem, setting);
    if (!clock.play(order)) continue;
    const double objective = space.objective(clock.makespan(), clock.span());
    if (best.setting && exceeds(objective, best.objective)) continue;
    double memory = 0;
    for (const std::vector<Op>& list : order) memory = std::max(memory, peak_memory(problem, list));
    if (best.setting && !exceeds(best.objective, objective) && memory >= best.memory) continue;
    best = {setting, objective, memory, std::move(order)};
  }
}

class Collector {
 public:
  explicit Collector(const SearchSpace& space) : space_(space) {}

  std::vector<Candidate> run() {
    const bool tensors_count = space_.memory.unit == Memory::Unit::kBytes;
    for (std::size_t map = 0; map < space_.maps.size(); ++map) {
      collect_generated(map);
      collect_serial(map);
      for (const int moving : {0, 2, 6}) {
        if (moving == 0 || tensors_count) collect_built(map, moving);
      }
    }
    if (candidates_.empty()) refuse_limit();
    return std::move(candidates_);
  }

 private:
  Candidate start(std::size_t map, bool split) const {
    Candidate candidate;
    candidate.map = map;
    candidate.split = split;
    candidate.times = space_.maps[map].times;
    candidate.first_layer = space_.maps[map].first_layer;
    return candidate;
  }

  void collect_generated(std::size_t map) {
    const StageMap& place = space_.maps[map];
    const SearchRequest& request = space_.request;
    for (const std::string& name : schedule_names()) {
      if (name == "forward-only") continue;
      Schedule schedule;
      try {
        schedule = generate(name, {request.ranks, request.micro_batches, place.chunks});
      } catch (const Error&) {
        continue;  // not of this many chunks or micro-batches
      }
      if (schedule.placement != place.placement) continue;
      const bool split = std::any_of(
          schedule.ranks.front().begin(), schedule.ranks.front().end(),
          [](const Step& step) { return step.action.kind == ActionKind::kBackwardInput; });
      if (split && !request.split_backward) continue;
      Candidate candidate = start(map, split);
      candidate.origin = name;
      const Problem problem = space_.problem_of(candidate);
      candidate.order = to_order(problem, schedule);
      space_.consider(std::move(candidate), problem, candidates_);
    }
  }

  // The order that holds least; notes how much that is.
  void collect_serial(std::size_t map) {
    Candidate serial = start(map, space_.request.split_backward);
    const Problem problem = space_.problem_of(serial);
    serial.order = one_at_a_time(problem);
    serial.origin = "one micro-batch at a time";
    double most = 1;
    if (space_.memory.unit == Memory::Unit::kBytes) {
      const std::vector<std::int64_t> peaks =
          simulate(to_schedule(problem, serial.order, "auto"), serial.times, {.timeline = false})
              .peak_bytes;
      most = static_cast<double>(*std::max_element(peaks.begin(), peaks.end()));
    }
    least_limit_ = std::min(least_limit_, most);
    space_.consider(std::move(serial), problem, candidates_);
  }

  // The best of greedy insertion and the best of the list scheduler.
  void collect_built(std::size_t map, int tensors_moving) {
    Candidate candidate = start(map, space_.request.split_backward);
    candidate.tensors_moving = tensors_moving;
    const Problem problem = space_.problem_of(candidate);
    for (int rank = 0; rank < problem.ranks(); ++rank) {
      if (exceeds(least_memory(problem, rank), problem.limit[at(rank)])) return;
    }
    if (space_.maps[map].chunks == 1 && problem.split) {
      Best<GreedySettings> best;
      try_all(space_, problem, greedy_grid(), greedy_insertion, best);
      keep(candidate, problem, best);
    }
    Best<ListRule> best;
    try_all(space_, problem, rule_grid(problem), list_order, best);
    if (best.setting) {
      const std::vector<ListRule> rules = neighbours_of(*best.setting, problem.micro_batches);
      try_all(space_, problem, rules, list_order, best);
    }
    keep(candidate, problem, best);
  }

  template <class Setting>
  void keep(Candidate candidate, const Problem& problem, Best<Setting>& best) {
    if (!best.setting) return;
    candidate.order = std::move(best.order);
    candidate.origin = name_of(*best.setting);
    space_.consider(std::move(candidate), problem, candidates_);
  }

  [[noreturn]] void refuse_limit() const {
    const std::vector<double>& limit = space_.memory.limit;
    const bool bytes = space_.memory.unit == Memory::Unit::kBytes;
    const auto text = [&](double value) {
      std::string digits = std::to_string(value);
      if (bytes || value == std::floor(value)) digits.erase(digits.find('.'));
      if (bytes) return digits + " bytes";
      return digits + (value == 1 ? " micro-batch in flight" : " micro-batches in flight");
    };
    refuse("schedule search: nothing fits a limit of ",
           text(*std::min_element(limit.begin(), limit.end())),
           " per rank; the nearest legal limit is ", text(least_limit_));
  }

  const SearchSpace& space_;
  std::vector<Candidate> candidates_;
  double least_limit_ = std::numeric_limits<double>::infinity();
};

template <class T>
T of_rank(const std::vector<T>& entries, std::size_t rank) {
  return entries[entries.size() == 1 ? 0 : rank];
}

}  // namespace

SearchSpace::SearchSpace(const SearchRequest& asked)
    : request(asked), maps(stage_maps_of(asked, left_out)) {
  memory.limit.assign(at(request.ranks), std::numeric_limits<double>::infinity());
  for (std::size_t rank = 0; rank < memory.limit.size(); ++rank) {
    if (!request.byte_limit.empty()) {
      memory.limit[rank] = static_cast<double>(of_rank(request.byte_limit, rank));
    } else if (!request.in_flight_limit.empty()) {
      memory.limit[rank] = of_rank(request.in_flight_limit, rank);
    }
  }
  if (!request.byte_limit.empty()) memory.unit = Memory::Unit::kBytes;
}

Problem SearchSpace::problem_of(const Candidate& candidate) const {
  return make_problem(maps[candidate.map].placement, request.micro_batches, candidate.split,
                      candidate.times, memory, candidate.tensors_moving);
}

double SearchSpace::bound_of(Candidate candidate) const {
  Problem problem = problem_of(candidate);
  if (request.offload) {
    std::ranges::fill(problem.limit, std::numeric_limits<double>::infinity());
  }
  if (request.objective == Objective::kSpan) return span_bound(problem);
  bool recomputes = false;
  for (StageTimes& each : candidate.times.stages) {
    recomputes = recomputes || each.recompute > 0;
    each.backward_input -= each.recompute;
  }
  if (!recomputes) return makespan_bound(problem);
  // It can be ahead of what a backward waits for, so it counts as its rank's time alone.
  std::ranges::fill(problem.limit, std::numeric_limits<double>::infinity());
  Problem shorter = problem_of(candidate);
  shorter.limit = problem.limit;
  return std::max(makespan_bound(shorter), span_bound(problem));
}

Schedule SearchSpace::lowered(const Candidate& candidate, const Schedule& schedule) const {
  LowerOptions options{.tied = {}};
  for (int stage = 0; stage < schedule.placement.stages(); ++stage) {
    const auto s = candidate.times.stages.size() == 1 ? 0 : at(stage);
    options.recomputes.push_back(candidate.times.stages[s].recompute > 0);
  }
  if (request.offload) options.resident = half_resident(schedule);
  return lower(schedule, options);
}

SearchCandidate SearchSpace::described(const Candidate& candidate) const {
  const StageMap& map = maps[candidate.map];
  return {candidate.origin,
          map.name,
          map.chunks,
          candidate.simulation.makespan,
          candidate.simulation.span,
          candidate.simulation.bubble_span,
          most_in_flight(candidate) / map.chunks};
}

void SearchSpace::consider(Candidate candidate, const Problem& problem,
                           std::vector<Candidate>& candidates) const {
  const Schedule schedule = to_schedule(problem, candidate.order, "auto");
  if (check(schedule) || !is_exact(schedule)) return;
  Simulation found = simulate(lowered(candidate, schedule), candidate.times, {.timeline = false});
  for (std::size_t rank = 0; rank < memory.limit.size(); ++rank) {
    const double held =
        memory.unit == Memory::Unit::kBytes
            ? static_cast<double>(found.peak_bytes[rank])
            : static_cast<double>(found.peak_in_flight[rank]) / maps[candidate.map].chunks;
    if (exceeds(held, memory.limit[rank])) return;
  }
  candidate.simulation = std::move(found);
  candidates.push_back(std::move(candidate));
}

void SearchSpace::sort(std::vector<Candidate>& candidates) const {
  const double unit = kTolerance * std::max(objective_of(candidates.front()), 1e-300);
  const auto key = [&](const Candidate& each) {
    const int chunks = maps[each.map].chunks;
    return std::tuple(std::llround(objective_of(each) / unit),
                      std::llround(each.simulation.makespan / unit), most_in_flight(each) / chunks,
                      chunks);
  };
  std::stable_sort(candidates.begin(), candidates.end(),
                   [&](const Candidate& a, const Candidate& b) { return key(a) < key(b); });
}

std::vector<Candidate> collect_candidates(const SearchSpace& space) {
  return Collector(space).run();
}

}  // namespace sluice::search
