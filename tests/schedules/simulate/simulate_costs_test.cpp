// Links, reductions and bytes: small cases computed by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

#include "tests/schedules/hand_made.hpp"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr SimulationDetail kEverything = {.timeline = true, .memory = true};

SimulationTimes unit_times() {
  SimulationTimes times;
  times.stages = {StageTimes{}};
  return times;
}

SimulationTimes with_bytes(const StageBytes& bytes) {
  SimulationTimes times = unit_times();
  times.bytes = {bytes};
  return times;
}

StageBytes output_of(std::int64_t bytes) {
  StageBytes result;
  result.output = bytes;
  return result;
}

MATCHER_P2(Holds, time, bytes, "") { return arg.time == time && arg.bytes == bytes; }

TEST(SimulateLinksTest, MessagesQueueUpOnALinkOfLimitedBandwidth) {
  SimulationTimes times = with_bytes(output_of(4));
  times.bandwidth = 2;
  const Schedule schedule = generate("forward-only", {2, 3, 1});
  // Made at 1, 2, 3; on the link from 1, 3, 5, two units each.
  const Simulation simulation = simulate(schedule, times);
  EXPECT_DOUBLE_EQ(simulation.timeline[1][0].start, 3);
  EXPECT_DOUBLE_EQ(simulation.timeline[1][1].start, 5);
  EXPECT_DOUBLE_EQ(simulation.timeline[1][2].start, 7);
  EXPECT_DOUBLE_EQ(simulation.makespan, 8);
  EXPECT_THAT(simulation.waiting, ElementsAre(0, 2));
  times.message = 0.5;  // after the last byte; it delays no other message
  EXPECT_DOUBLE_EQ(simulate(schedule, times).makespan, 8.5);
}

TEST(SimulateLinksTest, DirectionsOfALinkDoNotDisturbEachOther) {
  SimulationTimes times = with_bytes(output_of(1));
  times.bandwidth = 0.2;
  // 0F0 and 0F1 are on their way from 1 to 6 and to 11; 1B0 is done at 9, and its gradient leaves.
  const Simulation simulation = simulate(generate("1f1b", {2, 2, 1}), times);
  EXPECT_DOUBLE_EQ(simulation.timeline[1][2].start, 11);  // 1F1
  EXPECT_DOUBLE_EQ(simulation.timeline[0][2].start, 14);  // 0B0
  EXPECT_DOUBLE_EQ(simulation.timeline[0][3].start, 19);  // 0B1: made at 14
}

TEST(SimulateLinksTest, StagesThatShareAPairOfRanksShareItsLink) {
  // Stages 0 and 2 on rank 0 send to stages 1 and 3 on rank 1.
  const Schedule schedule =
      testing::hand_made(Placement::looped(2, 2), 2,
                         {"0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"});
  std::vector<StageBytes> bytes(4);
  bytes[0].output = 10;
  bytes[2].output = 1;
  SimulationTimes times = unit_times();
  times.bytes = bytes;
  times.bandwidth = 1;
  const Simulation simulation = simulate(schedule, times);
  // 0F0 and 0F1 occupy the link from 1 to 11 and to 21; 2F0 runs from 12 to 13, its output waits.
  EXPECT_DOUBLE_EQ(simulation.timeline[0][2].start, 12);
  EXPECT_DOUBLE_EQ(simulation.timeline[1][1].start, 21);
  EXPECT_DOUBLE_EQ(simulation.timeline[1][2].start, 22);
}

TEST(SimulateLinksTest, GradientsHaveASizeOfTheirOwnWhereGiven) {
  StageBytes bytes = output_of(4);
  SimulationTimes times = with_bytes(bytes);
  times.bandwidth = 1;
  const Schedule schedule = generate("1f1b", {2, 1, 1});
  EXPECT_DOUBLE_EQ(simulate(schedule, times).makespan, 1 + 4 + 1 + 2 + 4 + 2);
  times.bytes[0].output_gradient = 1;
  EXPECT_DOUBLE_EQ(simulate(schedule, times).makespan, 1 + 4 + 1 + 2 + 1 + 2);
}

