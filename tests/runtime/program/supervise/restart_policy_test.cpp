#include "runtime/program/supervise/restart_policy.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace sluice::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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
  EXPECT_FALSE(attempt.ended);
}

TEST(AttemptTest, TheFirstProcessThatEndsIsKeptBesideAHang) {
  Attempt attempt;
  attempt.add({.kind = Kind::kHang, .hang = JobEvent::Hang::kEnded, .hosts = {"a"}, .ranks = {1}});
  attempt.add({.kind = Kind::kHang, .hang = JobEvent::Hang::kEnded, .hosts = {"b"}, .ranks = {2}});
  EXPECT_FALSE(attempt.hang);
  ASSERT_TRUE(attempt.ended);
  EXPECT_EQ(attempt.ended->ranks.front(), 1);
}

TEST(RunTotalsTest, CountsStepsThatStay) {
  EXPECT_EQ(totals_of({}).steps_lost, 0U);
  std::vector<AttemptSteps> all;
  all.push_back(steps(0, 50, 40, 10));
  all.push_back(steps(40, 100, 100, 12, true));
  const RunTotals totals = totals_of(all);
  EXPECT_EQ(totals.steps_lost, 10U);
  EXPECT_DOUBLE_EQ(totals.step_seconds, 8 + 12);
}

TEST(RunTotalsTest, AnOlderSaveTakesBackWhatCameAfterIt) {
  std::vector<AttemptSteps> all;
  all.push_back(steps(0, 50, 40, 10));
  all.push_back(steps(40, 60, 60, 4));
  all.push_back(steps(20, 100, 100, 16, true));  // both newer saves were damaged
  const RunTotals totals = totals_of(all);
  EXPECT_EQ(totals.steps_lost, 30U + 20U);
  EXPECT_DOUBLE_EQ(totals.step_seconds, 4 + 0 + 16);
}

TEST(RunTotalsTest, ARunThatFailsKeepsItsLastSave) {
  std::vector<AttemptSteps> all;
  all.push_back(steps(0, 50, 40, 10));
  all.push_back(steps(40, 60, 50, 2));
  const RunTotals totals = totals_of(all);
  EXPECT_EQ(totals.steps_lost, 20U);
  EXPECT_DOUBLE_EQ(totals.step_seconds, 8 + 1);
}

TEST(RunTotalsTest, AStartWithoutStepsCountsNothing) {
  std::vector<AttemptSteps> all;
  all.push_back(steps(7, 7, 7, 0));
  EXPECT_EQ(totals_of(all).steps_lost, 0U);
  EXPECT_EQ(totals_of(all).step_seconds, 0);
}

const std::vector<std::string> kNoHosts;
const std::vector<std::string> kHosts = {"node1", "node2", "node3"};

Attempt failed(double seconds = 1) {
  Attempt attempt;
  attempt.end = {137, false};
  attempt.seconds = seconds;
  return attempt;
}

Attempt saved(std::uint64_t start, std::uint64_t save) {
  Attempt attempt = failed();
  attempt.steps = AttemptSteps{.start = start, .last = save + 5, .saved = save, .seconds = 1};
  return attempt;
}

Attempt reported(const std::string& host, JobEvent::Hang hang) {
  Attempt attempt = saved(0, 10);
  attempt.end = {11, false};
  attempt.hang = JobEvent{
      .kind = JobEvent::Kind::kHang, .step = 12, .hang = hang, .hosts = {host}, .ranks = {2, 3}};
  return attempt;
}

Attempt lost(const std::string& host) { return reported(host, JobEvent::Hang::kLost); }

Attempt killed(const std::string& host) {
  Attempt attempt = failed();
  attempt.ended = JobEvent{
      .kind = JobEvent::Kind::kHang, .hang = JobEvent::Hang::kEnded, .hosts = {host}, .ranks = {2}};
  return attempt;
}

TEST(RestartPolicyTest, RetriesTheCodesOfTheTable) {
  std::vector<int> retried;
  for (int code = 0; code < 256; ++code) {
    Attempt attempt = failed();
    attempt.end = {code, false};
    if (RestartPolicy(1, 0).after(attempt, kNoHosts).again) retried.push_back(code);
  }
  EXPECT_THAT(retried, ElementsAre(1, 9, 10, 11, 134, 135, 136, 137, 138, 139, 205, 255));
}

TEST(RestartPolicyTest, AReportExplainsTheLaunchersOwnCode) {
  RestartPolicy policy(100, 0);
  Attempt attempt = lost("node2");
  attempt.end = {5, false};  // the job's own code wins
  EXPECT_FALSE(policy.after(attempt, kHosts).again);
  attempt.end = {99, false};
  EXPECT_TRUE(policy.after(attempt, kHosts).again);
  attempt = failed();
  attempt.end = {99, false};
  EXPECT_TRUE(policy.after(attempt, kHosts).again) << "a host was lost in the start before";
  EXPECT_FALSE(policy.after(attempt, kHosts).again);
}

