// Which rank gets which place, from the names of hosts.
#include "runtime/layout/rank_arrangement.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "comm/group/block_steps.hpp"

namespace sluice {
namespace {

using ::testing::HasSubstr;

struct Job {
  int pipeline = 2, replicas = 2, tensor = 1;
  double edge_bytes = 0, gradient_bytes = 0;
  RankOrder order = RankOrder::kAuto;
  int chunks = 1;
  const char* devices = "cpu";
};

// `hosts`: a letter for each rank.
RankArrangement arrange(const std::string& hosts, const Job& job) {
  std::vector<std::string> names;
  for (const char host : hosts) names.emplace_back(1, host);
  PipelineOptions options;
  options.shape.rank_order = job.order;
  options.expert.edge_bytes = job.edge_bytes;
  options.expert.gradient_bytes = job.gradient_bytes;
  options.devices.choices = parse_devices(job.devices);
  const auto size = static_cast<int>(hosts.size());
  const AxisSizes sizes = {job.pipeline, job.replicas, job.tensor};
  return arrange_ranks(make_topology(size, sizes, job.order), options,
                       Placement::looped(job.pipeline, job.chunks), names);
}

// The host of each place: a word for each replica, whose tensor ranks are neighbours.
std::string hosts_of_places(const std::string& hosts, const Topology& topology) {
  std::string text;
  const int word = topology.size.pipeline * topology.size.tensor;
  for (int place = 0; place < topology.ranks(); ++place) {
    if (place > 0 && place % word == 0) text += ' ';
    text +=
        hosts[static_cast<std::size_t>(topology.rank_of_place[static_cast<std::size_t>(place)])];
  }
  return text;
}

std::string places(const std::string& hosts, const Job& job) {
  return hosts_of_places(hosts, arrange(hosts, job).topology);
}

TEST(RankArrangementTest, OneHostKeepsTheNumbersAndGivesNoReason) {
  const RankArrangement order = arrange("AAAA", {.gradient_bytes = 1e9});
  EXPECT_EQ(order.topology.rank_of_place, (std::vector{0, 1, 2, 3}));
  EXPECT_EQ(order.reason, "");
}

TEST(RankArrangementTest, AnOrderThatIsAskedForStays) {
  EXPECT_EQ(places("ABAB", {.order = RankOrder::kPipelineFirst}), "AB AB");
  EXPECT_EQ(places("ABAB", {.order = RankOrder::kReplicaFirst}), "AA BB");
  EXPECT_EQ(arrange("ABAB", {.order = RankOrder::kReplicaFirst}).reason, "");
}

TEST(RankArrangementTest, PipelinesShareHostsWhereSizesAreNotKnown) {
  EXPECT_EQ(places("ABAB", {}), "AA BB");
  EXPECT_EQ(arrange("ABAB", {}).topology.rank_of_place, (std::vector{0, 2, 1, 3}));
  EXPECT_EQ(arrange("ABAB", {}).reason, "the ranks of a pipeline share hosts");
}

TEST(RankArrangementTest, WhicheverSendsLessBetweenHostsSharesThem) {
  constexpr double kMebi = 1 << 20;
  // Two edges of 3 MiB cross, or the sums of two stages of 2 MiB, which two ranks exchange twice.
  const Job sums{.edge_bytes = 3 * kMebi, .gradient_bytes = 2 * kMebi};
  EXPECT_EQ(places("AABB", sums), "AB AB");
  EXPECT_EQ(arrange("AABB", sums).reason,
            "the replicas of a stage share hosts: a host then exchanges at most about 6.0 MiB with "
            "others in a step, 8.0 MiB if the ranks of a pipeline share hosts");
  const Job messages{.edge_bytes = 5 * kMebi, .gradient_bytes = 2 * kMebi};
  EXPECT_EQ(places("AABB", messages), "AA BB");
  EXPECT_THAT(arrange("AABB", messages).reason,
              HasSubstr("at most about 8.0 MiB with others in a step, 10.0 MiB if the replicas"));
}

TEST(RankArrangementTest, EveryTurnOfAnInterleavedPipelineCounts) {
  // Three edges of one pipeline join its two ranks.
  const Job job{.edge_bytes = 3, .gradient_bytes = 4, .chunks = 2};
  EXPECT_EQ(places("AABB", {.edge_bytes = 3, .gradient_bytes = 4}), "AB AB");
  EXPECT_EQ(places("AABB", job), "AA BB");
}

TEST(RankArrangementTest, WhatAHostAddsUpBeforeItCrossesCountsOnce) {
  // Of each stage the sum of two replicas crosses once each way, and comes back once: 8 bytes.
  // Four edges are 12, and so are, one by one, the values of replicas on GPUs: 16.
  const Job job{.replicas = 4, .edge_bytes = 3, .gradient_bytes = 2};
  EXPECT_EQ(places("AAAABBBB", job), "AA AA BB BB");
  EXPECT_THAT(arrange("ABABABAB", job).reason,
              HasSubstr("at most about 8 B with others in a step, 12 B if the replicas"));
  Job on_gpus = job;
  on_gpus.devices = "cuda";
  EXPECT_EQ(places("AAAABBBB", on_gpus), built_with_cuda() ? "AB AB AB AB" : "AA AA BB BB");
}

TEST(RankArrangementTest, ReplicasOfAHostAreASubtreeOfTheSum) {
  EXPECT_EQ(places("ABAB", {.pipeline = 1, .replicas = 4}), "A A B B");
  EXPECT_EQ(places("ABBC", {.pipeline = 1, .replicas = 4}), "A C B B");
  EXPECT_EQ(places("ABBACCCC", {.pipeline = 1, .replicas = 8}), "A A B B C C C C");
  EXPECT_EQ(places("AABBBBCC", {.replicas = 4}), "AA CC BB BB");
  // Replicas of a stage that no host holds all of.
  EXPECT_EQ(places("ABBC", {.pipeline = 1, .replicas = 4, .gradient_bytes = 1}), "A C B B");
  const Job sums{.replicas = 4, .gradient_bytes = 12};
  EXPECT_EQ(places("AAAABCCB", sums), "AB AB AC AC");
}

// Aligned subtrees would send more there.
TEST(RankArrangementTest, SumsDecideWhereSizesAreNotKnownAndEdgesDoNot) {
  EXPECT_EQ(places("AAABBBBB", {.pipeline = 1, .replicas = 8}), "A A A B B B B B");
  EXPECT_EQ(places("ABBC", {.pipeline = 1, .replicas = 4}), "A C B B");
}

TEST(RankArrangementTest, UnevenHostsSplitAsFewPipelinesAsTheyCan) {
  EXPECT_EQ(places("AAABBCCC", {.replicas = 4}), "AA BB CC AC");
  EXPECT_EQ(places("ABBB", {}), "AB BB");
  EXPECT_EQ(arrange("ABBB", {}).topology.rank_of({}), 0);
}

TEST(RankArrangementTest, TheRanksOfAStageShareAHostFirst) {
  EXPECT_EQ(places("ABABABAB", {.replicas = 1, .tensor = 4}), "AAAABBBB");
  EXPECT_EQ(places("ABABABAB", {.tensor = 2}), "AAAA BBBB");
  const Job sums{.tensor = 2, .edge_bytes = 1, .gradient_bytes = 5};
  EXPECT_EQ(places("ABABABAB", sums), "AABB AABB");
  EXPECT_EQ(places("AAABBBBB", {.replicas = 1, .tensor = 4}), "AAABBBBB");
  EXPECT_EQ(arrange("BAAABBBA", {.tensor = 2}).topology.rank_of({}), 0);
}

TEST(RankArrangementTest, AListOfDevicesKeepsTheNumbers) {
  EXPECT_EQ(places("ABAB", {.devices = "cpu,cpu"}), "AB AB");
  EXPECT_EQ(arrange("ABAB", {.devices = "cpu,cpu"}).reason, "");
}

TEST(RankArrangementTest, EqualLoadsAreNotCompared) {
  const std::string reason = arrange("ABBB", {.edge_bytes = 1, .gradient_bytes = 0.25}).reason;
  EXPECT_THAT(reason, HasSubstr("at most about 2 B"));
  EXPECT_THAT(reason, ::testing::Not(HasSubstr(" if ")));
}

// Bytes between hosts of the busiest host.
double busiest(const std::string& hosts, const Topology& topology, const Job& job) {
  std::map<char, double> bytes;
  const auto add = [&](int one, int other, double count) {
    const char a = hosts[static_cast<std::size_t>(one)], b = hosts[static_cast<std::size_t>(other)];
    if (a == b) return;
    bytes[a] += count;
    bytes[b] += count;
  };
  for (int r = 0; r < topology.size.replica; ++r) {
    for (int k = 0; k < topology.size.pipeline; ++k) {
      const int rank = topology.rank_of({.pipeline = k, .replica = r});
      if (k > 0) add(topology.rank_of({.pipeline = k - 1, .replica = r}), rank, job.edge_bytes);
    }
  }
  for (const std::vector<int>& replicas : topology.groups(Axis::kReplica)) {
    std::vector<int> on;
    for (const int rank : replicas) on.push_back(hosts[static_cast<std::size_t>(rank)]);
    for (auto* steps_of : {&scatter_steps, &gather_steps}) {
      for (const Crossing& each : crossings(on, *steps_of)) {
        add(replicas[static_cast<std::size_t>(each.from)],
            replicas[static_cast<std::size_t>(each.to)],
            job.gradient_bytes / topology.size.replica);
      }
    }
  }
  double most = 0;
  for (const auto& [host, count] : bytes) most = std::max(most, count);
  return most;
}

TEST(RankArrangementTest, NeitherOrderByNumbersLoadsTheBusiestHostLess) {
  std::mt19937 random(7);
  const auto draw = [&](unsigned most) { return 1 + static_cast<int>(random() % most); };
  for (int round = 0; round < 500; ++round) {
    const Job job{.pipeline = draw(4),
                  .replicas = draw(4),
                  .edge_bytes = draw(5) * 1.0,
                  .gradient_bytes = draw(5) * 3.0};
    std::string hosts;
    for (int rank = 0; rank < job.pipeline * job.replicas; ++rank) {
      hosts += static_cast<char>('A' + draw(3));
    }
    const Topology chosen = arrange(hosts, job).topology;
    EXPECT_EQ(chosen.rank_of({}), 0);
    for (const RankOrder order : {RankOrder::kPipelineFirst, RankOrder::kReplicaFirst}) {
      const Topology numbered =
          make_topology(chosen.ranks(), {job.pipeline, job.replicas, 1}, order);
      EXPECT_LE(busiest(hosts, chosen, job), busiest(hosts, numbered, job)) << hosts;
    }
  }
}

TEST(RankArrangementTest, LongPipelinesFillHostAfterHost) {
  EXPECT_EQ(places("ABABAB", {.pipeline = 6, .replicas = 1}), "AAABBB");
  EXPECT_EQ(places("ABABABAB", {.pipeline = 4}), "AAAA BBBB");
}

// Whether each group of places `group_of(place)` lies on one host.
template <typename GroupOf>
bool each_on_one_host(const std::string& places, const GroupOf& group_of) {
  std::map<int, char> host_of_group;
  for (std::size_t place = 0; place < places.size(); ++place) {
    const auto [found, is_new] =
        host_of_group.emplace(group_of(static_cast<int>(place)), places[place]);
    if (found->second != places[place]) return false;
  }
  return true;
}

TEST(RankArrangementTest, GroupsThatFitIntoHostsAreNotSplitHoweverRanksAreNumbered) {
  std::mt19937 random(7);
  const auto draw = [&](unsigned most) { return 1 + static_cast<int>(random() % most); };
  for (int round = 0; round < 300; ++round) {
    const int group = draw(4), groups = draw(6);
    std::string hosts;
    for (int i = 0; i < groups; ++i) {
      hosts.append(static_cast<std::size_t>(group), static_cast<char>('A' + draw(3)));
    }
    std::shuffle(hosts.begin(), hosts.end(), random);
    const Topology pipelines = arrange(hosts, {.pipeline = group, .replicas = groups}).topology;
    EXPECT_EQ(pipelines.rank_of({}), 0);
    std::string where;
    for (const int rank : pipelines.rank_of_place) where += hosts[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(each_on_one_host(where, [&](int place) { return place / group; })) << hosts;
    const Job sums{.pipeline = groups, .replicas = group, .gradient_bytes = 12};
    const Topology replicas = arrange(hosts, sums).topology;
    EXPECT_EQ(replicas.rank_of({}), 0);
    where.clear();
    for (const int rank : replicas.rank_of_place) where += hosts[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(each_on_one_host(where, [&](int place) { return place % groups; })) << hosts;
  }
}

}  // namespace
}  // namespace sluice