TEST(SimulateLinksTest, NodesAndSingleLinksDifferFromTheRest) {
  SimulationTimes times = unit_times();
  times.message = 0.25;
  times.ranks_per_node = 2;
  times.between_nodes.latency = 8;
  const Schedule schedule = generate("forward-only", {4, 1, 1});
  EXPECT_DOUBLE_EQ(simulate(schedule, times).makespan, 4 + 0.25 + 8 + 0.25);
  times.links = {{1, 2, {100, 0}}, {1, 2, {3, 0}}, {2, 1, {50, 0}}};
  EXPECT_DOUBLE_EQ(simulate(schedule, times).makespan, 4 + 0.25 + 3 + 0.25);
  EXPECT_DOUBLE_EQ(simulate(generate("1f1b", {4, 1, 1}), times).makespan,
                   4 + 0.25 + 3 + 0.25 + 8 + 0.25 + 50 + 0.25);
}

TEST(SimulateReductionTest, StandsBehindEverythingOrBesideCompute) {
  const Schedule schedule = testing::hand_made(Placement::looped(1, 2), 1, {"0F0 1F0 1B0 0B0"});
  SimulationTimes times = unit_times();
  times.stages[0].reduce = 3;
  const Simulation behind = simulate(schedule, times);
  ASSERT_EQ(behind.reductions.size(), 1U);
  EXPECT_DOUBLE_EQ(behind.reductions[0][0].start, 6);
  EXPECT_EQ(to_string(behind.reductions[0][0].action), "0REDUCE_GRAD");
  EXPECT_DOUBLE_EQ(behind.makespan, 12);
  EXPECT_DOUBLE_EQ(behind.span, 12);
  EXPECT_THAT(behind.waiting, ElementsAre(6));
  EXPECT_DOUBLE_EQ(behind.bubble_makespan, 0.5);

  // Stage 1 is done at 4 and reduced until 7; stage 0 is done at 6 and has to wait for that.
  times.reduce_overlap = true;
  const Simulation beside = simulate(schedule, times);
  EXPECT_EQ(to_string(beside.reductions[0][0].action), "1REDUCE_GRAD");
  EXPECT_DOUBLE_EQ(beside.reductions[0][0].start, 4);
  EXPECT_DOUBLE_EQ(beside.reductions[0][1].start, 7);
  EXPECT_DOUBLE_EQ(beside.makespan, 10);
  EXPECT_THAT(beside.busy, ElementsAre(6));
}

TEST(SimulateReductionTest, BesideComputeInTheOrderOfTheLoweredList) {
  for (const char* name : {"interleaved", "looped-bfs", "interleaved-zb", "zb-v", "v-min"}) {
    const Schedule schedule = generate(name, {3, 5, 2});
    SimulationTimes times = unit_times();
    times.stages[0].reduce = 1;
    times.reduce_overlap = true;
    const Simulation simulation = simulate(schedule, times);
    const Schedule lowered = testing::lower_with_early_sums(schedule);
    for (std::size_t rank = 0; rank < lowered.ranks.size(); ++rank) {
      std::vector<Action> listed, simulated;
      for (const Step& step : lowered.ranks[rank]) {
        if (step.action.kind == ActionKind::kReduceGrad) listed.push_back(step.action);
      }
      for (const SimulatedAction& each : simulation.reductions[rank]) {
        simulated.push_back(each.action);
      }
      EXPECT_EQ(listed, simulated) << name << ", rank " << rank;
    }
  }
}

TEST(SimulateReductionTest, TakesWhatItsBytesTakeOnItsLink) {
  StageBytes bytes;
  bytes.reduced = 4;
  SimulationTimes times = with_bytes(bytes);
  times.reduce_link = {1, 2};
  EXPECT_DOUBLE_EQ(simulate(generate("gpipe", {1, 1, 1}), times).makespan, 3 + 1 + 2);
  EXPECT_DOUBLE_EQ(simulate(generate("forward-only", {1, 1, 1}), times).makespan, 1);
}

