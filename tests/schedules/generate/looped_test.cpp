// Schedules over looped placement: the grids in their comments, closed forms with 1 to 4 chunks,
// and plans that post enough receives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

#include "tests/schedules/hand_made.hpp"

namespace sluice {
namespace {

// F, I and W take one unit each.
double unit_makespan(const Schedule& schedule) {
  SimulationTimes times;
  times.stages.resize(1);
  return simulate(schedule, times).makespan;
}

template <class Body>
void for_each_chunked_shape(const Body& body) {
  for (int v = 1; v <= 4; ++v) {
    for (int p = 1; p <= 8; ++p) {
      for (int m = 1; m <= 17; ++m) {
        SCOPED_TRACE("p = " + std::to_string(p) + ", m = " + std::to_string(m) +
                     ", v = " + std::to_string(v));
        body(p, m, v);
      }
    }
  }
}

// The size of the first of floor(m / p) nearly equal groups, larger ones first.
int first_group(int p, int m) { return (m + m / p - 1) / (m / p); }

TEST(LoopedTest, GridsAreTheOnesInTheComments) {
  EXPECT_EQ(draw_grid(generate("interleaved", {2, 4, 2})),
            "rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3\n"
            "rank 1 |     1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3\n");
  EXPECT_EQ(draw_grid(generate("looped-bfs", {2, 3, 2})),
            "rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2         2B0 2B1 2B2 0B0 0B1 0B2\n"
            "rank 1 |     1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2\n");
  EXPECT_EQ(draw_grid(generate("interleaved-zb", {2, 2, 2})),
            "rank 0 | 0F0 0F1 2F0 2F1     2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1\n"
            "rank 1 |     1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1\n");
}

TEST(InterleavedTest, MeetsTheClosedFormOfItsMakespanAsLoopedBfsDoes) {
  for_each_chunked_shape([](int p, int m, int v) {
    const int makespan = 3 * (m >= p ? m * v + p - 1 : m + p * v - 1);
    EXPECT_EQ(unit_makespan(generate("interleaved", {p, m, v})), makespan);
    EXPECT_EQ(unit_makespan(generate("looped-bfs", {p, m, v})), makespan);
  });
}

TEST(InterleavedTest, KeepsTheChunksForwardedAheadAndOneMore) {
  for_each_chunked_shape([](int p, int m, int v) {
    if (m < p) return;
    const std::vector<int> peaks = peak_in_flight(generate("interleaved", {p, m, v}));
    for (int rank = 0; rank < p; ++rank) {
      EXPECT_EQ(peaks[static_cast<std::size_t>(rank)],
                std::min((v - 1) * first_group(p, m) + 2 * (p - 1 - rank) + 1, m * v));
    }
  });
}

TEST(LoopedBfsTest, KeepsEveryChunkOfEveryMicroBatch) {
  for_each_chunked_shape([](int p, int m, int v) {
    EXPECT_THAT(peak_in_flight(generate("looped-bfs", {p, m, v})), ::testing::Each(m * v));
  });
}

TEST(InterleavedZbTest, IdlesDepthMinusOneUnitsAndHoldsItsFirstGroupsAndTheDepth) {
  for_each_chunked_shape([](int p, int m, int v) {
    if (m < p) return;
    const Schedule schedule = generate("interleaved-zb", {p, m, v});
    EXPECT_EQ(unit_makespan(schedule), 3 * m * v + p - 1);
    const std::vector<int> peaks = peak_in_flight(schedule);
    EXPECT_EQ(*std::max_element(peaks.begin(), peaks.end()), (v - 1) * first_group(p, m) + p);
  });
}

TEST(InterleavedZbTest, WithOneChunkIsZbH1) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = p; m <= 17; ++m) {
      EXPECT_EQ(generate("interleaved-zb", {p, m, 1}).ranks, generate("zb-h1", {p, m, 1}).ranks);
    }
  }
}

TEST(LoopedTest, EveryShapeIsExactAndProgressesOverTransportsWithTags) {
  for (const char* name : {"interleaved", "looped-bfs", "interleaved-zb"}) {
    SCOPED_TRACE(name);
    for_each_chunked_shape([&](int p, int m, int v) {
      const Schedule schedule = generate(name, {p, m, v});
      EXPECT_TRUE(is_exact(schedule));
      ASSERT_FALSE(check(schedule).has_value());
      for (const PlanOptions& options : {PlanOptions{}, PlanOptions{0, 1}}) {
        const Verification verification = verify(testing::plan_of(schedule, {}, options));
        ASSERT_TRUE(verification.progresses(TransportModel::kBounded))
            << verification.deadlocks.front().violation.message;
      }
    });
  }
}

}  // namespace
}  // namespace sluice
