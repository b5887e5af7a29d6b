#include "runtime/program/doctor/network_probe.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>

#include <sluice/error.hpp>

#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"

namespace sluice {
namespace {

using ::testing::ElementsAre;

constexpr ProbeLimits kShortProbe = {
    .pair_seconds = 0.02, .total_seconds = 20, .silence_seconds = 20};

Topology topology(int pipeline, int replicas, RankOrder order = RankOrder::kPipelineFirst) {
  return make_topology(pipeline * replicas, {pipeline, replicas, 1}, order);
}

TEST(PairsOfTrainingTest, AreNeighboursThenReplicas) {
  EXPECT_THAT(pairs_of_training(topology(3, 1), 1), ElementsAre(RankPair{0, 1}, RankPair{1, 2}));
  EXPECT_THAT(pairs_of_training(topology(3, 1), 2),
              ElementsAre(RankPair{0, 1}, RankPair{1, 2}, RankPair{0, 2}));
  EXPECT_THAT(pairs_of_training(topology(2, 2), 1),
              ElementsAre(RankPair{0, 1}, RankPair{2, 3}, RankPair{0, 2}, RankPair{1, 3}));
  EXPECT_THAT(pairs_of_training(topology(2, 2, RankOrder::kReplicaFirst), 1),
              ElementsAre(RankPair{0, 2}, RankPair{1, 3}, RankPair{0, 1}, RankPair{2, 3}));
}

TEST(PairsOfTrainingTest, NoPairStandsTwiceAndNoneIsOfOneRank) {
  EXPECT_TRUE(pairs_of_training(topology(1, 1), 4).empty());
  EXPECT_EQ(pairs_of_training(topology(2, 1), 4).size(), 1U);  // both ways round are one pair
  EXPECT_EQ(pairs_of_training(topology(4, 3), 2).size(), 3U * 4 + 4 * 3);
}

TEST(NetworkProbeTest, MeasuresBothDirectionsOfEveryPair) {
  for (const int chunks : {1, 2}) {
    const auto pairs = pairs_of_training(topology(2, 2), chunks);
    run_loopback(4, [&](Communicator& comm) {
      const ProbeResult result = probe_links(comm, 3, pairs, kShortProbe);
      EXPECT_EQ(result.pairs_left_out, 0);
      if (comm.rank() != 0) {
        EXPECT_TRUE(result.links.empty());
        return;
      }
      std::set<std::pair<int, int>> ends;
      for (const LinkFigures& link : result.links) {
        ends.insert({link.from, link.to});
        EXPECT_GT(link.latency, 0);
        EXPECT_GT(link.bandwidth, 0);
        EXPECT_GT(link.shared_bandwidth, 0);
        EXPECT_GE(link.advanced, 0);
        EXPECT_LE(link.advanced, 1);
      }
      EXPECT_EQ(ends.size(), 2 * pairs.size());
      EXPECT_EQ(result.links.size(), ends.size());
    });
  }
}

TEST(NetworkProbeTest, LeavesTheCommunicatorUsable) {
  const auto pairs = pairs_of_training(topology(3, 1), 2);
  run_loopback(3, [&](Communicator& comm) {
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(probe_links(comm, 0, pairs, kShortProbe).links.size(), comm.rank() == 0 ? 6U : 0U);
    }
  });
}

TEST(NetworkProbeTest, WithoutPairsNothingIsMeasured) {
  run_loopback(2, [](Communicator& comm) {
    EXPECT_TRUE(probe_links(comm, 0, {}, kShortProbe).links.empty());
  });
}

TEST(NetworkProbeTest, SaysHowManyPairsTimeLeftOut) {
  const auto pairs = pairs_of_training(topology(4, 1), 1);
  run_loopback(4, [&](Communicator& comm) {
    const ProbeResult result = probe_links(
        comm, 0, pairs, {.pair_seconds = 0.02, .total_seconds = 0, .silence_seconds = 20});
    EXPECT_EQ(result.pairs_left_out, 2);
    EXPECT_EQ(result.links.size(), comm.rank() == 0 ? 2U : 0U);
  });
}

TEST(NetworkProbeTest, ARankThatNeverAnswersIsNamed) {
  expect_error(ErrorCode::kPeer, {"rank 0", "--mca btl_tcp_if_include"}, [] {
    run_loopback(2, [](Communicator& comm) {
      if (comm.rank() == 1) return;
      (void)probe_links(comm, 0, {{0, 1}},
                        {.pair_seconds = 0.02, .total_seconds = 1, .silence_seconds = 0.1});
    });
  });
}

TEST(SilenceLimitTest, BeginsAnewWhenTold) {
  SilenceLimit limit(2, 0, "a message");
  expect_error(ErrorCode::kPeer, {"rank 2 has waited 0 s for a message"}, [&] { limit.poll(); });
  SilenceLimit patient(2, 1000, "a message");
  patient.poll();
}

}  // namespace
}  // namespace sluice
