#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>
#include <string>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

#include "tests/schedules/hand_made.hpp"

namespace sluice {
namespace {

constexpr double kForward = 3, kBackwardInput = 4, kBackwardWeight = 3;
constexpr double kBackward = kBackwardInput + kBackwardWeight;

SimulationTimes times(double message = 0) {
  SimulationTimes result;
  result.stages = {StageTimes{kForward, kBackwardInput, kBackwardWeight}};
  result.message = message;
  return result;
}

TEST(SimulateTest, TrainingSchedulesMeetTheClosedFormOfTheirMakespan) {
  for (const char* name : {"gpipe", "gpipe-lifo", "1f1b"}) {
    for (int p = 1; p <= 8; ++p) {
      for (int m = 1; m <= 17; ++m) {
        SCOPED_TRACE(std::string(name) + " p = " + std::to_string(p) +
                     ", m = " + std::to_string(m));
        const Simulation simulation = simulate(generate(name, {p, m, 1}), times());
        EXPECT_DOUBLE_EQ(simulation.makespan, (m + p - 1) * (kForward + kBackward));
        EXPECT_NEAR(simulation.bubble_makespan, (p - 1.0) / (m + p - 1), 1e-12);
        EXPECT_THAT(simulation.busy, ::testing::Each(m * (kForward + kBackward)));
        EXPECT_EQ(simulation.messages, 2 * (p - 1) * m);
      }
    }
  }
}

// The first B of rank 0 waits for rank 1's; what it recomputes fits into that wait.
TEST(SimulateTest, RecomputationRunsWhileAGradientIsAwaited) {
  const Schedule schedule = generate("1f1b", {2, 2, 1});
  LowerOptions options;
  options.recomputes = {true, true};
  const Schedule early = lower(schedule, options);
  SimulationTimes all = times();
  all.stages[0].recompute = 2;  // of the 4 of an input half
  const Simulation before = simulate(lower(schedule, {}), all), after = simulate(early, all);
  EXPECT_EQ(before.busy, after.busy);
  EXPECT_EQ(before.makespan, (2 + 2 - 1) * (kForward + kBackward));
  // The last stage waits for F alone; both B of the first one are shorter by 2 at the end.
  EXPECT_EQ(after.makespan, before.makespan - 2);
  const auto& row = after.timeline[0];
  const auto again = std::ranges::find_if(
      row, [](const SimulatedAction& each) { return each.action.kind == ActionKind::kRecompute; });
  ASSERT_NE(again, row.end());
  EXPECT_EQ(again->end - again->start, 2);
  EXPECT_LT(again->start, (again + 1)->start);
  EXPECT_EQ((again + 1)->end - (again + 1)->start, kBackward - 2);
}

TEST(SimulateTest, ForwardOnlyMeetsTheClosedFormOfItsMakespan) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 17; ++m) {
      const Simulation simulation = simulate(generate("forward-only", {p, m, 1}), times());
      EXPECT_DOUBLE_EQ(simulation.makespan, (m + p - 1) * kForward);
      EXPECT_EQ(simulation.messages, (p - 1) * m);
    }
  }
}

// Of p >= 2 ranks with F = B and p dividing m, for any latency: each round of p micro-batches
// pays the way there and back along the pipeline once.
TEST(SimulateTest, OneFOneBPaysForMessageLatencyAsTheClosedFormSays) {
  for (int p = 2; p <= 8; ++p) {
    for (int m = p; m <= 5 * p; m += p) {
      for (const double latency : {0.125, 1.0, 16.0}) {
        SCOPED_TRACE("p = " + std::to_string(p) + ", m = " + std::to_string(m));
        SimulationTimes equal;
        equal.stages = {StageTimes{1, 0.5, 0.5}};
        equal.message = latency;
        const double extra = (2.0 * (p - 1) * m / p + 2.0 * (p - 2)) * latency;
        EXPECT_DOUBLE_EQ(simulate(generate("1f1b", {p, m, 1}), equal).makespan,
                         2.0 * (m + p - 1) + extra);
      }
    }
  }
}

TEST(SimulateTest, GPipePaysForMessageLatencyOnceThereAndOnceBack) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 17; ++m) {
      EXPECT_DOUBLE_EQ(simulate(generate("gpipe", {p, m, 1}), times(0.5)).makespan,
                       (m + p - 1) * (kForward + kBackward) + 2 * (p - 1) * 0.5);
    }
  }
}

