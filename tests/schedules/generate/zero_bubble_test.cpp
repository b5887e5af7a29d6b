// 1F1B's relatives: the grids in their comments, and closed forms of their makespans and of what
// they hold.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

namespace sluice {
namespace {

constexpr int kMostRanks = 8, kMostMicroBatches = 25;

// F, I and W take one unit each.
Simulation simulate_unit(const Schedule& schedule, double message = 0) {
  SimulationTimes times;
  times.stages.resize(1);
  times.message = message;
  return simulate(schedule, times);
}

template <class Body>
void for_each_zero_bubble_shape(const Body& body) {
  for (int p = 1; p <= kMostRanks; ++p) {
    for (int m = 1; m <= kMostMicroBatches; ++m) {
      SCOPED_TRACE("p = " + std::to_string(p) + ", m = " + std::to_string(m));
      body(p, m);
    }
  }
}

int most_of(const std::vector<int>& peaks) { return *std::max_element(peaks.begin(), peaks.end()); }

TEST(OneFOneBEagerTest, GridIsTheOneInItsComment) {
  EXPECT_EQ(draw_grid(generate("1f1b-eager", {3, 6, 1})),
            "rank 0 | F0 F1 F2 F3 F4 B0 F5 B1    B2    B3    B4    B5\n"
            "rank 1 |    F0 F1 F2 B0 F3 B1 F4 B2 F5 B3    B4    B5\n"
            "rank 2 |       F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5\n");
}

TEST(OneFOneBEagerTest, KeepsTwiceTheDepthBehindAStageInFlight) {
  for_each_zero_bubble_shape([](int p, int m) {
    const Schedule schedule = generate("1f1b-eager", {p, m, 1});
    const std::vector<int> peaks = peak_in_flight(schedule);
    for (int rank = 0; rank < p; ++rank) {
      EXPECT_EQ(peaks[static_cast<std::size_t>(rank)], std::min(2 * p - 1 - 2 * rank, m));
    }
  });
}

TEST(OneFOneBEagerTest, LosesToLatencyOnceThereAndOnceBackWhateverTheMicroBatches) {
  for_each_zero_bubble_shape([](int p, int m) {
    for (const double latency : {0.0, 0.5, 1.5}) {
      EXPECT_DOUBLE_EQ(simulate_unit(generate("1f1b-eager", {p, m, 1}), latency).makespan,
                       3 * (m + p - 1) + 2 * (p - 1) * latency);
    }
  });
}

TEST(ZeroBubbleTest, GridsAreTheOnesInTheComment) {
  EXPECT_EQ(draw_grid(generate("zb-h1", {3, 5, 1})),
            "rank 0 | F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4\n"
            "rank 1 |    F0 F1    I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4\n"
            "rank 2 |       F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4\n");
  EXPECT_EQ(draw_grid(generate("zb-h2", {3, 5, 1})),
            "rank 0 | F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4\n"
            "rank 1 |    F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4\n"
            "rank 2 |       F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4\n");
}

TEST(ZeroBubbleTest, H1MeetsTheClosedFormOfItsMakespan) {
  for_each_zero_bubble_shape([](int p, int m) {
    EXPECT_EQ(simulate_unit(generate("zb-h1", {p, m, 1})).makespan,
              m >= p ? 3 * m + p - 1 : 2 * (m + p - 1) + 1);
  });
}

TEST(ZeroBubbleTest, H1KeepsNoMoreInFlightThanTheFirstRankOfOneFOneB) {
  for_each_zero_bubble_shape([](int p, int m) {
    EXPECT_EQ(most_of(peak_in_flight(generate("zb-h1", {p, m, 1}))), std::min(p, m));
  });
}

TEST(ZeroBubbleTest, H2HasNoBubbleWithinItsSpan) {
  for_each_zero_bubble_shape([](int p, int m) {
    const Schedule schedule = generate("zb-h2", {p, m, 1});
    EXPECT_LE(most_of(peak_in_flight(schedule)), std::min(2 * p - 1, m));
    if (m < 2 * p - 1) return;
    EXPECT_EQ(most_of(peak_in_flight(schedule)), 2 * p - 1);
    EXPECT_EQ(simulate_unit(schedule).span, 3 * m);
  });
}

TEST(ZeroBubbleTest, WeightGradientsAccumulateInAscendingOrder) {
  for_each_zero_bubble_shape([](int p, int m) {
    for (const char* name : {"1f1b-eager", "zb-h1", "zb-h2"}) {
      EXPECT_TRUE(is_exact(generate(name, {p, m, 1}))) << name;
    }
  });
}

}  // namespace
}  // namespace sluice