// A gather of 8 bytes over tensor ranks takes 1 + 8 / 4, a sum of 6 over replicas 0.5 + 6 / 2.
SimulationTimes with_collectives() {
  SimulationTimes times = unit_times();
  const PlannedCollective gather{.kind = CollectiveKind::kAllGather, .bytes = 8};
  const PlannedCollective sum{.axis = CollectiveAxis::kReplica, .bytes = 6, .type = DType::kF64};
  times.collectives = {{.forward = {gather, sum},
                        .loss = {gather},
                        .backward_input = {sum},
                        .backward_weight = {gather}}};
  const auto cost = [&](CollectiveAxis axis, CollectiveKind kind) -> LinkCost& {
    return times.collective_costs[static_cast<std::size_t>(axis)][static_cast<std::size_t>(kind)];
  };
  cost(CollectiveAxis::kTensor, CollectiveKind::kAllGather) = {.latency = 1, .bandwidth = 4};
  cost(CollectiveAxis::kReplica, CollectiveKind::kSum) = {.latency = 0.5, .bandwidth = 2};
  return times;
}

TEST(SimulateCollectivesTest, MakeTheirActionsLonger) {
  const SimulationTimes times = with_collectives();
  const auto makespan = [&](const char* name, const SimulationTimes& of) {
    const Simulation simulation = simulate(generate(name, {1, 1, 1}), of);
    EXPECT_DOUBLE_EQ(simulation.busy[0], simulation.makespan);
    return simulation.makespan;
  };
  EXPECT_DOUBLE_EQ(makespan("forward-only", times), 1 + 3 + 3) << "none over replicas";
  EXPECT_DOUBLE_EQ(makespan("1f1b", times), (1 + 3 + 3.5 + 3) + (1 + 3.5) + (1 + 3));
  EXPECT_DOUBLE_EQ(makespan("zb-h1", times), makespan("1f1b", times));
  SimulationTimes free = times;
  free.collective_costs = {};
  EXPECT_DOUBLE_EQ(makespan("1f1b", free), 3);
  // Ranks of another stage have none.
  SimulationTimes second = times;
  second.collectives.emplace(second.collectives.begin());
  const Simulation two = simulate(generate("forward-only", {2, 1, 1}), second);
  EXPECT_THAT(two.busy, ElementsAre(1, 7));
}

TEST(SimulateCollectivesTest, ArePartOfTheTimesOfACutModel) {
  const SimulationTimes half = recut(with_collectives(), 1, 2);
  EXPECT_THAT(half.collectives, IsEmpty());
  ASSERT_EQ(half.stages.size(), 2U);
  for (const StageTimes& each : half.stages) {
    EXPECT_DOUBLE_EQ(each.forward, 10.5 / 2);
    EXPECT_DOUBLE_EQ(each.backward_input, 4.5 / 2);
    EXPECT_DOUBLE_EQ(each.backward_weight, 4.0 / 2);
  }
}

TEST(SimulateCollectivesTest, RefusesCostsThatCannotBe) {
  SimulationTimes times = with_collectives();
  times.collective_costs[1][1].latency = -1;
  EXPECT_THROW((void)simulate(generate("1f1b", {1, 1, 1}), times), Error);
  times = with_collectives();
  times.collectives.resize(3);
  EXPECT_THROW((void)simulate(generate("1f1b", {2, 1, 1}), times), Error);
}

TEST(SimulateMemoryTest, WhatWNeedsStaysUntilW) {
  StageBytes bytes;
  bytes.until_input = 10;
  bytes.until_weight = 1;
  bytes.resident = 100;
  const SimulationTimes times = with_bytes(bytes);
  const Simulation whole = simulate(generate("1f1b", {3, 5, 1}), times);
  EXPECT_THAT(whole.peak_bytes, ElementsAre(133, 122, 111));
  // Rank 2 runs F0 I0 F1 I1 F2 I2 W0 ...: at F2 it still keeps what W0 and W1 need.
  const Simulation parted = simulate(generate("zb-h1", {3, 5, 1}), times);
  EXPECT_THAT(parted.peak_bytes, ElementsAre(133, 123, 113));
  EXPECT_THAT(simulate(generate("forward-only", {3, 5, 1}), times).peak_bytes,
              ElementsAre(111, 111, 111));
  EXPECT_THAT(whole.memory, IsEmpty());
}

