#include "runtime/supervise/restart_policy.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace sluice::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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

Attempt lost(const std::string& host) {
  Attempt attempt = failed();
  attempt.findings.lost_hosts = {host};
  return attempt;
}

Attempt killed(const std::string& host) {
  Attempt attempt = failed();
  attempt.findings.killed = {2, host, 9};
  return attempt;
}

TEST(ExitKindTest, IsThatOfTheTable) {
  std::vector<int> retried;
  for (int code = 0; code < 256; ++code) {
    if (kind_of_exit(code) == ExitKind::kRetried) retried.push_back(code);
  }
  EXPECT_THAT(retried, ElementsAre(1, 9, 10, 11, 134, 135, 136, 137, 138, 139));
  EXPECT_EQ(kind_of_exit(0), ExitKind::kDone);
  EXPECT_EQ(kind_of_exit(12), ExitKind::kStopped);
  for (const int code : {2, 3, 4, 5, 6, 7, 8, 13, 70, 127, 143, 255}) {
    EXPECT_EQ(kind_of_exit(code), ExitKind::kHopeless) << code;
  }
}

TEST(ExitKindTest, ALostHostExplainsTheLaunchersOwnCode) {
  Attempt attempt = lost("node2");
  attempt.end = {255, false};
  EXPECT_EQ(kind_of(attempt), ExitKind::kRetried);
  attempt.end = {5, false};  // the job's own code wins
  EXPECT_EQ(kind_of(attempt), ExitKind::kHopeless);
  attempt.end = {0, false};
  EXPECT_EQ(kind_of(attempt), ExitKind::kDone);
}

TEST(DescribeTest, NamesTheCauseFirst) {
  EXPECT_EQ(describe(killed("node2")), "rank 2 on node2 was killed by SIGKILL");
  EXPECT_EQ(describe(lost("node2")), "lost node2");
  EXPECT_EQ(describe(failed()), "exit code 137: killed by SIGKILL");
  Attempt attempt = lost("node2");
  attempt.hang =
      JobEvent{.kind = JobEvent::Kind::kHang, .step = 12, .hosts = {"node3"}, .ranks = {2}};
  EXPECT_EQ(describe(attempt), "rank 2 on node3 stopped answering in step 12");
  attempt.hang->deadlock = true;
  EXPECT_EQ(describe(attempt), "all ranks wait for each other in step 12");
  EXPECT_EQ(describe_exit({11, false}), "exit code 11: a rank died or stopped answering");
  EXPECT_EQ(describe_exit({143, true}), "exit code 143: the launcher killed by SIGTERM");
  EXPECT_EQ(describe_exit({99, false}), "exit code 99");
}

TEST(PausesTest, GrowWhileStartsAreShort) {
  Pauses pauses(1);
  std::vector<double> found;
  for (int i = 0; i < 8; ++i) found.push_back(pauses.after(59 - i));
  EXPECT_THAT(found, ElementsAre(1, 2, 4, 8, 16, 32, 60, 60));
  EXPECT_EQ(pauses.after(60), 1);
  EXPECT_EQ(pauses.after(0), 2);
}

TEST(PausesTest, KeepToWhatIsAsked) {
  Pauses none(0);
  EXPECT_EQ(none.after(0), 0);
  EXPECT_EQ(none.after(0), 0);
  Pauses slow(300);
  EXPECT_EQ(slow.after(0), 300);
  EXPECT_EQ(slow.after(0), 300);
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

TEST(RestartPolicyTest, CountsAHostOnceAnAttempt) {
  RestartPolicy policy(100, 1);
  Attempt attempt = lost("node2");
  attempt.hang = JobEvent{.kind = JobEvent::Kind::kHang, .hosts = {"node2"}};
  EXPECT_THAT(policy.after(attempt, kHosts).left_out, IsEmpty());
  attempt.hang->deadlock = true;  // blames nobody
  attempt.findings.lost_hosts.clear();
  EXPECT_THAT(policy.after(attempt, kHosts).left_out, IsEmpty());
}

TEST(RestartPolicyTest, LeavingAHostOutIsAFreshStart) {
  RestartPolicy policy(100, 1);
  EXPECT_TRUE(policy.after(lost("node2"), kHosts).again);
  EXPECT_TRUE(policy.after(lost("node2"), kHosts).again);
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
  Attempt attempt = failed();
  attempt.findings.lost_hosts = kHosts;
  EXPECT_THAT(all.after(attempt, kHosts).left_out, IsEmpty());
  EXPECT_THAT(all.after(attempt, kHosts).left_out, ElementsAre("node1", "node2"));
}

}  // namespace
}  // namespace sluice::testing
