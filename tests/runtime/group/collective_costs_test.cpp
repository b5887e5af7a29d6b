#include "runtime/group/collective_costs.hpp"

#include <gtest/gtest.h>

#include "tests/loopback/loopback.hpp"

namespace sluice {
namespace {

TEST(CollectiveCostsTest, MeasuresEachKindOverEveryGroup) {
  run_loopback(4, [](Communicator& comm) {
    Collectives job(comm, 0, nullptr);
    const auto ranks = comm.split(comm.rank() / 2, comm.rank());
    Collectives group(*ranks, 0, nullptr);
    ComputeContext compute(Device{}, 1);
    for (const LinkCost& cost : measure_collectives(job, group, compute, 0)) {
      EXPECT_GE(cost.latency, 0);
      EXPECT_GT(cost.bandwidth, 0);
    }
  });
}

TEST(CollectiveCostsTest, TheSlowerOfTwoIsSlowerInBoth) {
  CollectiveCosts one, two;
  one[0] = {1, 5};
  two[0] = {2, 7};
  two[1] = {3, 4};
  const CollectiveCosts most = slower(one, two);
  EXPECT_EQ(most[0].latency, 2);
  EXPECT_EQ(most[0].bandwidth, 5);
  EXPECT_EQ(most[1].latency, 3);
  EXPECT_EQ(slower(two, one)[1].bandwidth, 4);
  EXPECT_EQ(most[2].bandwidth, 0);
}

}  // namespace
}  // namespace sluice