TEST(SimulateMemoryTest, CurveFollowsEveryTakeAndRelease) {
  StageBytes bytes;
  bytes.until_input = 10;
  bytes.until_weight = 1;
  bytes.resident = 100;
  const Simulation simulation =
      simulate(generate("zb-h1", {1, 2, 1}), with_bytes(bytes), kEverything);
  ASSERT_EQ(simulation.memory.size(), 1U);
  EXPECT_THAT(simulation.memory[0], ElementsAre(Holds(0, 111), Holds(2, 101), Holds(3, 111),
                                                Holds(5, 101), Holds(6, 100)));
  EXPECT_THAT(simulation.peak_bytes, ElementsAre(111));
}

TEST(SimulateMemoryTest, MessagesAreHeldOnBothEnds) {
  SimulationTimes times = with_bytes(output_of(8));
  times.bandwidth = 2;
  const Simulation simulation = simulate(generate("forward-only", {2, 1, 1}), times, kEverything);
  EXPECT_THAT(simulation.memory[0], ElementsAre(Holds(0, 8), Holds(5, 0)));
  EXPECT_THAT(simulation.memory[1], ElementsAre(Holds(0, 0), Holds(1, 8), Holds(6, 0)));
}

TEST(SimulateMemoryTest, WhatARankHandsToItselfIsHeldOnce) {
  const Schedule schedule = testing::hand_made(Placement::v_shape(1), 1, {"0F0 1F0 1B0 0B0"});
  StageBytes bytes = output_of(8);
  bytes.output_gradient = 5;
  const Simulation simulation = simulate(schedule, with_bytes(bytes), kEverything);
  EXPECT_THAT(simulation.memory[0], ElementsAre(Holds(0, 8), Holds(2, 5), Holds(6, 0)));
}

TEST(SimulateMemoryTest, ActionsWithoutDurationHoldNoLessThanTheirOrderSays) {
  StageBytes bytes;
  bytes.until_weight = 1;
  SimulationTimes times = with_bytes(bytes);
  times.stages = {StageTimes{0, 0, 0}};
  EXPECT_GE(simulate(generate("1f1b", {3, 5, 1}), times).peak_bytes[0], 3);
}

TEST(SimulateTest, FiguresDoNotDependOnWhatIsKept) {
  SimulationTimes times = with_bytes(output_of(8));
  times.bandwidth = 3;
  for (const Schedule& schedule : testing::all_hand_made()) {
    const Simulation all = simulate(schedule, times, kEverything);
    const Simulation figures = simulate(schedule, times, {.timeline = false});
    EXPECT_THAT(figures.timeline, IsEmpty());
    EXPECT_EQ(figures.makespan, all.makespan);
    EXPECT_EQ(figures.span, all.span);
    EXPECT_EQ(figures.waiting, all.waiting);
    EXPECT_EQ(figures.peak_bytes, all.peak_bytes);
    EXPECT_EQ(figures.peak_in_flight, peak_in_flight(schedule));
    for (std::size_t rank = 0; rank < all.busy.size(); ++rank) {
      const auto& row = all.timeline[rank];
      EXPECT_DOUBLE_EQ(all.busy[rank] + all.waiting[rank], row.back().end - row.front().start);
    }
  }
}

// Long rows of the tables of check() and simulate() have another layout.
TEST(SimulateTest, ManyMicroBatchesMeetTheClosedForms) {
  for (const int m : {511, 512, 513, 4096}) {
    const Schedule whole = generate("1f1b", {5, m, 1});
    EXPECT_FALSE(check(whole));
    EXPECT_EQ(simulate(whole, unit_times()).makespan, 3.0 * (m + 4));
    const Schedule parted = generate("zb-h1", {5, m, 1});
    EXPECT_FALSE(check(parted));
    EXPECT_EQ(simulate(parted, unit_times()).makespan, 3.0 * m + 4);
  }
}

