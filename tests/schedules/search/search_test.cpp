// search_schedule(): what it finds, within which memory, and that the bound it compares itself with
// is one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>
#include <sluice/search.hpp>

#include "schedules/search/search_problem.hpp"

namespace sluice {
namespace {

using ::testing::HasSubstr;

SearchRequest request_of(int ranks, int micro_batches, const StageTimes& times, double message) {
  SearchRequest request;
  request.ranks = ranks;
  request.micro_batches = micro_batches;
  request.model.stages = {times};
  request.model.message = message;
  request.effort = 100'000;
  return request;
}

// Measured by the zero-bubble paper's authors.
SearchRequest published(Objective objective) {
  SearchRequest request = request_of(8, 32, {18.513, 18.086, 9.331, 0}, 0.626);
  request.objective = objective;
  return request;
}

double bound_of(const Placement& placement, int micro_batches, const SimulationTimes& times,
                double in_flight_limit = std::numeric_limits<double>::infinity()) {
  const std::vector<double> limits(static_cast<std::size_t>(placement.ranks()), in_flight_limit);
  return search::makespan_bound(
      search::make_problem(placement, micro_batches, true, times, {.limit = limits}));
}

void expect_sound(const SearchRequest& request, const SearchResult& result) {
  EXPECT_EQ(result.schedule.name, "auto");
  EXPECT_EQ(result.schedule.placement.ranks(), request.ranks);
  EXPECT_EQ(result.schedule.micro_batches, request.micro_batches);
  const auto violation = check(result.schedule);
  EXPECT_FALSE(violation) << violation->message;
  EXPECT_TRUE(is_exact(result.schedule));
  EXPECT_TRUE(verify(make_plan(lower(result.schedule, {}), {})).ok());
  const Simulation simulation = simulate(result.schedule, result.times);
  EXPECT_EQ(simulation.makespan, result.simulation.makespan);
  const double objective =
      request.objective == Objective::kSpan ? simulation.span : simulation.makespan;
  EXPECT_LE(result.lower_bound, objective * (1 + 1e-9));
  EXPECT_DOUBLE_EQ(result.ratio, objective / result.lower_bound);
  EXPECT_LE(objective,
            (request.objective == Objective::kSpan ? result.candidates.front().span
                                                   : result.candidates.front().makespan) *
                (1 + 1e-9));
}

double most_in_flight(const SearchResult& result) {
  const std::vector<int> peaks = peak_in_flight(result.schedule);
  return static_cast<double>(*std::max_element(peaks.begin(), peaks.end())) / result.chosen.chunks;
}

TEST(SearchTest, LeavesNoBubbleInTwiceTheMemoryOfOneFOneB) {
  SearchRequest request = published(Objective::kSpan);
  request.in_flight_limit = {16};
  const SearchResult result = search_schedule(request);
  expect_sound(request, result);
  EXPECT_LE(result.simulation.bubble_span, 0.005);
  EXPECT_LE(most_in_flight(result), 16);
}

// One chunk per rank; half of an activation is released by I, as in the paper's memory model.
TEST(SearchTest, BeatsThePublishedHeuristicWithOneChunk) {
  SearchRequest request = published(Objective::kSpan);
  StageBytes bytes;
  bytes.until_input = bytes.until_weight = 1;
  request.model.bytes = {bytes};
  request.byte_limit = {32};
  request.chunks = {1};
  request.effort = 20'000'000;
  const SearchResult result = search_schedule(request);
  expect_sound(request, result);
  EXPECT_LE(result.simulation.bubble_span, 0.0039);
  for (const std::int64_t each : result.simulation.peak_bytes) EXPECT_LE(each, 32);
}

// Whoever keeps whole activations until W cannot do that with one chunk: all I of rank 7 but the
// last 16 have their W before the last one, so rank 0 ends no earlier than after 7 forwards, 32 F
// and I and 16 W of rank 7, then 7 I on the way back and I and W of its own.
TEST(SearchTest, FindsTheBestThatWholeActivationsAllowWithOneChunk) {
  SearchRequest request = published(Objective::kSpan);
  request.in_flight_limit = {16};
  request.chunks = {1};
  const SearchResult result = search_schedule(request);
  const double span =
      7 * (18.513 + 0.626) + 32 * (18.513 + 18.086) + 16 * 9.331 + 7 * (18.086 + 0.626) + 9.331;
  EXPECT_GE(result.simulation.span, span - 1e-9);
  EXPECT_LE(result.simulation.span, span + 1e-6);
}

TEST(SearchTest, RanksByTheBarrierUnlessAskedForTheSpan) {
  SearchRequest request = request_of(4, 12, {1, 1, 1, 0}, 0);
  request.chunks = {1};
  EXPECT_EQ(search_schedule(request).simulation.makespan, 3 * 12 + 3);
  request.objective = Objective::kSpan;
  EXPECT_EQ(search_schedule(request).simulation.span, 3 * 12);
}

TEST(SearchTest, IsNoWorseThanAnyGeneratorThatFitsTheSameMemory) {
  for (const int limit : {2, 3, 4, 8}) {
    SearchRequest request = request_of(4, 9, {1.3, 1, 0.7, 0}, 0.1);
    request.in_flight_limit = {static_cast<double>(limit)};
    const SearchResult result = search_schedule(request);
    expect_sound(request, result);
    EXPECT_LE(most_in_flight(result), limit);
    for (const std::string& name : schedule_names()) {
      for (const int chunks : {1, 2}) {
        if (name == "forward-only" || name == "dualpipe-v") continue;
        try {
          const Schedule schedule = generate(name, {4, 9, chunks});
          const int stages = schedule.placement.stages();
          const Simulation simulation = simulate(schedule, recut(request.model, 4, stages));
          const int most =
              *std::max_element(simulation.peak_in_flight.begin(), simulation.peak_in_flight.end());
          if (!is_exact(schedule) || most * 4 > limit * stages) continue;
          EXPECT_LE(result.simulation.makespan, simulation.makespan * (1 + 1e-9))
              << name << ' ' << chunks << ' ' << limit;
        } catch (const Error&) {
          continue;
        }
      }
    }
  }
}

TEST(SearchTest, AnyShapeAndAnyMemoryOfOneMicroBatchWork) {
  for (const int ranks : {1, 2, 3, 5}) {
    for (const int m : {1, 2, 3, 8}) {
      for (const double limit : {0.0, 1.0, 1.5, 2.0}) {
        SCOPED_TRACE(std::to_string(ranks) + " " + std::to_string(m) + " " + std::to_string(limit));
        SearchRequest request = request_of(ranks, m, {1, 1.2, 0.5, 0}, 0.3);
        for (int i = 1; i < ranks; ++i) request.model.stages.push_back({1.0 * i, 1, 0.4 * i, 0});
        request.chunks = {1, 2};
        request.effort = 20'000;
        if (limit > 0) request.in_flight_limit = {limit};
        const SearchResult result = search_schedule(request);
        expect_sound(request, result);
        if (limit > 0) {
          EXPECT_LE(most_in_flight(result), limit);
        }
      }
    }
  }
}

TEST(SearchTest, KeepsBytesOfMessagesAndResidentsWithinTheLimit) {
  SearchRequest request = request_of(4, 8, {1, 1, 1, 0}, 0.1);
  StageBytes bytes;
  bytes.until_input = 300;
  bytes.until_weight = 500;
  bytes.output = 90;
  bytes.resident = 1000;
  request.model.bytes = {bytes};
  request.model.bandwidth = 500;
  for (const int limit : {2200, 2800, 4000, 9000}) {
    request.byte_limit = {limit};
    const SearchResult result = search_schedule(request);
    expect_sound(request, result);
    for (const std::int64_t each : simulate(result.schedule, result.times).peak_bytes) {
      EXPECT_LE(each, limit);
    }
  }
}

TEST(SearchTest, RefusesTooLittleMemoryWithTheLimitThatWouldDo) {
  SearchRequest request = request_of(4, 8, {1, 1, 1, 0}, 0);
  request.in_flight_limit = {0.5};
  try {
    (void)search_schedule(request);
    FAIL() << "half a micro-batch was accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("nearest legal limit is 1 micro-batch"));
  }
  request.in_flight_limit.clear();
  StageBytes bytes;
  bytes.until_weight = 800;
  bytes.output = 100;
  request.model.bytes = {bytes};
  request.byte_limit = {700};
  std::string message;
  try {
    (void)search_schedule(request);
  } catch (const Error& error) {
    message = error.what();
  }
  ASSERT_THAT(message, HasSubstr("nearest legal limit is "));
  request.byte_limit = {std::stoll(message.substr(message.rfind("is ") + 3))};
  expect_sound(request, search_schedule(request));
}

TEST(SearchTest, CutsWholeLayersSoThatTheBottleneckIsLight) {
  SearchRequest request = request_of(3, 12, {1, 1, 1, 0}, 0.1);
  request.whole_layers = true;
  request.model.stages = {{4, 4, 4, 0}, {1, 1, 1, 0}, {1, 1, 1, 0}, {1, 1, 1, 0},
                          {1, 1, 1, 0}, {2, 2, 2, 0}, {2, 2, 2, 0}};
  const SearchResult result = search_schedule(request);
  expect_sound(request, result);
  ASSERT_EQ(result.first_layer.size(), result.times.stages.size() + 1);
  EXPECT_EQ(result.first_layer.front(), 0);
  EXPECT_EQ(result.first_layer.back(), 7);
  std::vector<double> load(3);
  for (std::size_t s = 0; s < result.times.stages.size(); ++s) {
    load[static_cast<std::size_t>(result.schedule.placement.rank_of(static_cast<int>(s)))] +=
        result.times.stages[s].forward;
  }
  EXPECT_EQ(*std::max_element(load.begin(), load.end()), 4);
}

// Three layers per rank are three chunks, which no power of two is.
TEST(SearchTest, TriesTheChunksThatDivideTheLayersOfARank) {
  SearchRequest request = request_of(4, 8, {1, 1, 1, 0}, 0.02);
  request.model.stages.assign(12, {1, 1, 1, 0});
  request.whole_layers = true;
  request.in_flight_limit = {4};
  const SearchResult unasked = search_schedule(request);
  expect_sound(request, unasked);
  EXPECT_LE(unasked.simulation.makespan, 75.40 * 1.0001);
  request.chunks = {2, 4};
  EXPECT_LT(unasked.simulation.makespan, search_schedule(request).simulation.makespan);
}

TEST(SearchTest, LeavesTheBackwardWholeWhereStagesCannotPartIt) {
  SearchRequest request = request_of(4, 8, {1, 1, 1, 0}, 0);
  request.split_backward = false;
  const SearchResult result = search_schedule(request);
  expect_sound(request, result);
  for (const std::vector<Step>& steps : result.schedule.ranks) {
    for (const Step& step : steps) {
      EXPECT_TRUE(step.action.kind == ActionKind::kForward ||
                  step.action.kind == ActionKind::kBackward);
    }
  }
}

TEST(SearchTest, RepeatsItself) {
  SearchRequest request = request_of(4, 7, {1.1, 0.9, 0.6, 0}, 0.2);
  request.in_flight_limit = {3};
  const SearchResult first = search_schedule(request);
  const SearchResult second = search_schedule(request);
  EXPECT_EQ(first.schedule.ranks, second.schedule.ranks);
  EXPECT_EQ(first.chosen.origin, second.chosen.origin);
}

TEST(SearchTest, RefusesIllegalRequests) {
  const auto message_of = [](const SearchRequest& request) -> std::string {
    try {
      (void)search_schedule(request);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const SearchRequest legal = request_of(2, 4, {1, 1, 1, 0}, 0);
  SearchRequest request = legal;
  request.ranks = 0;
  EXPECT_THAT(message_of(request), HasSubstr("ranks is 0; the nearest legal value is 1"));
  request = legal;
  request.model.stages.resize(3);
  EXPECT_THAT(message_of(request), HasSubstr("legal is 1 or 2"));
  request = legal;
  request.whole_layers = true;
  EXPECT_THAT(message_of(request), HasSubstr("at most 1 ranks"));
  request = legal;
  request.byte_limit = {100};
  EXPECT_THAT(message_of(request), HasSubstr("needs bytes"));
  request = legal;
  request.in_flight_limit = {4, 4, 4};
  EXPECT_THAT(message_of(request), HasSubstr("legal is 1 for all ranks or one for each of 2"));
  request = legal;
  request.model.message = -1;
  EXPECT_THAT(message_of(request), HasSubstr("message time"));
}

TEST(MakespanBoundTest, IsNeverAboveAScheduleThatRuns) {
  for (const std::string& name : schedule_names()) {
    if (name == "forward-only") continue;
    for (const int p : {1, 2, 3, 4, 6}) {
      for (const int m : {1, 2, 5, 13}) {
        for (const int chunks : {1, 2, 3}) {
          Schedule schedule;
          try {
            schedule = generate(name, {p, m, chunks});
          } catch (const Error&) {
            continue;
          }
          for (const double weight : {0.0, 0.4, 2.0}) {
            SimulationTimes times;
            for (int s = 0; s < schedule.placement.stages(); ++s) {
              times.stages.push_back({1 + 0.5 * (s % 3), 1.5 - 0.4 * (s % 2), weight, 0.1});
            }
            times.message = 0.25;
            EXPECT_LE(bound_of(schedule.placement, m, times),
                      simulate(schedule, times).makespan * (1 + 1e-12))
                << name << ' ' << p << ' ' << m << ' ' << chunks << ' ' << weight;
          }
        }
      }
    }
  }
}

TEST(MakespanBoundTest, IsReachedWhereNothingIsInTheWay) {
  SimulationTimes times;
  times.stages = {{1, 1, 1, 0}};
  EXPECT_EQ(bound_of(Placement::linear(4), 8, times), 3 * 8 + 3);
  times.stages = {{1, 1, 0, 0}};  // the way back counts once no W covers it
  EXPECT_EQ(bound_of(Placement::linear(4), 8, times), 2 * (8 + 3));
}

struct SolvedCase {
  int micro_batches = 0, latency = 0, limit = 0;
  double optimum = 0;
  std::vector<StageTimes> stages;
};

// Proven by the CP-SAT solver of OR-tools 9.15, for orders with ascending micro-batches.
const std::vector<SolvedCase>& solved_cases() {
  static const std::vector<SolvedCase> cases = {
      {4, 3, 3, 112, {{10, 7, 4, 0}, {5, 5, 8, 0}, {4, 9, 6, 0}}},
      {4, 2, 4, 108, {{5, 2, 9, 0}, {9, 4, 4, 0}, {6, 8, 7, 0}, {9, 3, 1, 0}}},
      {3, 2, 3, 70, {{3, 6, 6, 0}, {6, 6, 7, 0}, {7, 4, 7, 0}}},
      {6, 4, 2, 86, {{4, 1, 1, 0}, {4, 4, 5, 0}}},
      {6, 4, 2, 248, {{10, 4, 3, 0}, {2, 4, 4, 0}, {6, 8, 6, 0}, {10, 6, 8, 0}}},
      {6, 0, 1, 252, {{10, 8, 6, 0}, {6, 3, 4, 0}, {6, 3, 10, 0}}},
      {3, 1, 2, 57, {{3, 4, 4, 0}, {8, 6, 2, 0}}},
      {6, 1, 1, 246, {{10, 8, 7, 0}, {5, 9, 7, 0}}},
      {5, 3, 1, 270, {{5, 5, 8, 0}, {3, 9, 4, 0}, {10, 2, 4, 0}}},
      {4, 1, 1, 212, {{6, 9, 4, 0}, {6, 7, 1, 0}, {1, 2, 9, 0}, {10, 2, 3, 0}}},
      {4, 0, 1, 188, {{4, 3, 2, 0}, {8, 2, 10, 0}, {10, 3, 9, 0}, {3, 10, 10, 0}}},
      {4, 4, 2, 124, {{9, 5, 2, 0}, {6, 1, 10, 0}, {1, 3, 10, 0}, {2, 1, 4, 0}}},
      {4, 4, 2, 182, {{8, 5, 7, 0}, {3, 8, 10, 0}, {8, 8, 8, 0}, {6, 4, 7, 0}}},
      {4, 0, 1, 100, {{5, 4, 6, 0}, {7, 3, 8, 0}}},
      {3, 4, 1, 177, {{4, 1, 8, 0}, {9, 4, 9, 0}, {7, 10, 8, 0}}},
      {5, 3, 1, 245, {{1, 9, 4, 0}, {9, 5, 10, 0}, {6, 3, 2, 0}}},
      {4, 2, 2, 72, {{1, 5, 8, 0}, {6, 5, 3, 0}}},
      {6, 4, 3, 126, {{10, 1, 6, 0}, {6, 2, 7, 0}, {3, 2, 3, 0}}},
      {3, 4, 1, 81, {{7, 5, 2, 0}, {1, 4, 6, 0}}},
      {3, 1, 1, 99, {{7, 10, 7, 0}, {2, 5, 9, 0}}},
      {3, 4, 1, 135, {{4, 9, 7, 0}, {7, 10, 8, 0}}},
      {4, 4, 2, 188, {{9, 6, 7, 0}, {5, 8, 5, 0}, {5, 2, 6, 0}, {10, 7, 9, 0}}},
      {5, 1, 2, 119, {{4, 8, 5, 0}, {7, 10, 5, 0}}},
      {3, 4, 2, 150, {{5, 7, 5, 0}, {7, 9, 9, 0}, {4, 3, 3, 0}, {5, 6, 2, 0}}},
  };
  return cases;
}

TEST(MakespanBoundTest, CountsMemory) {
  double sum = 0, worst = 1;
  for (const SolvedCase& each : solved_cases()) {
    const int ranks = static_cast<int>(each.stages.size());
    SimulationTimes times = {.stages = each.stages, .message = 1.0 * each.latency};
    const double bound =
        bound_of(Placement::linear(ranks), each.micro_batches, times, 1.0 * each.limit);
    EXPECT_LE(bound, each.optimum * (1 + 1e-9));
    sum += bound / each.optimum;
    worst = std::min(worst, bound / each.optimum);
  }
  EXPECT_GE(sum / static_cast<double>(solved_cases().size()), 0.9);
  EXPECT_GE(worst, 0.8);
  RecordProperty("mean", std::to_string(sum / static_cast<double>(solved_cases().size())));
  RecordProperty("worst", std::to_string(worst));
}

TEST(SearchTest, FindsTheBestOrderOfTheSolvedCases) {
  for (const SolvedCase& each : solved_cases()) {
    SearchRequest request =
        request_of(static_cast<int>(each.stages.size()), each.micro_batches, {}, each.latency);
    request.model.stages = each.stages;
    request.chunks = {1};
    request.in_flight_limit = {1.0 * each.limit};
    request.effort = 1'000'000;
    const SearchResult result = search_schedule(request);
    expect_sound(request, result);
    EXPECT_LE(result.simulation.makespan, each.optimum * 1.01);
    EXPECT_GE(result.simulation.makespan, each.optimum * (1 - 1e-9));
  }
}

// A limit makes orders slower, and no bound may be above what a search finds.
TEST(SearchTest, StaysAboveItsBoundUnderEveryLimit) {
  for (const int limit : {1, 2, 3}) {
    for (const int chunks : {1, 2, 4}) {
      for (const bool split : {true, false}) {
        SearchRequest request = request_of(3, 7, {2, 3, 1.5, 0.25, 4.5}, 0.5);
        request.chunks = {chunks};
        request.split_backward = split;
        request.in_flight_limit = {static_cast<double>(limit)};
        SCOPED_TRACE(::testing::Message() << limit << ' ' << chunks << ' ' << split);
        expect_sound(request, search_schedule(request));
        request.in_flight_limit.clear();
        request.model.bytes = {{.until_input = 6, .until_weight = 3, .output = 2}};
        request.byte_limit = {40 * limit};
        expect_sound(request, search_schedule(request));
        request.objective = Objective::kSpan;
        expect_sound(request, search_schedule(request));
      }
    }
  }
}

// What `order` takes where half of what stages have in flight leaves.
Simulation moving(const Schedule& order, const SimulationTimes& times) {
  return simulate(lower(order, {.tied = {}, .resident = half_resident(order)}), times);
}

// 13 bytes hold 3 of the 4 micro-batches that 1f1b has in flight on the first of 4 ranks.
TEST(SearchTest, OffloadsWhereThatLetsABetterOrderFit) {
  SearchRequest request = request_of(4, 8, {1, 1, 1, 0}, 0);
  request.chunks = {1};
  request.split_backward = false;
  request.model.bytes = {{.until_input = 4}};
  request.model.move_link = {.bandwidth = 100};
  request.byte_limit = {13};
  const SearchResult keeping = search_schedule(request);
  request.offload = true;
  const SearchResult offloading = search_schedule(request);
  EXPECT_LT(offloading.simulation.makespan, keeping.simulation.makespan);
  const Simulation moved = moving(offloading.schedule, offloading.times);
  EXPECT_EQ(offloading.simulation.makespan, moved.makespan);
  for (const std::int64_t bytes : moved.peak_bytes) EXPECT_LE(bytes, 13);
  EXPECT_LE(offloading.lower_bound, offloading.simulation.makespan);
  // Moves that take long count: each candidate is as slow as they make it.
  request.model.move_link.bandwidth = 0.5;
  const SearchResult slow = search_schedule(request);
  EXPECT_EQ(slow.simulation.makespan, moving(slow.schedule, slow.times).makespan);
  EXPECT_GT(slow.simulation.makespan, offloading.simulation.makespan);
  const auto of_1f1b = [](const SearchResult& result) {
    const auto found = std::ranges::find(result.candidates, "1f1b", &SearchCandidate::origin);
    return found == result.candidates.end() ? 0.0 : found->makespan;
  };
  EXPECT_EQ(of_1f1b(keeping), 0.0) << "does not fit";
  EXPECT_EQ(of_1f1b(slow),
            moving(generate("1f1b", {.ranks = 4, .micro_batches = 8}), slow.times).makespan);
}

// A stage of two layers runs what its last layer recomputes while it awaits the gradient.
TEST(SearchTest, RecomputesAheadOfWaits) {
  SearchRequest request = request_of(2, 4, {1, 2, 1, 0}, 0.5);
  request.whole_layers = true;
  request.chunks = {1};
  request.split_backward = false;
  request.model.stages.assign(4, {.forward = 1, .backward_input = 2, .backward_weight = 1});
  for (StageTimes& each : request.model.stages) each.recompute = 1;
  const SearchResult ahead = search_schedule(request);
  EXPECT_EQ(ahead.times.stages[0].recompute, 1);
  EXPECT_EQ(ahead.simulation.makespan,
            simulate(lower(ahead.schedule, {.tied = {}, .recomputes = {true, true}}), ahead.times)
                .makespan);
  EXPECT_LE(ahead.lower_bound, ahead.simulation.makespan);
  for (StageTimes& each : request.model.stages) each.recompute = 0;
  EXPECT_LT(ahead.simulation.makespan, search_schedule(request).simulation.makespan);
}

// Plans run the actions of a pair one after the other.
TEST(SearchTest, CountsNoOverlap) {
  SearchRequest request = request_of(4, 8, {1, 1, 1, 0}, 0.02);
  const SearchResult apart = search_schedule(request);
  EXPECT_TRUE(std::any_of(apart.candidates.begin(), apart.candidates.end(),
                          [](const SearchCandidate& each) { return each.origin == "dualpipe-v"; }));
  request.model.stages[0].overlap = 0.75 * 3;
  const SearchResult overlapped = search_schedule(request);
  expect_sound(request, overlapped);
  EXPECT_EQ(overlapped.schedule.ranks, apart.schedule.ranks);
}

}  // namespace
}  // namespace sluice
