#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>
#include <string>

#include <sluice/error.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

namespace sluice {
namespace {

using ::testing::HasSubstr;

Simulation simulated(const Schedule& schedule) {
  return simulate(schedule, {.stages = {StageTimes{}}});
}

TEST(TimelineTextTest, HasARowPerRankInProportionToTime) {
  const Schedule schedule = generate("gpipe", {2, 2, 1});
  // Forwards take 1, backwards 2: the makespan is 9, at 4 columns each.
  EXPECT_EQ(draw_timeline(schedule, simulated(schedule), 36),
            "rank 0 |F0--F1--            B0------B1------\n"
            "rank 1 |    F0--F1--B0------B1------\n"
            "makespan 9, bubble 33.3 %\n");
}

TEST(TimelineTextTest, LeavesOutWhatHasNoColumn) {
  const Schedule schedule = generate("gpipe", {1, 30, 1});
  const std::string text = draw_timeline(schedule, simulated(schedule), 3);
  EXPECT_EQ(text.substr(0, text.find('\n')).size(), std::string("rank 0 |").size() + 3);
  EXPECT_THAT(draw_timeline(schedule, simulated(schedule), 1), HasSubstr("rank 0 |"));
}

TEST(TimelineTextTest, NamesTheStageWhereARankHasSeveral) {
  const Schedule schedule = generate("interleaved", {2, 2, 2});
  EXPECT_THAT(draw_timeline(schedule, simulated(schedule), 160), HasSubstr("2F0"));
}

TEST(TimelineTextTest, RefusesNoColumnsAndOtherSimulations) {
  const Schedule schedule = generate("gpipe", {2, 2, 1});
  EXPECT_THROW((void)draw_timeline(schedule, simulated(schedule), 0), Error);
  EXPECT_THROW((void)draw_timeline(schedule, Simulation{}, 80), Error);
  Simulation empty = simulated(schedule);
  empty.makespan = 0;
  for (auto& row : empty.timeline) row.clear();
  EXPECT_THAT(draw_timeline(schedule, empty, 80), HasSubstr("rank 1 |\n"));
}

}  // namespace
}  // namespace sluice
