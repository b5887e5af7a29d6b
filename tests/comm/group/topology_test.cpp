#include "comm/group/topology.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <sluice/error.hpp>

#include "comm/base/cores.hpp"

namespace sluice {
namespace {

std::string refusal(int size, int pipeline, int replicas) {
  try {
    (void)make_topology(size, pipeline, replicas, RankOrder::kPipelineFirst);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    return error.what();
  }
  return "accepted";
}

TEST(TopologyTest, MapsRanksThereAndBackInBothOrders) {
  for (const RankOrder order : {RankOrder::kPipelineFirst, RankOrder::kReplicaFirst}) {
    const Topology topology = make_topology(6, 3, 2, order);
    EXPECT_EQ(topology.ranks(), 6);
    for (int rank = 0; rank < 6; ++rank) {
      EXPECT_EQ(topology.rank_of(topology.replica(rank), topology.pipeline_rank(rank)), rank);
    }
  }
}

TEST(TopologyTest, KeepsAPipelineTogetherByDefault) {
  const Topology adjacent = make_topology(6, 3, 2, RankOrder::kPipelineFirst);
  EXPECT_EQ(adjacent.rank_of(1, 0), 3);
  EXPECT_EQ(adjacent.rank_of(0, 2), 2);
  const Topology spread = make_topology(6, 3, 2, RankOrder::kReplicaFirst);
  EXPECT_EQ(spread.rank_of(1, 0), 1);
  EXPECT_EQ(spread.rank_of(0, 2), 4);
}

TEST(TopologyTest, NamesTheNearestLayoutsThatFit) {
  EXPECT_EQ(refusal(8, 2, 2),
            "ranks must equal pipeline x replicas, got 8 ranks, pipeline 2, replicas 2; start 4 "
            "ranks, or use replicas 4, or use pipeline 4");
  EXPECT_EQ(refusal(3, 2, 2),
            "ranks must equal pipeline x replicas, got 3 ranks, pipeline 2, replicas 2; start 4 "
            "ranks, or use pipeline 3 and replicas 1");
  EXPECT_EQ(refusal(1, 2, 1),
            "ranks must equal pipeline x replicas, got 1 rank, pipeline 2, replicas 1; start 2 "
            "ranks, or use pipeline 1");
}

TEST(TopologyTest, RefusesSizesBelowOneAndProductsThatOverflow) {
  EXPECT_NE(refusal(4, 0, 2).find("at least 1, got 4 ranks, pipeline 0"), std::string::npos);
  EXPECT_NE(refusal(4, 2, -1).find("replicas -1"), std::string::npos);
  EXPECT_NE(refusal(0, 65536, 65536).find("start 4294967296 ranks"), std::string::npos);
}

TEST(TopologyTest, TakesAnyOrderThatGivesEachRankOnePlace) {
  const Topology topology = make_topology(2, 2, {3, 0, 2, 1});
  EXPECT_EQ(topology.rank_of(0, 0), 3);
  EXPECT_EQ(topology.rank_of(1, 1), 1);
  EXPECT_EQ(topology.replica(2), 1);
  EXPECT_EQ(topology.pipeline_rank(2), 0);
  for (const std::vector<int>& wrong :
       {std::vector{0, 1, 2}, {0, 1, 2, 2}, {0, 1, 2, 4}, {0, 1, 2, -1}}) {
    EXPECT_THROW((void)make_topology(2, 2, wrong), Error);
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
