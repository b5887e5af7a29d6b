#include "runtime/supervise/run_account.hpp"

#include <gtest/gtest.h>

namespace sluice::testing {
namespace {

using Kind = JobEvent::Kind;

AttemptSteps steps(std::uint64_t start, std::uint64_t last, std::uint64_t saved, double seconds,
                   bool complete = false) {
  return {.start = start, .last = last, .saved = saved, .seconds = seconds, .complete = complete};
}

TEST(AttemptTest, FollowsTheEventsOfATraining) {
  Attempt attempt;
  attempt.add({.kind = Kind::kStart, .step = 10});
  attempt.add({.kind = Kind::kStep, .step = 14, .seconds = 2});
  attempt.add({.kind = Kind::kSave, .step = 12});
  attempt.add({.kind = Kind::kStep, .step = 18, .seconds = 4});
  ASSERT_TRUE(attempt.steps);
  EXPECT_EQ(attempt.steps->start, 10U);
  EXPECT_EQ(attempt.steps->last, 18U);
  EXPECT_EQ(attempt.steps->saved, 12U);
  EXPECT_EQ(attempt.steps->seconds, 4);
  EXPECT_FALSE(attempt.steps->complete);
  attempt.add({.kind = Kind::kEnd, .step = 20, .seconds = 5});
  EXPECT_TRUE(attempt.steps->complete);
  EXPECT_FALSE(attempt.hang);
}

TEST(AttemptTest, ASaveBetweenReportsIsAStepThatIsDone) {
  Attempt attempt;
  attempt.add({.kind = Kind::kStart, .step = 0});
  attempt.add({.kind = Kind::kSave, .step = 40});
  EXPECT_EQ(attempt.steps->last, 40U);
}

TEST(AttemptTest, TheFirstReportOfAHangCounts) {
  Attempt attempt;
  attempt.add({.kind = Kind::kHang, .step = 3, .hosts = {"a"}});
  attempt.add({.kind = Kind::kHang, .step = 4, .hosts = {"b"}});
  ASSERT_TRUE(attempt.hang);
  EXPECT_EQ(attempt.hang->hosts.front(), "a");
  EXPECT_FALSE(attempt.steps);
}

TEST(RunAccountTest, CountsStepsThatStay) {
  RunAccount account;
  EXPECT_TRUE(account.empty());
  account.add(steps(0, 50, 40, 10));
  account.add(steps(40, 100, 100, 12, true));
  const RunTotals totals = account.totals();
  EXPECT_EQ(totals.steps_lost, 10U);
  EXPECT_DOUBLE_EQ(totals.step_seconds, 8 + 12);
}

TEST(RunAccountTest, AnOlderSaveTakesBackWhatCameAfterIt) {
  RunAccount account;
  account.add(steps(0, 50, 40, 10));
  account.add(steps(40, 60, 60, 4));
  account.add(steps(20, 100, 100, 16, true));  // both newer saves were damaged
  const RunTotals totals = account.totals();
  EXPECT_EQ(totals.steps_lost, 30U + 20U);
  EXPECT_DOUBLE_EQ(totals.step_seconds, 4 + 0 + 16);
}

TEST(RunAccountTest, ARunThatFailsKeepsItsLastSave) {
  RunAccount account;
  account.add(steps(0, 50, 40, 10));
  account.add(steps(40, 60, 50, 2));
  const RunTotals totals = account.totals();
  EXPECT_EQ(totals.steps_lost, 20U);
  EXPECT_DOUBLE_EQ(totals.step_seconds, 8 + 1);
}

TEST(RunAccountTest, AStartWithoutStepsCountsNothing) {
  RunAccount account;
  account.add(steps(7, 7, 7, 0));
  EXPECT_EQ(account.totals().steps_lost, 0U);
  EXPECT_EQ(account.totals().step_seconds, 0);
}

}  // namespace
}  // namespace sluice::testing
