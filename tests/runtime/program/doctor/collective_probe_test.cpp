#include "runtime/program/doctor/collective_probe.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <sluice/error.hpp>

#include "tests/loopback/loopback.hpp"
#include "tests/runtime/expect_error.hpp"

namespace sluice {
namespace {

// A rank on each letter's host.
std::vector<RankDevice> on_hosts(const std::string& hosts) {
  std::vector<RankDevice> devices(hosts.size());
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) devices[rank].machine = hosts[rank];
  return devices;
}

TEST(CollectiveProbeTest, MeasuresTheReplicasOfEveryStage) {
  const Topology topology = make_topology(6, {2, 3, 1}, RankOrder::kPipelineFirst);
  run_loopback(6, [&](Communicator& comm) {
    for (const char* hosts : {"AAAAAA", "AABBAA"}) {
      const CollectiveResult result = probe_collectives(comm, 3, topology, on_hosts(hosts));
      EXPECT_GT(result.bytes, 0U);
      ASSERT_EQ(result.groups.size(), 2U);
      EXPECT_EQ(result.groups[0].ranks, (std::vector{0, 2, 4}));
      EXPECT_EQ(result.groups[1].ranks, (std::vector{1, 3, 5}));
      for (const CollectiveFigures& each : result.groups) {
        for (const double figure : {each.gather, each.gather_share, each.sum, each.sum_share}) {
          EXPECT_GT(figure, 0);
        }
      }
    }
  });
}

TEST(CollectiveProbeTest, WithoutReplicasNothingIsMeasured) {
  run_loopback(2, [&](Communicator& comm) {
    const Topology topology = make_topology(2, {2, 1, 1}, RankOrder::kPipelineFirst);
    EXPECT_TRUE(probe_collectives(comm, 0, topology, on_hosts("AA")).groups.empty());
  });
}

TEST(CollectiveProbeTest, ARankThatNeverComesIsWaitedForInVain) {
  const Topology topology = make_topology(2, {1, 2, 1}, RankOrder::kPipelineFirst);
  expect_error(ErrorCode::kPeer, {"rank 0", "the collectives of all replicas"}, [&] {
    run_loopback(2, [&](Communicator& comm) {
      if (comm.rank() == 0) {
        (void)probe_collectives(comm, 0, topology, on_hosts("AB"), 0.1);
      } else {
        (void)comm.split(0, 1);
      }
    });
  });
}

}  // namespace
}  // namespace sluice
