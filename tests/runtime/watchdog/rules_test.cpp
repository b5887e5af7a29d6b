#include "runtime/watchdog/rules.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/base/index.hpp"
#include "comm/group/binomial_tree.hpp"
#include "runtime/watchdog/report.hpp"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr WatchLimits kLimits = {.timeout = 30, .action_timeout = 0, .beat = 1};

// A job whose ranks all compute; cases change what they are about.
struct Job {
  explicit Job(const std::vector<std::string>& hosts) : sightings(hosts.size()) {
    for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
      ranks.push_back({.host = hosts[rank], .stages = {static_cast<int>(rank)}, .replica = 0});
      Sighting& each = sightings[rank];
      each.observed = each.seen = true;
      Activity& now = each.status.activity;
      now.doing = Doing::kOperation;
      now.stage = static_cast<int>(rank);
      now.micro_batch = 5;
      now.step = 1207;
      now.run = 9;
    }
    monitors = monitors_of(ranks);
  }

  Activity& activity(std::size_t rank) { return sightings[rank].status.activity; }
  // `rank` waits for `peer` since `still` seconds; `needed`: the op of the peer's plan.
  void wait(std::size_t rank, int peer, double still, std::int32_t needed = -1) {
    Activity& now = activity(rank);
    now.waits = true;
    now.kind = OpKind::kWaitRecv;
    now.action = ActionKind::kRecvForward;
    now.subject = {.what = WaitSubject::What::kReceive,
                   .peer = peer,
                   .tag = 3,
                   .bytes = 4096,
                   .needed_op = needed};
    sightings[rank].status.still = still;
  }
  [[nodiscard]] WatchView view(int me = 0) const {
    return {.me = me,
            .monitors = monitors,
            .ranks = ranks,
            .sightings = sightings,
            .network_down = network_down};
  }
  [[nodiscard]] std::optional<Verdict> judged(int me = 0) const { return judge(view(me), kLimits); }

  std::vector<WatchedRank> ranks;
  std::vector<Sighting> sightings;
  std::vector<int> monitors;
  bool network_down = false;
};

const std::vector<std::string> kOneHost = {"a", "a", "a", "a"};
const std::vector<std::string> kThreeHosts = {"a", "a", "b", "b", "c", "c"};

TEST(WatchRulesTest, SayNothingWhileAllRanksAreHeard) {
  Job job(kOneHost);
  EXPECT_FALSE(job.judged());
  job.wait(0, 1, 500);
  job.wait(1, 2, 500);
  job.wait(3, 2, 500);
  EXPECT_FALSE(job.judged()) << "rank 2 computes";
}

TEST(WatchRulesTest, NameASilentRank) {
  Job job(kOneHost);
  job.sightings[2].silent = 31;
  const auto verdict = job.judged();
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->kind, Verdict::Kind::kLost);
  EXPECT_THAT(verdict->ranks, ElementsAre(2));
  EXPECT_EQ(headline(job.view(), *verdict),
            "rank 2 on a (stage 2) is lost: silent for 31 s; last seen in 2F5 of step 1207");
  EXPECT_EQ(hang_event(job.view(), *verdict),
            R"({"event":"hang","kind":"lost","hosts":["a"],"ranks":[2],"step":1207})");
}

TEST(WatchRulesTest, LeaveTheVerdictToTheLowestMonitorThatIsLeft) {
  Job job(kOneHost);
  job.sightings[2].silent = 31;
  EXPECT_FALSE(job.judged(1)) << "rank 0 decides";
  job.sightings[0].silent = 32;
  const auto verdict = job.judged(1);
  ASSERT_TRUE(verdict);
  EXPECT_THAT(verdict->ranks, ElementsAre(0, 2));
  EXPECT_FALSE(job.judged(3));
}

TEST(WatchRulesTest, WaitForRanksThatAreAboutToBeLost) {
  Job job(kThreeHosts);
  job.sightings[2].silent = 30.1;
  job.sightings[3].silent = 29.5;
  EXPECT_FALSE(job.judged());
  job.sightings[3].silent = 30.2;
  const auto verdict = job.judged();
  ASSERT_TRUE(verdict);
  EXPECT_THAT(verdict->ranks, ElementsAre(2, 3));
  EXPECT_FALSE(verdict->cut_off);
}

TEST(WatchRulesTest, BlameTheOwnHostWhereMostHostsAreSilent) {
  Job job(kThreeHosts);
  for (const std::size_t rank : {0U, 1U, 4U, 5U}) job.sightings[rank].silent = 31;
  const auto verdict = job.judged(2);
  ASSERT_TRUE(verdict);
  EXPECT_TRUE(verdict->cut_off);
  EXPECT_THAT(verdict->ranks, ElementsAre(2, 3));
  EXPECT_THAT(headline(job.view(2), *verdict), HasSubstr("cut off from the other hosts"));
}

