#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "runtime/program/doctor/diagnosis.hpp"

namespace sluice {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string address(int rank) { return "10.0.0." + std::to_string(rank + 1); }

// `ranks` ranks of a pipeline, one on each host, that reach each other over eth0.
std::vector<RankFacts> hosts(int ranks) {
  std::vector<RankFacts> facts(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    RankFacts& each = facts[static_cast<std::size_t>(rank)];
    each.rank = rank;
    each.mpi.host = "host" + std::to_string(rank);
    each.mpi.library = "Open MPI v4.1.4";
    each.network.interfaces = {{"eth0", address(rank), "10.0.0.0/24", 0}};
    for (int other = 0; other < ranks; ++other) {
      const auto port = [](int from, int to) {
        return ":" + std::to_string(1000 + 10 * from + to);
      };
      if (other == rank) continue;
      each.network.connections.push_back(
          {address(rank) + port(rank, other), address(other) + port(other, rank)});
    }
  }
  return facts;
}

// Both directions between neighbours, 1 GB/s.
ProbeResult links(int ranks) {
  ProbeResult probe;
  for (int rank = 0; rank + 1 < ranks; ++rank) {
    for (const bool forward : {true, false}) {
      LinkFigures link;
      link.from = forward ? rank : rank + 1;
      link.to = forward ? rank + 1 : rank;
      link.latency = 1e-5;
      link.bandwidth = link.shared_bandwidth = 1e9;
      link.advanced = 0.25;
      probe.links.push_back(link);
    }
  }
  return probe;
}

std::string said(const std::vector<RankFacts>& facts, const ProbeResult& probe, bool wrong) {
  std::string text;
  for (const Finding& finding : diagnose_network(facts, probe)) {
    if (finding.wrong == wrong) text += finding.text + "\n";
  }
  return text;
}

TEST(NetworkDiagnosisTest, FindsNothingWrongWithEqualLinks) {
  EXPECT_EQ(said(hosts(3), links(3), true), "");
  EXPECT_EQ(said(hosts(3), {}, true), "");
  EXPECT_THAT(said(hosts(3), links(3), false), HasSubstr("25 % of a message passes"));
  EXPECT_EQ(said(hosts(1), {}, false), "");
}

TEST(NetworkDiagnosisTest, NamesALinkOfATenthByRanksHostsAndInterface) {
  ProbeResult probe = links(4);
  probe.links[3].bandwidth = 1.01e8;  // from 2 to 1
  EXPECT_EQ(said(hosts(4), probe, true), "");
  probe.links[3].bandwidth = 1e8;
  const std::string text = said(hosts(4), probe, true);
  EXPECT_THAT(text, HasSubstr("slow: rank 2 (host2) to rank 1 (host1) over eth0 (10.0.0.3) has 100 "
                              "MB/s; the median of links between hosts is 1000 MB/s"));
  EXPECT_THAT(text, HasSubstr("ethtool"));
  EXPECT_THAT(text, Not(HasSubstr("rank 0")));
}

TEST(NetworkDiagnosisTest, ABadHostInTheMiddleOfThreeIsFound) {
  ProbeResult probe = links(3);
  probe.links[1].bandwidth = probe.links[2].bandwidth = 5e6;  // what host 1 sends: half of all
  const std::string text = said(hosts(3), probe, true);
  EXPECT_THAT(text, HasSubstr("rank 1 (host1) to rank 0 (host0)"));
  EXPECT_THAT(text, HasSubstr("rank 1 (host1) to rank 2 (host2)"));
}

TEST(NetworkDiagnosisTest, LinksWithinAHostAreAKindOfTheirOwn) {
  auto facts = hosts(4);
  facts[1].mpi.host = facts[0].mpi.host;
  facts[0].network.connections.clear();
  facts[1].network.connections.clear();
  ProbeResult probe = links(4);
  probe.links[0].bandwidth = probe.links[1].bandwidth = 2e10;  // memory is 20 times as quick
  EXPECT_EQ(said(facts, probe, true), "");
  probe.links[0].bandwidth = 1e9;
  EXPECT_THAT(said(facts, probe, true),
              HasSubstr("the median of links within a host is 20000 MB/s"));
}

TEST(NetworkDiagnosisTest, ComparesWithWhatTheInterfaceSaysOfItself) {
  auto facts = hosts(2);
  facts[1].network.interfaces[0].speed_megabit = 100000;
  EXPECT_THAT(said(facts, links(2), true),
              HasSubstr("rank 1 (host1) to rank 0 (host0) over eth0 (10.0.0.2) has 1000 MB/s, but "
                        "the interface says 12500 MB/s"));
  facts[1].network.interfaces[0].speed_megabit = 10000;
  EXPECT_EQ(said(facts, links(2), true), "");
}

TEST(NetworkDiagnosisTest, NamesVirtualInterfacesAndTheNetworkToChoose) {
  auto facts = hosts(2);
  facts[1].network.interfaces.insert(facts[1].network.interfaces.begin(),
                                     {"docker0", "172.17.0.1", "172.17.0.0/16", 0});
  const std::string text = said(facts, links(2), true);
  EXPECT_THAT(text, HasSubstr("docker0 (172.17.0.1) on host1: MPI may choose"));
  EXPECT_THAT(text, HasSubstr("mpirun --mca btl_tcp_if_include 10.0.0.0/24"));
  facts[1].network.settings = {{"OMPI_MCA_btl_tcp_if_include", "10.0.0.0/24"}};
  facts[0].network.settings = facts[1].network.settings;
  EXPECT_EQ(said(facts, links(2), true), "");
  facts[0].network.settings.clear();
  facts[1].network.settings.clear();
  facts[1].mpi.host = facts[0].mpi.host;  // one host: nothing to choose
  EXPECT_THAT(said(facts, {}, true), Not(HasSubstr("docker0")));
}

TEST(NetworkDiagnosisTest, InterfacesDoNotMatterWithoutTcp) {
  auto facts = hosts(2);
  for (RankFacts& each : facts) {
    each.network.interfaces.push_back({"docker0", "172.17.0.1", "172.17.0.0/16", 0});
    each.network.connections.clear();
  }
  EXPECT_EQ(said(facts, links(2), true), "");
  EXPECT_THAT(said(facts, {}, true), HasSubstr("docker0"));  // not known how messages travel
}

TEST(NetworkDiagnosisTest, NamesAnAddressThatTwoHostsHave) {
  auto facts = hosts(3);
  for (const std::size_t host : {0U, 2U}) {
    facts[host].network.interfaces.push_back({"virbr0", "192.168.122.1", "192.168.122.0/24", 0});
  }
  EXPECT_THAT(said(facts, links(3), true),
              HasSubstr("address 192.168.122.1 belongs to virbr0 on host0, virbr0 on host2"));
}

TEST(NetworkDiagnosisTest, NamesAVirtualInterfaceThatIsInUse) {
  auto facts = hosts(2);
  facts[0].network.interfaces[0].name = "br-1234";
  facts[0].network.settings = {{"OMPI_MCA_btl_tcp_if_include", "10.0.0.0/24"}};
  facts[1].network.settings = facts[0].network.settings;
  EXPECT_THAT(said(facts, links(2), true),
              HasSubstr("over br-1234 (10.0.0.1): that interface leads to containers"));
}

TEST(NetworkDiagnosisTest, NamesTcpBetweenRanksOfOneHost) {
  auto facts = hosts(2);
  facts[1].mpi.host = facts[0].mpi.host;
  EXPECT_THAT(said(facts, links(2), true), HasSubstr("two ranks of one host use TCP"));
  facts[0].network.connections.clear();
  EXPECT_EQ(said(facts, links(2), true), "");
}

TEST(NetworkDiagnosisTest, NamesTcpWhereUcxIsAskedForAndADeviceIsThere) {
  auto facts = hosts(2);
  for (RankFacts& each : facts) {
    each.network.fast = true;
    each.mpi.components = "pml=ucx";
  }
  EXPECT_THAT(said(facts, links(2), true), HasSubstr("UCX is asked for"));
  for (RankFacts& each : facts) each.network.connections.clear();
  EXPECT_EQ(said(facts, links(2), true), "");
  EXPECT_EQ(way_of(facts[0], facts[1]), "no TCP");
}

TEST(NetworkDiagnosisTest, NamesSettingsThatSomeRanksLack) {
  auto facts = hosts(3);
  for (const std::size_t rank : {0U, 1U}) {
    facts[rank].network.settings = {{"OMPI_MCA_btl_tcp_port_min_v4", "20000"}};
  }
  facts[2].network.settings = {{"UCX_TLS", "tcp"}};
  const std::string text = said(facts, links(3), true);
  EXPECT_THAT(text, HasSubstr("OMPI_MCA_btl_tcp_port_min_v4 is '20000' on rank 0 (host0), but not "
                              "set on rank 2 (host2): give all ranks the same with 'mpirun --mca "
                              "btl_tcp_port_min_v4 VALUE'"));
  EXPECT_THAT(text, HasSubstr("UCX_TLS is not set on rank 0 (host0), but 'tcp' on rank 2"));
  EXPECT_THAT(said(facts, links(3), false), HasSubstr("TCP ports from 20000 up"));
  EXPECT_THAT(said(hosts(3), links(3), false), HasSubstr("--mca btl_tcp_port_range_v4 1000"));
}

TEST(NetworkDiagnosisTest, SaysHowManyPairsWereNotMeasured) {
  ProbeResult probe = links(3);
  probe.pairs_left_out = 12;
  EXPECT_THAT(said(hosts(3), probe, false), HasSubstr("12 pairs of ranks were not measured"));
}

TEST(NetworkDiagnosisTest, KnowsHowMessagesTravel) {
  auto facts = hosts(3);
  EXPECT_EQ(way_of(facts[0], facts[1]), "eth0 (10.0.0.1)");
  facts[0].network.interfaces.clear();
  EXPECT_EQ(way_of(facts[0], facts[1]), "10.0.0.1");
  facts[1].network.connections.clear();  // a connection has two ends
  EXPECT_EQ(way_of(facts[0], facts[1]), "no TCP");
  facts[1].mpi.host = facts[0].mpi.host;
  EXPECT_EQ(way_of(facts[0], facts[1]), "memory");
}

}  // namespace
}  // namespace sluice