TEST(DescribeTest, NamesTheCauseFirst) {
  EXPECT_EQ(describe(killed("node2")), "rank 2 on node2 was killed by SIGKILL");
  EXPECT_EQ(describe(failed()), "exit code 137: killed by SIGKILL");
  Attempt attempt = lost("node3");
  EXPECT_EQ(describe(attempt), "ranks 2, 3 on node3 stopped answering in step 12");
  attempt.hang->hang = JobEvent::Hang::kDeadlock;
  EXPECT_EQ(describe(attempt), "all ranks wait for each other in step 12");
  attempt = killed("node2");
  attempt.end = {11, false};
  EXPECT_EQ(describe(attempt),
            "exit code 11: a rank died or stopped answering; rank 2 on node2 ended first");
  attempt.end = {137, true};
  EXPECT_EQ(describe(attempt), "exit code 137: the launcher killed by SIGKILL");
  attempt = failed();
  attempt.end = {99, false};
  EXPECT_EQ(describe(attempt), "exit code 99");
}

double pause_after(RestartPolicy& policy, double seconds) {
  Attempt attempt = saved(0, 10);
  attempt.seconds = seconds;
  return policy.after(attempt, kNoHosts).pause;
}

TEST(PausesTest, GrowWhileStartsAreShort) {
  RestartPolicy policy(100, 1);
  std::vector<double> found;
  for (int i = 0; i < 8; ++i) found.push_back(pause_after(policy, 59 - i));
  EXPECT_THAT(found, ElementsAre(1, 2, 4, 8, 16, 32, 60, 60));
  EXPECT_EQ(pause_after(policy, 60), 1);
  EXPECT_EQ(pause_after(policy, 0), 2);
}

TEST(PausesTest, KeepToWhatIsAsked) {
  RestartPolicy none(100, 0);
  EXPECT_EQ(pause_after(none, 0), 0);
  EXPECT_EQ(pause_after(none, 0), 0);
  RestartPolicy slow(100, 300);
  EXPECT_EQ(pause_after(slow, 0), 300);
  EXPECT_EQ(pause_after(slow, 0), 300);
}

TEST(RestartPolicyTest, StopsAfterTwoRestartsWithoutProgress) {
  RestartPolicy policy(100, 1);
  EXPECT_TRUE(policy.after(failed(), kNoHosts).again);
  EXPECT_TRUE(policy.after(failed(), kNoHosts).again);
  const RestartDecision last = policy.after(failed(), kNoHosts);
  EXPECT_FALSE(last.again);
  EXPECT_EQ(last.reason, "two restarts in a row ended within a minute");
  EXPECT_EQ(policy.restarts(), 2);
}

TEST(RestartPolicyTest, AJobWithoutEventsMakesProgressByAMinute) {
  RestartPolicy policy(1000, 1);
  for (int i = 0; i < 50; ++i) {
    EXPECT_TRUE(policy.after(failed(60), kNoHosts).again);
    EXPECT_TRUE(policy.after(failed(59), kNoHosts).again);
  }
}

TEST(RestartPolicyTest, ASaveIsProgressAndTimeIsNot) {
  RestartPolicy policy(1000, 1);
  for (std::uint64_t step = 0; step < 500; step += 10) {
    EXPECT_TRUE(policy.after(saved(step, step + 10), kNoHosts).again);
  }
  EXPECT_TRUE(policy.after(saved(500, 500), kNoHosts).again);
  Attempt long_one = failed(1e5);  // it ended before its first event
  const RestartDecision last = policy.after(long_one, kNoHosts);
  EXPECT_FALSE(last.again);
  EXPECT_THAT(last.reason, HasSubstr("added no save"));
}

TEST(RestartPolicyTest, ASaveThatWasNotToldIsProgressOnceTheNextStartGoesOnFromIt) {
  RestartPolicy policy(100, 1);
  EXPECT_TRUE(policy.after(saved(0, 4), kNoHosts).again);
  // Each saves, and is killed before it can say so.
  for (std::uint64_t start = 4; start < 40; start += 4) {
    EXPECT_TRUE(policy.after(saved(start, start), kNoHosts).again) << start;
  }
  EXPECT_FALSE(policy.after(saved(36, 36), kNoHosts).again);
}

TEST(RestartPolicyTest, StartsThatGoBackAndForthBetweenOldSavesMakeNoProgress) {
  RestartPolicy policy(100, 1);
  EXPECT_TRUE(policy.after(saved(0, 8), kNoHosts).again);
  EXPECT_TRUE(policy.after(saved(4, 4), kNoHosts).again);  // the save of step 8 could not be read
  EXPECT_FALSE(policy.after(saved(8, 8), kNoHosts).again);
}

TEST(RestartPolicyTest, AllowsSoManyRestarts) {
  RestartPolicy none(0, 1);
  const RestartDecision refused = none.after(saved(0, 10), kNoHosts);
  EXPECT_FALSE(refused.again);
  EXPECT_THAT(refused.reason, HasSubstr("--restarts 0"));
  RestartPolicy two(2, 1);
  EXPECT_TRUE(two.after(saved(0, 10), kNoHosts).again);
  EXPECT_TRUE(two.after(saved(10, 20), kNoHosts).again);
  EXPECT_THAT(two.after(saved(20, 30), kNoHosts).reason, HasSubstr("2 restarts are all"));
}