TEST(WatchRulesTest, BlameTheOwnHostOfTwoWhereItsNetworkIsDown) {
  Job job({"a", "b"});
  job.sightings[1].silent = 31;
  EXPECT_THAT(job.judged(0)->ranks, ElementsAre(1));
  job.network_down = true;
  EXPECT_THAT(job.judged(0)->ranks, ElementsAre(0));
}

// Ranks that stopped together on one host are no cut network: their host is heard.
TEST(WatchRulesTest, BlameStoppedProcessesOfAHostThatIsHeard) {
  Job job(kOneHost);
  for (const std::size_t rank : {1U, 2U, 3U}) job.sightings[rank].silent = 31;
  const auto verdict = job.judged();
  ASSERT_TRUE(verdict);
  EXPECT_FALSE(verdict->cut_off);
  EXPECT_THAT(verdict->ranks, ElementsAre(1, 2, 3));
}

TEST(WatchRulesTest, GiveTheLauncherTimeAfterAProcessHasEnded) {
  Job job(kOneHost);
  job.sightings[1].gone = true;
  job.sightings[1].gone_for = 1;
  EXPECT_FALSE(job.judged());
  job.sightings[1].gone_for = 4;
  const auto verdict = job.judged();
  ASSERT_TRUE(verdict);
  EXPECT_THAT(verdict->ranks, ElementsAre(1));
  EXPECT_THAT(headline(job.view(), *verdict), HasSubstr("its process has ended"));
  job.sightings[2].silent = 31;
  EXPECT_THAT(headline(job.view(), *job.judged()),
              HasSubstr("ranks 1, 2 on a are lost: 1 ended, 2 silent for 31 s; last seen in 1F5"));
  EXPECT_THAT(hang_event(job.view(), *verdict), HasSubstr(R"("kind":"ended")"));
}

TEST(WatchRulesTest, NameBothEndsOfADeadlock) {
  Job job(kOneHost);
  job.activity(1).op = 10;
  job.activity(2).op = 12;
  job.wait(0, 1, 60);
  job.wait(1, 2, 50, 12);
  job.wait(2, 1, 40, 15);
  job.wait(3, 2, 35);
  const auto verdict = job.judged();
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->kind, Verdict::Kind::kDeadlock);
  EXPECT_THAT(verdict->ranks, ElementsAre(1, 2));
  EXPECT_EQ(headline(job.view(), *verdict),
            "deadlock: rank 1 on a (stage 1) waits for 1RECV_F5 from rank 2 (tag 3, 4096 bytes): "
            "never sent; rank 2 on a (stage 2) waits for 2RECV_F5 from rank 1 (tag 3, 4096 bytes): "
            "never sent; all ranks wait, none has computed for 35 s");
}

TEST(WatchRulesTest, NameBothEndsOfAMessageThatDoesNotArrive) {
  Job job({"a", "b", "c", "d"});
  for (const std::size_t rank : {0U, 1U, 2U, 3U}) job.wait(rank, 2, 40);
  job.activity(3).op = 20;
  job.wait(2, 3, 40, 12);
  const auto verdict = job.judged();
  ASSERT_TRUE(verdict);
  EXPECT_THAT(verdict->ranks, ElementsAre(2, 3));
  EXPECT_THAT(rank_lines(job.view(), kLimits), HasSubstr("sent, but it does not arrive"));
}

TEST(WatchRulesTest, AreNoDeadlockWhereARankComputesOrIsNotHeard) {
  Job job(kOneHost);
  for (const std::size_t rank : {0U, 1U, 2U, 3U}) job.wait(rank, rank == 0 ? 1 : 0, 40);
  ASSERT_TRUE(job.judged());
  job.sightings[2].silent = 10;
  EXPECT_FALSE(job.judged()) << "rank 2 may have moved on";
  job.sightings[2].silent = 0;
  job.activity(2).waits = false;
  EXPECT_FALSE(job.judged()) << "rank 2 computes";
  job.activity(2).waits = true;
  job.sightings[2].status.still = 29;
  EXPECT_FALSE(job.judged()) << "rank 2 has moved";
}

TEST(WatchRulesTest, AWaitForARankThatHasLeftIsADeadlock) {
  Job job(kOneHost);
  for (const std::size_t rank : {0U, 1U, 2U}) job.wait(rank, 3, 40);
  job.sightings[3].left = true;
  const auto verdict = job.judged();
  ASSERT_TRUE(verdict);
  EXPECT_THAT(headline(job.view(), *verdict), HasSubstr("rank 3 has destroyed its pipeline"));
}

