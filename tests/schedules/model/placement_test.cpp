#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include <sluice/error.hpp>
#include <sluice/schedule.hpp>

namespace sluice {
namespace {

using ::testing::ElementsAre;

TEST(PlacementTest, LinearPutsStageOnItsOwnRank) {
  const Placement placement = Placement::linear(3);
  EXPECT_EQ(placement.stages(), 3);
  for (int rank = 0; rank < 3; ++rank) EXPECT_THAT(placement.stages_of(rank), ElementsAre(rank));
}

TEST(PlacementTest, LoopedGoesAroundTheRanks) {
  const Placement placement = Placement::looped(3, 2);
  EXPECT_EQ(placement.stages(), 6);
  EXPECT_THAT(placement.stages_of(1), ElementsAre(1, 4));
  EXPECT_EQ(placement.rank_of(5), 2);
}

TEST(PlacementTest, VShapeGoesThereAndBack) {
  const Placement placement = Placement::v_shape(3);
  EXPECT_THAT(placement.stages_of(0), ElementsAre(0, 5));
  EXPECT_THAT(placement.stages_of(1), ElementsAre(1, 4));
  EXPECT_THAT(placement.stages_of(2), ElementsAre(2, 3));
}

TEST(PlacementTest, CustomTakesAnyMapThatUsesEveryRank) {
  EXPECT_THAT(Placement::custom(2, {1, 0, 0}).stages_of(0), ElementsAre(1, 2));
  EXPECT_EQ(Placement::custom(2, {0, 1}), Placement::linear(2));
}

TEST(PlacementTest, RefusesRanksWithoutStagesAndStagesWithoutRanks) {
  EXPECT_THROW((void)Placement::linear(0), Error);
  EXPECT_THROW((void)Placement::looped(2, 0), Error);
  EXPECT_THROW((void)Placement::looped(1 << 20, 1 << 20), Error);
  EXPECT_THROW((void)Placement::v_shape(-1), Error);
  EXPECT_THROW((void)Placement::custom(2, {0, 0}), Error);
  EXPECT_THROW((void)Placement::custom(2, {0, 1, 2}), Error);
  EXPECT_THROW((void)Placement::custom(2, {0, 1, -1}), Error);
}

TEST(AppendTest, RefusesStagesThatThePlacementDoesNotHave) {
  Schedule schedule = empty_schedule("own", Placement::linear(2), 1);
  append(schedule, ActionKind::kForward, 1, 0);
  EXPECT_EQ(schedule.ranks[1].size(), 1U);
  for (const int stage : {-1, 2, 1 << 30}) {
    EXPECT_THROW(append(schedule, ActionKind::kForward, stage, 0), Error);
  }
  schedule.ranks.pop_back();
  EXPECT_THROW(append(schedule, ActionKind::kForward, 1, 0), Error);
}

TEST(IsExactTest, RefusesStagesThatThePlacementDoesNotHave) {
  for (const int stage : {-1, 2, 1 << 28}) {
    Schedule schedule = empty_schedule("own", Placement::linear(2), 1);
    schedule.ranks[0].push_back(
        {{.kind = ActionKind::kBackward, .stage = stage, .micro_batch = 0}});
    EXPECT_THROW((void)is_exact(schedule), Error);
  }
}

}  // namespace
}  // namespace sluice