TEST(RestartPolicyTest, LeavesOutAHostThatIsLostTwice) {
  RestartPolicy policy(100, 1);
  EXPECT_THAT(policy.after(lost("node2.cluster"), kHosts).left_out, IsEmpty());
  EXPECT_THAT(policy.after(lost("node3"), kHosts).left_out, IsEmpty());
  EXPECT_THAT(policy.after(saved(0, 10), kHosts).left_out, IsEmpty());
  EXPECT_THAT(policy.after(lost("node2"), kHosts).left_out, ElementsAre("node2"));
}

TEST(RestartPolicyTest, LeavesOutALostHostIfTheNextStartDoesNotBegin) {
  RestartPolicy policy(100, 1);
  EXPECT_THAT(policy.after(lost("node2"), kHosts).left_out, IsEmpty());
  EXPECT_THAT(policy.after(failed(1000), kHosts).left_out, ElementsAre("node2"));
  EXPECT_THAT(policy.after(failed(), kHosts).left_out, IsEmpty()) << "nobody knows why";
  RestartPolicy silent(100, 1);  // of a program without events of steps
  Attempt attempt = lost("node2");
  attempt.steps.reset();
  EXPECT_THAT(silent.after(attempt, kHosts).left_out, IsEmpty());
  EXPECT_THAT(silent.after(failed(), kHosts).left_out, ElementsAre("node2"));
  EXPECT_THAT(silent.after(attempt, kHosts).left_out, ElementsAre("node2"));
  EXPECT_THAT(silent.after(failed(), kHosts).left_out, IsEmpty()) << "it is left out already";
  EXPECT_THAT(silent.after(failed(60), kHosts).left_out, IsEmpty()) << "it ran";
}

TEST(RestartPolicyTest, TakesTheWordOfOpenMpiThatAHostIsLost) {
  RestartPolicy policy(100, 1);
  Attempt attempt = killed("node2");
  attempt.end = {205, false};
  EXPECT_THAT(policy.after(attempt, kHosts).left_out, IsEmpty());
  EXPECT_THAT(policy.after(failed(), kHosts).left_out, ElementsAre("node2"));
}

TEST(RestartPolicyTest, OnlyALostHostIsToBlame) {
  for (const auto hang : {JobEvent::Hang::kDeadlock, JobEvent::Hang::kBusy}) {
    RestartPolicy policy(100, 1);
    for (int i = 0; i < 3; ++i) {
      EXPECT_THAT(policy.after(reported("node2", hang), kHosts).left_out, IsEmpty());
    }
  }
}

TEST(RestartPolicyTest, LeavingAHostOutIsAFreshStart) {
  RestartPolicy policy(100, 1);
  EXPECT_TRUE(policy.after(lost("node2"), kHosts).again);
  EXPECT_TRUE(policy.after(failed(), kHosts).again);
  EXPECT_TRUE(policy.after(failed(), kHosts).again);
  EXPECT_FALSE(policy.after(failed(), kHosts).again);
}

TEST(RestartPolicyTest, LeavesOutAHostWhoseRanksAreKilledThreeTimesInARow) {
  RestartPolicy policy(100, 1);
  EXPECT_THAT(policy.after(killed("node2"), kHosts).left_out, IsEmpty());
  EXPECT_THAT(policy.after(killed("node2"), kHosts).left_out, IsEmpty());
  const RestartDecision third = policy.after(killed("node2"), kHosts);
  EXPECT_THAT(third.left_out, ElementsAre("node2"));
  EXPECT_TRUE(third.again);
  RestartPolicy other(100, 1);
  for (const char* host : {"node1", "node1", "node2", "node1", "node1"}) {
    EXPECT_THAT(other.after(killed(host), kHosts).left_out, IsEmpty());
  }
}

TEST(RestartPolicyTest, KeepsTheLastHostAndUnknownOnes) {
  RestartPolicy policy(100, 1);
  const std::vector<std::string> one = {"node1"};
  for (int i = 0; i < 4; ++i) EXPECT_THAT(policy.after(lost("node1"), one).left_out, IsEmpty());
  for (int i = 0; i < 4; ++i) EXPECT_THAT(policy.after(killed("node1"), one).left_out, IsEmpty());
  for (int i = 0; i < 4; ++i) EXPECT_THAT(policy.after(lost("other"), kHosts).left_out, IsEmpty());
  RestartPolicy all(100, 1);
  Attempt attempt = lost("node1");
  attempt.hang->hosts = kHosts;
  EXPECT_THAT(all.after(attempt, kHosts).left_out, IsEmpty());
  EXPECT_THAT(all.after(attempt, kHosts).left_out, ElementsAre("node1", "node2"));
}

}  // namespace
}  // namespace sluice::testing