// Ranks of a gather wait for whom others wait: the chain ends at the one that does not come.
TEST(WatchRulesTest, FollowATreeToTheRankThatHasLeft) {
  Job job(std::vector<std::string>(16, "a"));
  for (int rank = 0; rank < 16; ++rank) {
    job.wait(at(rank), rank == 0 ? 8 : tree_parent(rank), 40);  // for the broadcast that follows
  }
  job.wait(8, 12, 40);
  job.wait(12, 14, 40);
  job.sightings[14].left = true;
  const auto verdict = job.judged();
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->kind, Verdict::Kind::kDeadlock);
  ASSERT_GE(verdict->ranks.size(), 4U);
  EXPECT_THAT(std::vector<int>(verdict->ranks.end() - 4, verdict->ranks.end()),
              ElementsAre(0, 8, 12, 14));
  EXPECT_THAT(headline(job.view(), *verdict), HasSubstr("rank 14 has destroyed its pipeline"));
}

TEST(WatchRulesTest, SayAmongWhomARankWaits) {
  Job job(kOneHost);
  const std::vector<std::pair<std::optional<Axis>, const char*>> groups = {
      {std::nullopt, "among all ranks"},
      {Axis::kPipeline, "among the pipeline's ranks"},
      {Axis::kReplica, "among the replicas"},
      {Axis::kTensor, "among the ranks of a stage"}};
  for (const auto& [axis, text] : groups) {
    job.wait(1, 0, 1);
    job.activity(1).subject.what = WaitSubject::What::kCollectiveReceive;
    job.activity(1).axis = axis;
    EXPECT_THAT(rank_lines(job.view(), kLimits), HasSubstr(text));
  }
}

// Ranks 0 and 2 share a stage, and 1 and 3 as replicas of it another one.
TEST(WatchRulesTest, SayWhoDidNotComeToACollective) {
  Job job({"a", "a", "a", "a"});
  const auto place = [&](std::size_t rank, int stage, int replica, int tensor) {
    job.ranks[rank].stages = {stage};
    job.ranks[rank].replica = replica;
    job.ranks[rank].tensor = tensor;
    job.activity(rank).stage = stage;
  };
  place(0, 4, 0, 0);
  place(2, 4, 0, 1);
  place(1, 7, 0, 0);
  place(3, 7, 1, 0);
  const auto make = [&](std::size_t rank, CollectiveAxis axis, std::int32_t begun) {
    Activity& now = job.activity(rank);
    now.collective = {.axis = axis, .kind = CollectiveKind::kAllGather, .bytes = 24};
    now.collectives_begun = begun;
    now.op = 9;
    now.waits = true;
    now.subject.what = WaitSubject::What::kCollectiveReceive;
    now.subject.peer = 0;
  };
  const auto lines = [&] { return rank_lines(job.view(), kLimits); };
  make(0, CollectiveAxis::kTensor, 2);
  job.activity(2).op = 8;
  const std::string text =
      "the all-gather of 24 bytes of f32 over the tensor ranks in stage 4, forward of micro-batch "
      "5 (its collective 2)";
  EXPECT_THAT(lines(), HasSubstr(text + "; rank 2 did not come, it is in 4F5 of step 1207\n"));
  job.sightings[0].status.still = 20;
  job.sightings[2].silent = 21;
  EXPECT_THAT(lines(),
              HasSubstr(text + "; rank 2 may not have come, it was heard in 4F5 of step 1207\n"));
  job.sightings[0].silent = 2;
  EXPECT_THAT(lines(), HasSubstr("; rank 2 did not come, it is in 4F5 of step 1207\n"));
  job.sightings[0].silent = job.sightings[2].silent = 0;
  make(2, CollectiveAxis::kTensor, 1);  // an earlier one of the same action
  EXPECT_THAT(lines(), HasSubstr(text + "; rank 2 did not come, "));
  make(2, CollectiveAxis::kTensor, 2);
  EXPECT_THAT(lines(), HasSubstr(text + "\n"));
  job.activity(2).collective.reset();  // it has left it, and computes in the same op
  job.activity(2).waits = false;
  EXPECT_THAT(lines(), HasSubstr(text + "\n"));
  job.activity(0).op = job.activity(2).op = 0;
  EXPECT_THAT(lines(), HasSubstr(text + "\n"));
  job.activity(2).collectives_begun = 0;  // between the begin of the run and its first op
  job.activity(2).doing = Doing::kCalling;
  EXPECT_THAT(lines(), HasSubstr(text + "; rank 2 did not come, "));
  job.activity(0).op = 9;
  job.activity(2).doing = Doing::kOperation;
  job.activity(2).op = 10;  // it has made it
  EXPECT_THAT(lines(), HasSubstr(text + "\n"));
  job.sightings[2].left = true;
  EXPECT_THAT(lines(), HasSubstr(text + "; rank 2 did not come, its pipeline is destroyed"));
  make(1, CollectiveAxis::kReplica, 1);
  job.activity(3).run = 8;
  EXPECT_THAT(lines(), HasSubstr("over the replicas in stage 7, forward of micro-batch 5 (its "
                                 "collective 1); rank 3 did not come, it is in 7F5"));
  job.ranks[3].shard_group = 1;  // it gathers parameters from others
  EXPECT_THAT(lines(), Not(HasSubstr("rank 3 did not come")));
}