TEST(SimulateTest, RefusesCostsThatCannotBe) {
  const Schedule schedule = generate("gpipe", {3, 2, 1});
  const auto refused = [&](const auto& change) {
    SimulationTimes times = with_bytes(output_of(1));
    change(times);
    EXPECT_THROW((void)simulate(schedule, times), Error);
  };
  refused([](SimulationTimes& times) { times.bandwidth = -1; });
  refused([](SimulationTimes& times) { times.between_nodes.latency = -1; });
  refused([](SimulationTimes& times) { times.ranks_per_node = -1; });
  refused([](SimulationTimes& times) { times.links = {{1, 1, {}}}; });
  refused([](SimulationTimes& times) { times.links = {{0, 3, {}}}; });
  refused([](SimulationTimes& times) { times.links = {{0, 1, {-1, 0}}}; });
  refused([](SimulationTimes& times) { times.stages[0].reduce = -1; });
  refused([](SimulationTimes& times) { times.bytes.resize(2); });
  refused([](SimulationTimes& times) { times.bytes[0].until_weight = -1; });
  refused([](SimulationTimes& times) {
    times.bytes[0].until_input = std::numeric_limits<std::int64_t>::max() / 4;
  });
}

TEST(RecutTest, KeepsTheWorkAndItsPlace) {
  SimulationTimes times;
  times.stages = {StageTimes{1, 2, 3, 6}, StageTimes{3, 4, 5, 0}};
  times.bytes.resize(2);
  times.bytes[0] = {.until_input = 30, .until_weight = 9, .output = 7, .resident = 600};
  times.bytes[1] = {.until_input = 60, .until_weight = 6, .output = 8, .resident = 60};

  const SimulationTimes four = recut(times, 2, 4);
  ASSERT_EQ(four.stages.size(), 4U);
  EXPECT_EQ(four.stages[1].backward_input, 1);
  EXPECT_EQ(four.stages[2].backward_weight, 2.5);
  EXPECT_EQ(four.stages[0].reduce, 3);
  EXPECT_EQ(four.bytes[1].output, 7);
  EXPECT_EQ(four.bytes[2].output, 8);
  EXPECT_EQ(four.bytes[3].resident, 30);

  const SimulationTimes one = recut(times, 2, 1);
  EXPECT_EQ(one.stages[0].forward, 4);
  EXPECT_EQ(one.bytes[0].until_input, 90);

  const SimulationTimes three = recut(times, 2, 3);
  EXPECT_DOUBLE_EQ(three.stages[0].forward, 2.0 / 3);
  EXPECT_DOUBLE_EQ(three.stages[1].forward, 1.0 / 3 + 1);
  EXPECT_DOUBLE_EQ(three.stages[2].forward, 2);
  EXPECT_EQ(three.bytes[1].until_weight, 3 + 2);
  EXPECT_EQ(three.bytes[1].output, 8);

  EXPECT_EQ(recut({.stages = {StageTimes{}}}, 4, 12).stages[7].forward, 1.0 / 3);
  EXPECT_THROW((void)recut(times, 3, 6), Error);
  EXPECT_THROW((void)recut(times, 2, 0), Error);
}

// 10 bytes at 5 per unit of time: 2, once for each stage or for each F and B.
TEST(SimulateGathersTest, ParametersAreGatheredOnceAStepOrForEachUse) {
  SimulationTimes times{.stages = {{}}, .bytes = {{.gathered = 10}}, .reduce_link = {0, 5}};
  const Schedule one = generate("1f1b", {1, 2, 1}), two = generate("interleaved", {1, 2, 2});
  const auto makespan = [&](const Schedule& schedule, Gather gather) {
    times.gather = gather;
    return simulate(schedule, times).makespan;
  };
  EXPECT_EQ(makespan(one, Gather::kNever), 6);
  EXPECT_EQ(makespan(one, Gather::kPerStep), 8);
  EXPECT_EQ(makespan(two, Gather::kPerStep), 16);
  EXPECT_EQ(makespan(one, Gather::kPerUse), 14);
  EXPECT_EQ(makespan(generate("zb-h1", {1, 2, 1}), Gather::kPerUse), 14);  // W gathers nothing
}

}  // namespace
}  // namespace sluice
