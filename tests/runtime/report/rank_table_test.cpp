// The table of a job's ranks, as people read it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/entry/network_facts.hpp"
#include "runtime/report/layout_report.hpp"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(RankTableTest, HasALineForEachRankWithWhatIsKnown) {
  const std::vector<RankRow> ranks = {
      {"node1", "cpu", 0, {0, 3}, {0, 1, 4}, 8, 2, {"eth0", "10.0.0.9"}},
      {"a-longer-name", "cuda:1", 1, {1}, {}, 8, 1, {}}};
  EXPECT_THAT(
      rank_table(ranks, "  "),
      StartsWith("  rank  host           device  replica  stages  cores       threads  interface\n"
                 "  0     node1          cpu     0        0,3     0-1,4 of 8  2        "
                 "eth0,10.0.0.9\n"
                 "  1     a-longer-name  cuda:1  1        1       not known   1        -\n"
                 "  (cores: "));
}

TEST(RankTableTest, SaysWhichOfTheRanksOfAStageARankIs) {
  const std::vector<RankRow> ranks = {{"a", "cpu", 0, {0}, {}, 1, 1, {}, 0},
                                      {"b", "cpu", 0, {0}, {}, 1, 1, {}, 1}};
  EXPECT_THAT(
      rank_table(ranks, ""),
      StartsWith("rank  host  device  replica  tensor  stages  cores      threads  interface\n"
                 "0     a     cpu     0        0       0       not known  1        -\n"
                 "1     b     cpu     0        1       0       not known  1        -\n"));
}

TEST(RankTableTest, StopsAfterSixtyFourRanksAndSaysSo) {
  const std::string text = rank_table(std::vector<RankRow>(70), "");
  EXPECT_THAT(text, HasSubstr("\n63  "));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("\n64  ")));
  EXPECT_THAT(text, HasSubstr("and 6 more ranks\n"));
}

TEST(InterfacesUsedTest, NamesEachInterfaceOnceAndLeavesOutLoopback) {
  NetworkFacts facts;
  facts.interfaces = {{"eth0", "10.0.0.1", "10.0.0.0/24"},
                      {"eth1", "10.1.0.1", "10.1.0.0/24"},
                      {"ib0", "10.2.0.1", "10.2.0.0/24"}};
  facts.connections = {{"10.1.0.1:5", "10.1.0.2:9"},
                       {"127.0.0.1:7", "127.0.0.1:8"},
                       {"10.0.0.1:4", "10.0.0.3:4"},
                       {"10.1.0.1:6", "10.1.0.3:9"},
                       {"192.168.0.1:1", "192.168.0.2:1"}};
  EXPECT_THAT(interfaces_used(facts), ElementsAre("eth0", "eth1", "192.168.0.1"));
  facts.interfaces.push_back({"eth0", "192.168.0.1", "192.168.0.0/24"});  // a second address
  EXPECT_THAT(interfaces_used(facts), ElementsAre("eth0", "eth1"));
  EXPECT_TRUE(interfaces_used({}).empty());
}

}  // namespace
}  // namespace sluice
