// What search_schedule() builds orders with: the paper's greedy insertion, the list scheduler,
// annealing, and the cut of layers into stages.
#include "schedules/search/search_orders.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "schedules/search/search_candidates.hpp"

namespace sluice::search {
namespace {

SimulationTimes uniform(double forward, double input, double weight, double message) {
  SimulationTimes times;
  times.stages = {{forward, input, weight, 0}};
  times.message = message;
  return times;
}

// Times per stage that differ, none a multiple of another.
SimulationTimes uneven(int stages, double message) {
  SimulationTimes times;
  for (int i = 0; i < stages; ++i) {
    times.stages.push_back({1 + 0.31 * (i % 3), 1.1 + 0.17 * (i % 2), 0.6 + 0.23 * (i % 4), 0});
  }
  times.message = message;
  return times;
}

Memory micro_batches(int ranks, double limit) {
  return {Memory::Unit::kMicroBatches, std::vector<double>(static_cast<std::size_t>(ranks), limit)};
}

// An activation of 2 bytes, of which I releases one.
Problem halves(int ranks, int m, SimulationTimes times, int limit) {
  StageBytes bytes;
  bytes.until_input = bytes.until_weight = 1;
  times.bytes = {bytes};
  const Memory memory = {Memory::Unit::kBytes,
                         std::vector<double>(static_cast<std::size_t>(ranks), 2.0 * limit)};
  return make_problem(Placement::linear(ranks), m, true, times, memory);
}

void expect_legal(const Problem& problem, const Order& order) {
  const Schedule schedule = to_schedule(problem, order, "test");
  const auto violation = check(schedule);
  EXPECT_FALSE(violation) << violation->message;
  EXPECT_TRUE(is_exact(schedule));
  EXPECT_TRUE(fits(problem, order));
}

std::vector<GreedySettings> all_settings() {
  std::vector<GreedySettings> all;
  for (int bits = 0; bits < 8; ++bits) {
    all.push_back({(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0});
  }
  return all;
}

double best_bubble(const Problem& problem, const SimulationTimes& times) {
  double least = 1;
  for (const GreedySettings& settings : all_settings()) {
    const Order order = greedy_insertion(problem, settings);
    expect_legal(problem, order);
    least = std::min(least, simulate(to_schedule(problem, order, "test"), times).bubble_span);
  }
  return least;
}

TEST(GreedyInsertionTest, ReachesThePublishedBubbleInTwiceTheMemoryOfOneFOneB) {
  const SimulationTimes times = uniform(18.513, 18.086, 9.331, 0.626);
  EXPECT_NEAR(best_bubble(halves(8, 32, times, 16), times), 0.0039, 0.00005);
}

TEST(GreedyInsertionTest, IsNoWorseThanTheHandcraftedSchedulesWhereAllPartsTakeOneUnit) {
  const SimulationTimes times = uniform(1, 1, 1, 0);
  for (int p = 1; p <= 6; ++p) {
    const int m = 4 * p;
    double makespan = std::numeric_limits<double>::infinity();
    double span = makespan;
    for (const GreedySettings& settings : all_settings()) {
      const Problem h1 = make_problem(Placement::linear(p), m, true, times, micro_batches(p, p));
      const Problem h2 =
          make_problem(Placement::linear(p), m, true, times, micro_batches(p, 2 * p - 1));
      makespan = std::min(
          makespan, simulate(to_schedule(h1, greedy_insertion(h1, settings), ""), times).makespan);
      span =
          std::min(span, simulate(to_schedule(h2, greedy_insertion(h2, settings), ""), times).span);
    }
    EXPECT_EQ(makespan, 3 * m + p - 1) << p;
    EXPECT_EQ(span, 3 * m) << p;
  }
}

TEST(GreedyInsertionTest, StaysLegalInAnyMemoryForAnyShape) {
  for (const int p : {1, 2, 3, 5}) {
    for (const int m : {1, 2, 4, 9}) {
      for (const double limit : {1.0, 2.0, 3.5, 100.0}) {
        const Problem problem =
            make_problem(Placement::linear(p), m, true, uneven(p, 0.2), micro_batches(p, limit));
        for (const GreedySettings& settings : all_settings()) {
          SCOPED_TRACE(std::to_string(p) + " " + std::to_string(m) + " " + std::to_string(limit));
          expect_legal(problem, greedy_insertion(problem, settings));
        }
      }
    }
  }
}

TEST(ListOrderTest, NeverGetsStuckHoweverLittleMemoryThereIs) {
  const std::vector<Placement> placements = {Placement::linear(3), Placement::looped(3, 2),
                                             Placement::looped(2, 3), Placement::v_shape(3),
                                             Placement::custom(2, {0, 1, 1, 0, 0, 1, 1, 0})};
  for (const Placement& placement : placements) {
    for (const bool split : {false, true}) {
      for (const double limit : {1.0, 1.25, 1.5, 2.0, 3.0, 50.0}) {
        for (const int m : {1, 2, 7}) {
          const Problem problem = make_problem(placement, m, split, uneven(placement.stages(), 0.3),
                                               micro_batches(placement.ranks(), limit));
          for (const bool alternate : {false, true}) {
            for (const bool latest : {false, true}) {
              for (const int open : {1, 3, 100}) {
                expect_legal(problem, list_order(problem, {alternate, latest, open, 0.5}));
              }
            }
          }
        }
      }
    }
  }
}

TEST(ClockTest, AgreesWithSimulate) {
  for (const Placement& placement : {Placement::looped(3, 2), Placement::v_shape(3)}) {
    SimulationTimes times = uneven(placement.stages(), 0.3);
    times.ranks_per_node = 2;
    times.between_nodes = {0.7, 0};
    for (StageTimes& each : times.stages) each.reduce = 0.4;
    const Problem problem = make_problem(placement, 7, true, times, micro_batches(3, 3));
    const Order order = list_order(problem, {});
    Clock clock(problem);
    ASSERT_TRUE(clock.play(order));
    const Simulation simulation = simulate(to_schedule(problem, order, ""), times);
    EXPECT_NEAR(clock.makespan(), simulation.makespan, 1e-9);
    EXPECT_NEAR(clock.span(), simulation.span, 1e-9);
  }
}

TEST(ImprovedTest, ShortensAnOrderAndKeepsItLegal) {
  const Problem problem =
      make_problem(Placement::v_shape(3), 8, true, uneven(6, 0.3), micro_batches(3, 3));
  const Order start = list_order(problem, {false, true, 2, 0});
  const Order order = improved(problem, start, {Objective::kMakespan, 0}, 5000);
  expect_legal(problem, order);
  Clock before(problem);
  Clock after(problem);
  ASSERT_TRUE(before.play(start) && after.play(order));
  EXPECT_LT(after.makespan(), before.makespan() - 0.5);
}

// All ways to cut `costs` into `stages` runs, none empty.
double least_load(const std::vector<double>& costs, std::size_t begin, int stages) {
  double load = 0;
  if (stages == 1) {
    for (std::size_t i = begin; i < costs.size(); ++i) load += costs[i];
    return load;
  }
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t i = begin; i + static_cast<std::size_t>(stages) <= costs.size(); ++i) {
    load += costs[i];
    least = std::min(least, std::max(load, least_load(costs, i + 1, stages - 1)));
  }
  return least;
}

TEST(CutTest, FindsTheSmallestLargestStage) {
  const std::vector<std::vector<double>> examples = {
      {1, 1, 1, 1, 1, 1, 1}, {9, 1, 1, 1, 1, 1, 9}, {1, 2, 3, 4, 5, 6, 7}, {0, 0, 5, 0, 0, 0, 1}};
  for (const std::vector<double>& costs : examples) {
    for (int stages = 1; stages <= 7; ++stages) {
      const std::vector<int> first = cut(costs, Placement::linear(stages));
      ASSERT_EQ(first.size(), static_cast<std::size_t>(stages) + 1);
      EXPECT_EQ(first.front(), 0);
      EXPECT_EQ(first.back(), 7);
      double largest = 0;
      for (std::size_t s = 0; s + 1 < first.size(); ++s) {
        ASSERT_LT(first[s], first[s + 1]);
        double sum = 0;
        for (int i = first[s]; i < first[s + 1]; ++i) sum += costs[static_cast<std::size_t>(i)];
        largest = std::max(largest, sum);
      }
      EXPECT_EQ(largest, least_load(costs, 0, stages));
    }
  }
}

TEST(CutTest, EvensOutRanksThatOwnSeveralStages) {
  // V placement on two ranks: 0 1 1 0, each 5 of the 10.
  const std::vector<int> first = cut({4, 1, 1, 1, 1, 1, 1}, Placement::v_shape(2));
  EXPECT_EQ(first[1], 1);
  EXPECT_EQ(first[3], 6);
}

}  // namespace
}  // namespace sluice::search