TEST(WatchRulesTest, EndALongActionOnlyWithALimitForActions) {
  Job job(kOneHost);
  job.sightings[1].status.still = 1000;
  EXPECT_FALSE(job.judged());
  WatchLimits limits = kLimits;
  limits.action_timeout = 900;
  const auto verdict = judge(job.view(), limits);
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->kind, Verdict::Kind::kBusy);
  EXPECT_THAT(verdict->ranks, ElementsAre(1));
  job.activity(1).doing = Doing::kOutside;
  EXPECT_FALSE(judge(job.view(), limits)) << "what the program does is its own affair";
}

TEST(WatchRulesTest, FitTheLimitToTheSteps) {
  EXPECT_EQ(limits_of(0, 0, {.steps = 2, .slowest = 1}).timeout, 300);
  EXPECT_EQ(limits_of(0, 0, {.steps = 3, .slowest = 1}).timeout, 30);
  EXPECT_EQ(limits_of(0, 0, {.steps = 3, .slowest = 60}).timeout, 600);
  EXPECT_EQ(limits_of(3, 0, {.steps = 0, .slowest = 0}).timeout, 3);
  EXPECT_DOUBLE_EQ(limits_of(3, 0, {}).beat, 0.3);
  EXPECT_DOUBLE_EQ(limits_of(0, 0, {}).beat, 1);
}

TEST(WatchRulesTest, ChooseMonitorsOnSeveralHosts) {
  std::vector<WatchedRank> ranks(40);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    ranks[rank].host = "node" + std::to_string(rank / 10);
  }
  EXPECT_THAT(monitors_of(ranks), ElementsAre(0, 1, 2, 3, 4, 10, 20, 30));
  EXPECT_THAT(monitors_of(Job(kOneHost).ranks), ElementsAre(0, 1, 2, 3));
}

// A rank that is no monitor hears the monitors alone.
TEST(WatchRulesTest, LetARankDecideThatHearsNoMonitor) {
  Job job(std::vector<std::string>(12, "a"));
  for (Sighting& each : job.sightings) each.observed = false;
  for (const int monitor : job.monitors)
    job.sightings[static_cast<std::size_t>(monitor)].observed = true;
  job.sightings[11].observed = true;
  EXPECT_FALSE(job.judged(11));
  for (const int monitor : job.monitors)
    job.sightings[static_cast<std::size_t>(monitor)].silent = 31;
  const auto verdict = job.judged(11);
  ASSERT_TRUE(verdict);
  EXPECT_THAT(verdict->ranks, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
}

TEST(WatchReportTest, NamesTheNewestSave) {
  Job job(kOneHost);
  EXPECT_THAT(newest_save(job.view(), ""), HasSubstr("no saves are made"));
  EXPECT_EQ(newest_save(job.view(), "run"), "no complete save in run is known");
  job.sightings[3].status.saved_plus_one = 1201;
  EXPECT_EQ(newest_save(job.view(), "run"), "newest complete save: run/step-00001200");
}

TEST(WatchReportTest, SaysOfEachRankWhatItDoes) {
  Job job(kOneHost);
  job.wait(1, 0, 12);
  job.sightings[2].left = true;
  job.sightings[3].seen = false;
  job.sightings[3].silent = 20;
  const std::string lines = rank_lines(job.view(), kLimits);
  EXPECT_THAT(lines, HasSubstr("step 1207: in 0F5 of step 1207 since 0.0 s"));
  EXPECT_THAT(lines, HasSubstr("waits since 12 s for 1RECV_F5 from rank 0"));
  EXPECT_THAT(lines, HasSubstr("has left"));
  EXPECT_THAT(lines, HasSubstr("was never heard"));
  EXPECT_THAT(lines, Not(HasSubstr("lost")));
}

}  // namespace
}  // namespace sluice
