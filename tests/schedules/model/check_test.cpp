#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

#include "tests/schedules/hand_made.hpp"

namespace sluice {
namespace {

using testing::hand_made;
using ::testing::HasSubstr;

Schedule small() {
  return hand_made(Placement::linear(2), 2, {"0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"});
}

void expect_violation(const Schedule& schedule, int rank, int position, const std::string& message,
                      const std::string& marked) {
  const auto violation = check(schedule);
  ASSERT_TRUE(violation.has_value());
  EXPECT_EQ(violation->rank, rank);
  EXPECT_EQ(violation->position, position);
  EXPECT_THAT(violation->message, HasSubstr(message));
  EXPECT_THAT(
      describe(schedule, *violation),
      ::testing::AllOf(::testing::StartsWith(violation->message + '\n'), HasSubstr(marked)));
}

TEST(CheckTest, AcceptsHandMadeSplitInterleavedAndOverlappedSchedules) {
  for (const Schedule& schedule : testing::all_hand_made()) {
    const auto violation = check(schedule);
    EXPECT_FALSE(violation.has_value()) << describe(schedule, *violation);
    const auto lowered = check(lower(schedule, {}));
    EXPECT_FALSE(lowered.has_value()) << lowered->message;
  }
}

TEST(CheckTest, NamesADeadlockAndItsCycle) {
  const Schedule schedule =
      hand_made(Placement::linear(2), 2, {"0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"});
  expect_violation(schedule, 0, 1,
                   "the order deadlocks: rank 0 at step 1 (0B0) waits for 1B0 of rank 1; rank 1 at "
                   "step 1 (1F1) waits for 0F1 of rank 0",
                   "rank>0 | F0   [B0] F1   B1\n");
}

TEST(CheckTest, FindsTheCycleBehindARankThatMerelyWaits) {
  const Schedule schedule =
      hand_made(Placement::linear(3), 2, {"0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"});
  expect_violation(schedule, 1, 1, "rank 1 at step 1 (1B0) waits for 2B0 of rank 2", "[B0]");
}

TEST(CheckTest, NamesAMissingActionWhereItsAbsenceShows) {
  Schedule schedule = small();
  schedule.ranks[1].erase(schedule.ranks[1].begin() + 2);
  expect_violation(schedule, 1, 2, "rank 1: 1F1 is missing", "[B1]");
  schedule = small();
  schedule.ranks[0].pop_back();
  expect_violation(schedule, 0, 1, "rank 0: 0B1 is missing", "[F1]");
  schedule.ranks[0].erase(schedule.ranks[0].begin() + 1);
  expect_violation(schedule, 0, -1, "rank 0: 0F1 is missing", "rank>0 |");
}

TEST(CheckTest, NamesTheMissingHalfOfASplitBackward) {
  Schedule schedule = testing::v_split();
  schedule.ranks[0].pop_back();
  expect_violation(schedule, 0, 1, "0W1 is missing", "[0F1]");
}

TEST(CheckTest, NamesADoubledAction) {
  Schedule schedule = small();
  schedule.ranks[1].push_back(parse_step("1F0"));
  expect_violation(schedule, 1, 4,
                   "rank 1, step 4: 1F0 appears a second time; the first is at step 0", "[F0]");
}

TEST(CheckTest, NamesTheRankAMisplacedActionBelongsTo) {
  Schedule schedule = small();
  schedule.ranks[0].insert(schedule.ranks[0].begin() + 2, parse_step("1F0"));
  schedule.ranks[1].erase(schedule.ranks[1].begin());
  expect_violation(schedule, 0, 2, "1F0 is on rank 0, but stage 1 belongs to rank 1", "[1F0]");
}

TEST(CheckTest, NamesIndicesOutOfRange) {
  Schedule schedule = small();
  schedule.ranks[0][1] = parse_step("2F1");
  expect_violation(schedule, 0, 1, "2F1 names stage 2; legal stages are 0 to 1", "[2F1]");
  schedule = small();
  schedule.ranks[0][1] = parse_step("0F2");
  expect_violation(schedule, 0, 1, "0F2 names micro-batch 2; legal micro-batches are 0 to 1",
                   "[F2]");
}

TEST(CheckTest, NamesABackwardBeforeItsForwardAndAWeightBeforeItsInput) {
  Schedule schedule = small();
  std::swap(schedule.ranks[1][0], schedule.ranks[1][1]);
  expect_violation(schedule, 1, 0, "1B0 comes before 1F0, which it needs", "[B0]");
  schedule = testing::v_split();
  std::swap(schedule.ranks[0][3], schedule.ranks[0][4]);
  expect_violation(schedule, 0, 3, "3W0 comes before 3I0, which it needs", "[3W0]");
}

TEST(CheckTest, RefusesAWholeAndASplitBackwardOfOneMicroBatch) {
  Schedule schedule = small();
  schedule.ranks[1].push_back(parse_step("1W0"));
  expect_violation(schedule, 1, 4, "1W0 comes in addition to another backward", "[W0]");
}

TEST(CheckTest, RefusesBackwardsInAForwardOnlySchedule) {
  Schedule schedule = small();
  schedule.forward_only = true;
  expect_violation(schedule, 0, 2, "0B0 has no place in a forward-only schedule", "[B0]");
}

TEST(CheckTest, NamesASendWithoutReceiveAndAReceiveWithoutSend) {
  Schedule schedule = lower(small(), {});
  const Schedule whole = schedule;
  schedule.ranks[1].erase(schedule.ranks[1].begin());
  expect_violation(schedule, 0, 1, "0SEND_F0 has no receive; rank 1 lacks 1RECV_F0", "[SEND_F0]");
  schedule = whole;
  schedule.ranks[0].erase(schedule.ranks[0].begin() + 1);
  expect_violation(schedule, 1, 0, "1RECV_F0 has no send; rank 0 lacks 0SEND_F0", "[RECV_F0]");
  schedule.ranks[1].erase(schedule.ranks[1].begin());
  expect_violation(schedule, 0, 0, "0SEND_F0 is missing", "[F0]");
}

TEST(CheckTest, RefusesMessagesWithinARankAndPastTheEnds) {
  Schedule schedule = testing::v_split();
  schedule.ranks[1].insert(schedule.ranks[1].begin() + 1, parse_step("1SEND_F0"));
  expect_violation(schedule, 1, 1, "1SEND_F0 is a message to the same rank", "[1SEND_F0]");
  schedule = small();
  schedule.ranks[0].insert(schedule.ranks[0].begin(), parse_step("0RECV_F0"));
  expect_violation(schedule, 0, 0, "0RECV_F0 has no stage on its other side", "[RECV_F0]");
}

TEST(CheckTest, FindsReceivesThatWaitForEachOther) {
  Schedule schedule = lower(small(), {});
  // Rank 1 needs micro-batch 1 first. Rank 0 sends it only after the gradient that rank 1 sends
  // later.
  schedule.ranks[0] =
      hand_made(Placement::linear(1), 1, {"0F0 0SEND_F0 0F1 0RECV_B0 0B0 0SEND_F1 0RECV_B1 0B1"})
          .ranks[0];
  schedule.ranks[1] =
      hand_made(Placement::linear(1), 1, {"1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"})
          .ranks[0];
  expect_violation(schedule, 0, 3,
                   "rank 0 at step 3 (0RECV_B0) waits for 1SEND_B0 of rank 1; rank 1 at step 2 "
                   "(1RECV_F1) waits for 0SEND_F1 of rank 0",
                   "[RECV_B0]");
}

TEST(CheckTest, RefusesOverlappedPairsThatNeedEachOther) {
  expect_violation(hand_made(Placement::linear(1), 1, {"(0F0;0B0)OVERLAP_F_B"}), 0, 0,
                   "pairs actions of which one needs the other", "[F0+B0]");
  expect_violation(hand_made(Placement::custom(1, {0, 0}), 1, {"(0F0;1F0)OVERLAP_F_B 1B0 0B0"}), 0,
                   0, "rank 0 at step 0 ((0F0;1F0)OVERLAP_F_B) waits for 0F0 of rank 0",
                   "[0F0+1F0]");
}

TEST(CheckTest, RefusesAndDrawsOverlapsThatDoNotCompute) {
  Schedule schedule = small();
  schedule.ranks[0][1].overlapped = parse_action("0REDUCE_GRAD");
  expect_violation(schedule, 0, 1, "overlaps an action that does not compute", "[F1+REDUCE_GRAD]");
}

TEST(CheckTest, RefusesListsThatDoNotFitThePlacement) {
  Schedule schedule = small();
  schedule.ranks.pop_back();
  expect_violation(schedule, -1, -1, "lists 1 ranks, its placement has 2", "F0 F1 B0 B1");
}

TEST(DrawGridTest, PutsTheStageInFrontWhereARankHasSeveral) {
  EXPECT_EQ(draw_grid(testing::v_split()),
            "rank 0 | 0F0 0F1     3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1\n"
            "rank 1 |     1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 2I1 1I1 2W1 1W1\n");
}

}  // namespace
}  // namespace sluice
