#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
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

using ::testing::HasSubstr;

// Every shape the closed forms are tested for: deep and shallow, also m < p.
template <class Body>
void for_each_shape(const Body& body) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (int micro_batches = 1; micro_batches <= 17; ++micro_batches) {
      SCOPED_TRACE("p = " + std::to_string(ranks) + ", m = " + std::to_string(micro_batches));
      body(ScheduleShape{ranks, micro_batches, 1});
    }
  }
}

// The same with 1 to 4 chunks.
template <class Body>
void for_each_looped_shape(const Body& body) {
  for (int chunks = 1; chunks <= 4; ++chunks) {
    SCOPED_TRACE("v = " + std::to_string(chunks));
    for_each_shape([&](const ScheduleShape& shape) {
      body(ScheduleShape{shape.ranks, shape.micro_batches, chunks});
    });
  }
}

// The makespan where a looped schedule's micro-batches of each chunk follow without gaps, in units
// of one micro-batch's work on one chunk.
int looped_makespan(const ScheduleShape& shape) {
  const int p = shape.ranks, m = shape.micro_batches, v = shape.chunks;
  return m >= p ? m * v + p - 1 : m + p * v - 1;
}

std::string refusal_of(std::string_view name, const ScheduleShape& shape) {
  try {
    (void)generate(name, shape);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(PlacementOfTest, IsThatOfTheSchedule) {
  for (const std::string& name : schedule_names()) {
    for (const int chunks : {1, 2, 3}) {
      const ScheduleShape shape{.ranks = 3, .micro_batches = 6, .chunks = chunks};
      try {
        EXPECT_EQ(placement_of(name, shape), generate(name, shape).placement) << name;
      } catch (const Error& refusal) {
        EXPECT_THROW((void)placement_of(name, shape), Error) << refusal.what();
      }
    }
  }
}

TEST(GPipeTest, GridIsTheOneInItsComment) {
  EXPECT_EQ(draw_grid(generate("gpipe", {4, 4, 1})),
            "rank 0 | F0 F1 F2 F3                   B0 B1 B2 B3\n"
            "rank 1 |    F0 F1 F2 F3             B0 B1 B2 B3\n"
            "rank 2 |       F0 F1 F2 F3       B0 B1 B2 B3\n"
            "rank 3 |          F0 F1 F2 F3 B0 B1 B2 B3\n");
}

TEST(GPipeTest, LifoGridIsTheOneInItsComment) {
  EXPECT_EQ(draw_grid(generate("gpipe-lifo", {4, 4, 1})),
            "rank 0 | F0 F1 F2 F3                   B3 B2 B1 B0\n"
            "rank 1 |    F0 F1 F2 F3             B3 B2 B1 B0\n"
            "rank 2 |       F0 F1 F2 F3       B3 B2 B1 B0\n"
            "rank 3 |          F0 F1 F2 F3 B3 B2 B1 B0\n");
}

TEST(OneFOneBTest, GridIsTheOneInItsComment) {
  EXPECT_EQ(draw_grid(generate("1f1b", {4, 6, 1})),
            "rank 0 | F0 F1 F2 F3          B0 F4 B1 F5 B2    B3    B4    B5\n"
            "rank 1 |    F0 F1 F2       B0 F3 B1 F4 B2 F5 B3    B4    B5\n"
            "rank 2 |       F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4    B5\n"
            "rank 3 |          F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5\n");
}

TEST(ForwardOnlyTest, GridIsTheOneInItsComment) {
  EXPECT_EQ(draw_grid(generate("forward-only", {3, 4, 1})),
            "rank 0 | F0 F1 F2 F3\n"
            "rank 1 |    F0 F1 F2 F3\n"
            "rank 2 |       F0 F1 F2 F3\n");
}

TEST(GPipeTest, KeepsEveryMicroBatchInFlight) {
  for_each_shape([](const ScheduleShape& shape) {
    for (const char* name : {"gpipe", "gpipe-lifo"}) {
      EXPECT_THAT(peak_in_flight(generate(name, shape)), ::testing::Each(shape.micro_batches));
    }
  });
}

TEST(OneFOneBTest, KeepsAtMostDepthMinusStageInFlight) {
  for_each_shape([](const ScheduleShape& shape) {
    const std::vector<int> peaks = peak_in_flight(generate("1f1b", shape));
    for (int rank = 0; rank < shape.ranks; ++rank) {
      EXPECT_EQ(peaks[static_cast<std::size_t>(rank)],
                std::min(shape.ranks - rank, shape.micro_batches));
    }
  });
}

TEST(ForwardOnlyTest, KeepsNothingOnceAMicroBatchHasPassed) {
  for_each_looped_shape([](const ScheduleShape& shape) {
    EXPECT_THAT(peak_in_flight(generate("forward-only", shape)), ::testing::Each(1));
  });
}

TEST(ForwardOnlyTest, MeetsTheClosedFormOfItsMakespanWithChunks) {
  SimulationTimes times;
  times.stages.resize(1);
  for_each_looped_shape([&](const ScheduleShape& shape) {
    EXPECT_EQ(simulate(generate("forward-only", shape), times).makespan, looped_makespan(shape));
  });
}

TEST(ForwardOnlyTest, FillsTheTurningRankOfAVPlacement) {
  SimulationTimes times;
  times.stages.resize(1);
  for_each_shape([&](const ScheduleShape& shape) {
    const Schedule schedule =
        generate_forward_only(Placement::v_shape(shape.ranks), shape.micro_batches);
    EXPECT_EQ(simulate(schedule, times).makespan, 2 * (shape.micro_batches + shape.ranks - 1));
  });
}

TEST(ForwardOnlyTest, RunsOverEveryPlacementWithoutBlockingSends) {
  const std::vector<Placement> placements = {
      Placement::linear(4),  Placement::looped(3, 3), Placement::looped(1, 3),
      Placement::v_shape(1), Placement::v_shape(4),   Placement::custom(3, {2, 0, 2, 1, 1, 0, 2})};
  for (const Placement& placement : placements) {
    for (int m = 1; m <= 17; ++m) {
      SCOPED_TRACE(std::to_string(placement.stages()) + " stages, m = " + std::to_string(m));
      const Schedule schedule = generate_forward_only(placement, m);
      EXPECT_EQ(schedule.placement, placement);
      const auto violation = check(schedule);
      ASSERT_FALSE(violation.has_value()) << violation->message;
      EXPECT_THAT(verify(testing::plan_of(schedule)).progresses_under,
                  ::testing::IsSupersetOf({TransportModel::kEager, TransportModel::kRendezvous}));
    }
  }
}

TEST(GenerateTest, EverySchedulePassesCheckForEveryShape) {
  for (const std::string& name : schedule_names()) {
    SCOPED_TRACE(name);
    for_each_shape([&](const ScheduleShape& shape) {
      const Schedule schedule = generate(name, shape);
      EXPECT_EQ(schedule.name, name);
      const auto violation = check(schedule);
      EXPECT_FALSE(violation.has_value()) << violation->message;
    });
  }
}

TEST(GenerateTest, OnlyDescendingBackwardsAreInexact) {
  EXPECT_TRUE(is_exact(generate("gpipe", {3, 5, 1})));
  EXPECT_TRUE(is_exact(generate("1f1b", {3, 5, 1})));
  EXPECT_TRUE(is_exact(generate("forward-only", {3, 5, 1})));
  EXPECT_FALSE(is_exact(generate("gpipe-lifo", {3, 2, 1})));
  EXPECT_TRUE(is_exact(generate("gpipe-lifo", {3, 1, 1})));
}

TEST(GenerateTest, UnknownNameListsTheKnownOnes) {
  const std::string refusal = refusal_of("1f2b", {2, 2, 1});
  EXPECT_THAT(refusal, HasSubstr("unknown schedule '1f2b'"));
  for (const std::string& name : schedule_names()) EXPECT_THAT(refusal, HasSubstr(name));
}

TEST(GenerateTest, IllegalShapeIsRefusedWithTheNearestLegalValue) {
  for (const std::string& name : schedule_names()) {
    EXPECT_THAT(refusal_of(name, {0, 4, 1}), HasSubstr("ranks is 0; the nearest legal value is 1"));
    EXPECT_THAT(refusal_of(name, {2, -3, 1}),
                HasSubstr("micro-batches is -3; the nearest legal value is 1"));
    EXPECT_THAT(refusal_of(name, {2, 4, -1}),
                HasSubstr("chunks is -1; the nearest legal value is 1"));
    const int most = std::numeric_limits<std::int32_t>::max() / stages_of(name, {1 << 16, 1, 1});
    EXPECT_THAT(refusal_of(name, {1 << 16, 1 << 16, 1}),
                HasSubstr("here " + std::to_string(most) + " micro-batches or fewer"));
    EXPECT_THROW((void)stages_of(name, {2, 4, -1}), Error);
  }
}

TEST(GenerateTest, AShapeWithoutChunksHasTwoWhereTheScheduleTakesSeveral) {
  for (const std::string& name : schedule_names()) {
    const bool several = name != "forward-only" && refusal_of(name, {2, 4, 2}) == "accepted";
    const ScheduleShape shape{.ranks = 2, .micro_batches = 4};
    EXPECT_EQ(stages_of(name, shape), several ? 4 : 2) << name;
    EXPECT_EQ(generate(name, shape).placement, placement_of(name, shape)) << name;
  }
}

TEST(GenerateTest, ChunksAreRefusedWhereARankHasOne) {
  for (const char* name : {"gpipe", "gpipe-lifo", "1f1b"}) {
    EXPECT_THAT(refusal_of(name, {2, 4, 2}),
                HasSubstr("chunks is 2, the nearest legal value is 1"));
  }
}

TEST(GenerateTest, NumberOfStagesIsKnownBeforehand) {
  for (const std::string& name : schedule_names()) {
    for (const ScheduleShape& shape : {ScheduleShape{4, 3, 1}, ScheduleShape{3, 5, 2}}) {
      if (refusal_of(name, shape) != "accepted") continue;
      EXPECT_EQ(stages_of(name, shape), generate(name, shape).placement.stages()) << name;
    }
  }
}

}  // namespace
}  // namespace sluice