TEST(SimulateTest, LoweredAndComputeOnlySchedulesTakeTheSameTime) {
  for (const Schedule& schedule : testing::all_hand_made()) {
    const Simulation bare = simulate(schedule, times(1));
    const Simulation lowered = simulate(lower(schedule, {}), times(1));
    EXPECT_DOUBLE_EQ(bare.makespan, lowered.makespan);
    EXPECT_EQ(bare.messages, lowered.messages);
    EXPECT_EQ(bare.messages, schedule.placement == Placement::v_shape(2) ? 8 : 12);
  }
}

TEST(SimulateTest, TimelineHoldsEveryActionWithoutGapsInItsDependencies) {
  const Simulation simulation = simulate(testing::v_split(), times(0.5));
  ASSERT_EQ(simulation.timeline[1].size(), 12U);
  // 0F0 ends at 3, its message arrives half a unit later; stage 2 takes over locally at once.
  EXPECT_DOUBLE_EQ(simulation.timeline[1][0].start, 3.5);
  EXPECT_DOUBLE_EQ(simulation.timeline[1][1].start, 6.5);
  EXPECT_DOUBLE_EQ(simulation.timeline[0][2].start, 10);
  EXPECT_EQ(to_string(simulation.timeline[0][3].action), "3I0");
  EXPECT_DOUBLE_EQ(simulation.timeline[0][3].end - simulation.timeline[0][3].start, kBackwardInput);
}

TEST(SimulateTest, OverlappedPairTakesItsOwnTimeOrElseTheSumOfItsTwo) {
  const Schedule schedule = testing::hand_made(
      Placement::v_shape(1), 2, {"0F0 1F0 (0F1;1B0)OVERLAP_F_B (1F1;0B0)OVERLAP_F_B 1B1 0B1"});
  EXPECT_DOUBLE_EQ(simulate(schedule, times()).makespan, 4 * (kForward + kBackward));
  SimulationTimes overlapped = times();
  for (StageTimes& stage : overlapped.stages) stage.overlap = 8;
  const Simulation simulation = simulate(schedule, overlapped);
  EXPECT_DOUBLE_EQ(simulation.makespan, 2 * kForward + 2 * 8 + 2 * kBackward);
  EXPECT_DOUBLE_EQ(simulation.busy[0], simulation.makespan);
  EXPECT_DOUBLE_EQ(simulation.timeline[0][2].start, simulation.timeline[0][3].start);
  EXPECT_DOUBLE_EQ(simulation.timeline[0][2].end, simulation.timeline[0][3].end);
}

TEST(SimulateTest, SpanLeavesOutWhatARankWaitsBeforeItsFirstAction) {
  const Simulation simulation = simulate(generate("forward-only", {3, 4, 1}), times());
  EXPECT_DOUBLE_EQ(simulation.span, 4 * kForward);
  EXPECT_DOUBLE_EQ(simulation.bubble_span, 0);
  EXPECT_NEAR(simulation.bubble_makespan, 2.0 / 6, 1e-12);
}

TEST(SimulateTest, SlowestStageSetsThePaceWithTimesPerStage) {
  SimulationTimes uneven;
  uneven.stages = {StageTimes{1, 0, 0}, StageTimes{5, 0, 0}, StageTimes{1, 0, 0}};
  EXPECT_DOUBLE_EQ(simulate(generate("forward-only", {3, 4, 1}), uneven).makespan, 1 + 4 * 5 + 1);
}

TEST(SimulateTest, ZeroTimesGiveNoBubbleAndNoDivisionByZero) {
  SimulationTimes nothing;
  nothing.stages = {StageTimes{0, 0, 0}};
  const Simulation simulation = simulate(generate("1f1b", {2, 2, 1}), nothing);
  EXPECT_EQ(simulation.bubble_makespan, 0);
  EXPECT_EQ(simulation.bubble_span, 0);
}

TEST(SimulateTest, RefusesMissingNegativeAndEndlessTimes) {
  const Schedule schedule = generate("gpipe", {3, 2, 1});
  SimulationTimes two;
  two.stages.resize(2);
  EXPECT_THROW((void)simulate(schedule, {}), Error);
  EXPECT_THROW((void)simulate(schedule, two), Error);
  EXPECT_THROW((void)simulate(schedule, times(-1)), Error);
  SimulationTimes undefined = times();
  undefined.stages.front().overlap = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW((void)simulate(schedule, undefined), Error);
  SimulationTimes endless = times();
  endless.stages[0].backward_weight = std::numeric_limits<double>::infinity();
  EXPECT_THROW((void)simulate(schedule, endless), Error);
}

TEST(SimulateTest, RefusesAScheduleThatCannotFinish) {
  const Schedule stuck =
      testing::hand_made(Placement::linear(2), 2, {"0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"});
  EXPECT_THROW((void)simulate(stuck, times()), Error);
}

}  // namespace
}  // namespace sluice
