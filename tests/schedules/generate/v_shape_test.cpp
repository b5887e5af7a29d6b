// The generators with V placement: zb-v, v-half, v-min, dualpipe-v.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

#include "tests/schedules/hand_made.hpp"

namespace sluice {
namespace {

using ::testing::Each;
using ::testing::Le;

constexpr const char* kNames[] = {"zb-v", "v-half", "v-min", "dualpipe-v"};

template <class Body>
void for_each_v_shape(const Body& body) {
  for (int p = 1; p <= 12; ++p) {
    for (int m = 1; m <= 3 * p + 2; ++m) {
      SCOPED_TRACE("p = " + std::to_string(p) + ", m = " + std::to_string(m));
      body(p, m);
    }
  }
}

Simulation unit_simulation(const Schedule& schedule) {
  SimulationTimes times;
  times.stages.resize(1);
  return simulate(schedule, times);
}

int highest(const std::vector<int>& peaks) { return *std::max_element(peaks.begin(), peaks.end()); }

TEST(VShapeTest, GridsAreThoseInTheComments) {
  EXPECT_EQ(
      draw_grid(generate("zb-v", {2, 3, 1})),
      "rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2\n"
      "rank 1 |     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2\n");
  EXPECT_EQ(draw_grid(generate("v-half", {3, 3, 1})),
            "rank 0 | 0F0 0F1 0F2         5F0 5I0 5W0 5F1 5I1 5W1     0I0 0W0     5F2 5I2 5W2 0I1 "
            "0W1         0I2 0W2\n"
            "rank 1 |     1F0 1F1     4F0     4F1 4I0 4W0 1F2     1I0 4I1 1W0 4F2 4W1     1I1 4I2 "
            "1W1 4W2 1I2 1W2\n"
            "rank 2 |         2F0 3F0 2F1 3F1         3I0 3W0 2I0 2W0 2F2 3F2 3I1 3W1 2I1 2W1     "
            "3I2 2I2 3W2 2W2\n");
  EXPECT_EQ(draw_grid(generate("v-min", {3, 3, 1})),
            "rank 0 | 0F0 0F1 0F2         5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0         5F2 5I2 0I1 0W1 "
            "5W2     0I2 0W2\n"
            "rank 1 |     1F0 1F1     4F0     4F1 4I0 4W0     1I0 1F2 4I1 1W0 4F2 4W1 1I1 4I2 1W1 "
            "4W2 1I2 1W2\n"
            "rank 2 |         2F0 3F0 2F1 3F1         3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 "
            "2I2 3W2 2W2\n");
  EXPECT_EQ(draw_grid(generate("dualpipe-v", {2, 4, 1})),
            "rank 0 | 0F0     0F1     0F2     3F0     3I0     3W0     3F1     0F3+3B1 3F2+0B0 3B2  "
            "   3F3+0B1 3B3     0I2     0W2     0I3     0W3\n"
            "rank 1 |         1F0     2F0     1F1     2F1     1F2     2B0     2F2+1B0 1F3+2B1 "
            "2F3+1B1 2B2     1B2     2I3     1I3     2W3     1W3\n");
}

TEST(VShapeTest, EveryScheduleIsWholeExactAndProgressesOverTransportsWithTags) {
  for (const char* name : kNames) {
    SCOPED_TRACE(name);
    for_each_v_shape([&](int p, int m) {
      const Schedule schedule = generate(name, {p, m, 1});
      const auto violation = check(schedule);
      ASSERT_FALSE(violation.has_value()) << describe(schedule, *violation);
      EXPECT_TRUE(is_exact(schedule));
      EXPECT_EQ(schedule.placement, Placement::v_shape(p));
      const Verification verification = verify(testing::plan_of(schedule));
      ASSERT_TRUE(verification.ok()) << verification.violation->message;
      EXPECT_TRUE(verification.progresses(TransportModel::kBounded));
    });
  }
}

TEST(VShapeTest, OneAndTwoChunksMeanTheSameAndMoreAreRefused) {
  for (const char* name : kNames) {
    EXPECT_EQ(generate(name, {3, 4, 1}).ranks, generate(name, {3, 4, 2}).ranks);
    EXPECT_EQ(stages_of(name, {3, 4, 1}), 6);
    EXPECT_THAT(
        [&] {
          (void)generate(name, {3, 4, 3});
        },
        ::testing::ThrowsMessage<Error>(
            ::testing::HasSubstr("chunks is 3, the nearest legal value is 2")));
  }
}

// A warm-up that moves forwards ahead would deadlock with receives posted for what the schedule
// holds alone; the plan then posts more.
TEST(VShapeTest, WithoutReceivesAheadOneSendBufferCarriesEverySchedule) {
  for (const char* name : kNames) {
    SCOPED_TRACE(name);
    for_each_v_shape([&](int p, int m) {
      const Plan plan = testing::plan_of(generate(name, {p, m, 1}), {}, PlanOptions{0, 1});
      const Verification verification = verify(plan);
      ASSERT_TRUE(verification.progresses(TransportModel::kBounded))
          << verification.deadlocks.front().violation.message;
    });
  }
}

TEST(ZbVTest, NoRankIdlesBetweenItsFirstAndLastActionFromTwoDepthsOn) {
  for_each_v_shape([](int p, int m) {
    if (m < 2 * p - 1) return;
    const Simulation simulation = unit_simulation(generate("zb-v", {p, m, 1}));
    EXPECT_EQ(simulation.span, 6 * m);
    EXPECT_EQ(simulation.bubble_span, 0);
    EXPECT_EQ(simulation.makespan, 6 * m + p - 1);
  });
}

TEST(ZbVTest, HoldsTwoDepthsOfChunks) {
  for_each_v_shape([](int p, int m) {
    const std::vector<int> peaks = peak_in_flight(generate("zb-v", {p, m, 1}));
    EXPECT_EQ(highest(peaks), std::min(2 * p, 2 * m));
  });
}

TEST(VHalfTest, IdlesForTheSlotsThatThePaperCounts) {
  for_each_v_shape([](int p, int m) {
    if (p < 3 || m < p + 2) return;
    const int idle = p == 3 ? 5 : p % 2 == 0 ? 3 * p - 7 : 3 * p - 4;
    EXPECT_EQ(unit_simulation(generate("v-half", {p, m, 1})).makespan, 6 * m + idle);
  });
}

TEST(VHalfTest, HoldsHalfADepthOfMicroBatches) {
  for_each_v_shape([](int p, int m) {
    const std::vector<int> peaks = peak_in_flight(generate("v-half", {p, m, 1}));
    EXPECT_THAT(peaks, Each(Le(2 * ((p + 2) / 2))));
    if (m >= p) {
      EXPECT_EQ(highest(peaks), 2 * ((p + 2) / 2));
    }
  });
}

TEST(VMinTest, IdlesForTheSlotsThatThePaperCounts) {
  for_each_v_shape([](int p, int m) {
    if (p < 3 || m < p) return;
    const int idle = p % 3 == 0 ? 4 * p - 7 : 4 * p - 5;
    EXPECT_EQ(unit_simulation(generate("v-min", {p, m, 1})).makespan, 6 * m + idle);
  });
}

TEST(VMinTest, HoldsAThirdOfADepthOfMicroBatches) {
  for_each_v_shape([](int p, int m) {
    const std::vector<int> peaks = peak_in_flight(generate("v-min", {p, m, 1}));
    EXPECT_THAT(peaks, Each(Le(2 * ((p + 4) / 3))));
    if (m >= p) {
      EXPECT_EQ(highest(peaks), 2 * ((p + 4) / 3));
    }
  });
}

TEST(VMinTest, NeverIdlesForMoreThanItsPattern) {
  for (int p = 13; p <= 16; ++p) {
    for (int m = 1; m <= p; ++m) {
      EXPECT_LE(unit_simulation(generate("v-min", {p, m, 1})).makespan, 6 * m + 4 * p + 2);
    }
  }
}

TEST(DualPipeVTest, HoldsTwoDepthsAndOneChunk) {
  for_each_v_shape([](int p, int m) {
    const std::vector<int> peaks = peak_in_flight(generate("dualpipe-v", {p, m, 1}));
    EXPECT_THAT(peaks, Each(Le(std::min(2 * p + 1, 2 * m))));
    if (p > 1 && m > 2 * p) {
      EXPECT_EQ(highest(peaks), 2 * p + 1);
    }
  });
}

// The four ranks' lists for ten micro-batches that torch.distributed.pipelining keeps as its
// reference (dualpipev_4rank_10mb.csv), as published by the algorithm's authors.
TEST(DualPipeVTest, ListsAreThePublishedOnes) {
  const Schedule schedule = generate("dualpipe-v", {4, 10, 2});
  const std::vector<std::string_view> published = {
      "0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 "
      "(0F7;7B3)OVERLAP_F_B (7F4;0B0)OVERLAP_F_B (0F8;7B4)OVERLAP_F_B (7F5;0B1)OVERLAP_F_B "
      "(0F9;7B5)OVERLAP_F_B (7F6;0B2)OVERLAP_F_B 7B6 (7F7;0B3)OVERLAP_F_B 7B7 "
      "(7F8;0B4)OVERLAP_F_B 7B8 (7F9;0B5)OVERLAP_F_B 7B9 0I6 0W6 0I7 0W7 0I8 0W8 0I9 0W9",
      "1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6I0 6W0 6F2 6I1 6W1 6F3 (1F6;6B2)OVERLAP_F_B "
      "(6F4;1B0)OVERLAP_F_B (1F7;6B3)OVERLAP_F_B (6F5;1B1)OVERLAP_F_B (1F8;6B4)OVERLAP_F_B "
      "(6F6;1B2)OVERLAP_F_B (1F9;6B5)OVERLAP_F_B (6F7;1B3)OVERLAP_F_B 6B6 "
      "(6F8;1B4)OVERLAP_F_B 6B7 (6F9;1B5)OVERLAP_F_B 6B8 1B6 6I9 1I7 6W9 1I8 1W7 1I9 1W8 1W9",
      "2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5I0 5W0 5F3 (2F5;5B1)OVERLAP_F_B (5F4;2B0)OVERLAP_F_B "
      "(2F6;5B2)OVERLAP_F_B (5F5;2B1)OVERLAP_F_B (2F7;5B3)OVERLAP_F_B (5F6;2B2)OVERLAP_F_B "
      "(2F8;5B4)OVERLAP_F_B (5F7;2B3)OVERLAP_F_B (2F9;5B5)OVERLAP_F_B (5F8;2B4)OVERLAP_F_B "
      "5B6 (5F9;2B5)OVERLAP_F_B 5B7 2B6 5B8 2I7 5I9 2I8 2W7 2I9 5W9 2W8 2W9",
      "3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 3F4 4B0 (4F4;3B0)OVERLAP_F_B (3F5;4B1)OVERLAP_F_B "
      "(4F5;3B1)OVERLAP_F_B (3F6;4B2)OVERLAP_F_B (4F6;3B2)OVERLAP_F_B (3F7;4B3)OVERLAP_F_B "
      "(4F7;3B3)OVERLAP_F_B (3F8;4B4)OVERLAP_F_B (4F8;3B4)OVERLAP_F_B (3F9;4B5)OVERLAP_F_B "
      "(4F9;3B5)OVERLAP_F_B 4B6 3B6 4B7 3B7 4I8 3I8 4I9 3I9 4W8 3W8 4W9 3W9",
  };
  EXPECT_EQ(schedule.ranks, testing::hand_made(Placement::v_shape(4), 10, published).ranks);
}

// Where stages do not overlap, the first action of a pair hands over before the second one ends.
TEST(DualPipeVTest, SplitsItsPairsWhereStagesDoNotOverlap) {
  for (const auto& [ranks, micro_batches, makespan] :
       std::vector<std::tuple<int, int, double>>{{4, 8, 51}, {8, 16, 103}, {8, 32, 199}}) {
    const Schedule schedule = generate("dualpipe-v", {ranks, micro_batches, 2});
    EXPECT_EQ(simulate(schedule, {.stages = {StageTimes{}}}).makespan, makespan);
    const Schedule lowered = lower(schedule, {});
    for (const auto& steps : lowered.ranks) {
      for (const Step& step : steps) EXPECT_FALSE(step.overlapped);
    }
    EXPECT_EQ(simulate(lowered, {.stages = {StageTimes{}}}).makespan, makespan);
    LowerOptions options;
    options.keep_pairs = true;
    EXPECT_NE(lower(schedule, options).ranks, lowered.ranks);
  }
}

}  // namespace
}  // namespace sluice
