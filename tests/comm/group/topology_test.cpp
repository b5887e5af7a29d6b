#include "comm/group/topology.hpp"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/cores.hpp"

namespace sluice {
namespace {

std::string refusal(int ranks, const AxisSizes& size) {
  try {
    (void)make_topology(ranks, size, RankOrder::kPipelineFirst);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    return error.what();
  }
  return "accepted";
}

TEST(TopologyTest, MapsRanksThereAndBackInBothOrders) {
  for (const RankOrder order : {RankOrder::kPipelineFirst, RankOrder::kReplicaFirst}) {
    const Topology topology = make_topology(24, {3, 2, 4}, order);
    EXPECT_EQ(topology.ranks(), 24);
    for (int rank = 0; rank < 24; ++rank) {
      EXPECT_EQ(topology.rank_of(topology.place_of(rank)), rank);
    }
  }
}

TEST(TopologyTest, KeepsAPipelineTogetherByDefaultAndAStageAlways) {
  const Topology adjacent = make_topology(12, {3, 2, 2}, RankOrder::kPipelineFirst);
  EXPECT_EQ(adjacent.place_of(7), (Place{.pipeline = 0, .replica = 1, .tensor = 1}));
  EXPECT_EQ(adjacent.place_of(4), (Place{.pipeline = 2}));
  const Topology spread = make_topology(12, {3, 2, 2}, RankOrder::kReplicaFirst);
  EXPECT_EQ(spread.place_of(3), (Place{.replica = 1, .tensor = 1}));
  EXPECT_EQ(spread.place_of(4), (Place{.pipeline = 1}));
}

TEST(TopologyTest, GroupsDifferOnOneAxisAlone) {
  const Topology topology = make_topology(12, {3, 2, 2}, RankOrder::kPipelineFirst);
  const Place place = {.pipeline = 1, .replica = 1, .tensor = 0};
  EXPECT_EQ(topology.group(Axis::kPipeline, place), (std::vector{6, 8, 10}));
  EXPECT_EQ(topology.group(Axis::kReplica, place), (std::vector{2, 8}));
  EXPECT_EQ(topology.group(Axis::kTensor, place), (std::vector{8, 9}));
  EXPECT_EQ(topology.groups(Axis::kReplica)[3], (std::vector{3, 9}));
}

TEST(TopologyTest, EachRankIsInOneNumberedGroupOfEachAxis) {
  const Topology topology = make_topology({3, 2, 2}, {3, 0, 2, 1, 11, 4, 10, 5, 9, 6, 8, 7});
  for (const Axis axis : kAxes) {
    std::map<int, std::vector<int>> groups;
    for (int rank = 0; rank < 12; ++rank) {
      const Place place = topology.place_of(rank);
      const std::vector<int> group = topology.group(axis, place);
      EXPECT_EQ(group[static_cast<std::size_t>(place[axis])], rank);
      const auto [found, is_new] = groups.emplace(topology.group_number(axis, place), group);
      EXPECT_EQ(found->second, group);
    }
    EXPECT_EQ(static_cast<int>(groups.size()), 12 / topology.size[axis]);
    EXPECT_EQ(topology.groups(axis).size(), groups.size());
  }
}

TEST(TopologyTest, NamesTheNearestLayoutsThatFit) {
  EXPECT_EQ(refusal(8, {2, 2, 1}),
            "ranks must equal pipeline x replicas, got 8 ranks, pipeline 2, replicas 2; start 4 "
            "ranks, or use pipeline 4, or use replicas 4");
  EXPECT_EQ(refusal(3, {2, 2, 1}),
            "ranks must equal pipeline x replicas, got 3 ranks, pipeline 2, replicas 2; start 4 "
            "ranks, or use pipeline 3 and replicas 1");
  EXPECT_EQ(refusal(1, {2, 1, 1}),
            "ranks must equal pipeline x replicas, got 1 rank, pipeline 2, replicas 1; start 2 "
            "ranks, or use pipeline 1");
  EXPECT_EQ(refusal(12, {2, 1, 4}),
            "ranks must equal pipeline x replicas x tensor, got 12 ranks, pipeline 2, replicas 1, "
            "tensor 4; start 8 ranks, or use pipeline 3, or use tensor 6");
}

TEST(TopologyTest, RefusesSizesBelowOneAndProductsThatOverflow) {
  EXPECT_EQ(refusal(4, {0, 2, 1}),
            "pipeline and replicas must be at least 1, got 4 ranks, pipeline 0, replicas 2; for "
            "these ranks pipeline 4 and replicas 1 would do");
  EXPECT_NE(refusal(4, {2, -1, 1}).find("replicas -1"), std::string::npos);
  EXPECT_NE(refusal(4, {2, 2, 0}).find("tensor 0"), std::string::npos);
  EXPECT_NE(refusal(0, {65536, 65536, 1}).find("start 4294967296 ranks"), std::string::npos);
  EXPECT_NE(refusal(4, {2147483647, 2147483647, 2147483647}).find("ranks must equal"),
            std::string::npos);
}

TEST(TopologyTest, TakesAnyOrderThatGivesEachRankOnePlace) {
  const Topology topology = make_topology({2, 2, 1}, {3, 0, 2, 1});
  EXPECT_EQ(topology.rank_of({}), 3);
  EXPECT_EQ(topology.rank_of({.pipeline = 1, .replica = 1}), 1);
  EXPECT_EQ(topology.place_of(2), (Place{.replica = 1}));
  for (const std::vector<int>& wrong :
       {std::vector{0, 1, 2}, {0, 1, 2, 2}, {0, 1, 2, 4}, {0, 1, 2, -1}}) {
    EXPECT_THROW((void)make_topology({2, 2, 1}, wrong), Error);
  }
}

TEST(CoresTest, CountsAKernelsListOfCpus) {
  EXPECT_EQ(count_cpu_list("0-3,8"), 5);
  EXPECT_EQ(count_cpu_list("7"), 1);
  EXPECT_EQ(count_cpu_list(""), 0);
  EXPECT_EQ(count_cpu_list("3-1"), 0);
  EXPECT_EQ(count_cpu_list("a-b"), 0);
}

TEST(CoresTest, WritesNumbersAsAKernelsList) {
  EXPECT_EQ(to_cpu_list({}), "");
  EXPECT_EQ(to_cpu_list({7}), "7");
  EXPECT_EQ(to_cpu_list({0, 1, 2, 3, 8, 10, 11}), "0-3,8,10-11");
}

TEST(CoresTest, TakesTheLargestOfSlurmsCounts) {
  EXPECT_EQ(largest_slurm_count("4(x2),3"), 4);
  EXPECT_EQ(largest_slurm_count("2"), 2);
  EXPECT_EQ(largest_slurm_count("many"), 0);
}

TEST(CoresTest, FindsAtLeastOneCore) {
  EXPECT_GE(host_cores(), 1);
  EXPECT_GE(affinity_cores(), 1);
  EXPECT_EQ(static_cast<int>(affinity_list().size()), affinity_cores());
  EXPECT_EQ(count_cpu_list(to_cpu_list(affinity_list())), affinity_cores());
}

}  // namespace
}  // namespace sluice
