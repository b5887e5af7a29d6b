#include "runtime/program/supervise/hosts.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sluice/error.hpp>

#include "tests/runtime/expect_error.hpp"
#include "tests/runtime/temporary_directory.hpp"

namespace sluice::testing {
namespace {

using ::testing::ElementsAre;

class HostFileTest : public ::testing::Test {
 protected:
  std::vector<HostLine> read(const std::string& text) const {
    return read_host_file(directory_.write("hosts", text));
  }
  void refuses(const std::string& text, const std::string& part) const {
    expect_error(ErrorCode::kData, {part}, [&] { (void)read(text); });
  }

  TemporaryDirectory directory_;
};

TEST_F(HostFileTest, ReadsSlotsUsersAndComments) {
  const auto hosts =
      read("# all\n\nnode1 slots=4 max_slots=8 # a\nroot@node2 slots = 2\nnode3:16\nnode4\r\n");
  ASSERT_EQ(hosts.size(), 4U);
  EXPECT_EQ(hosts[0].name, "node1");
  EXPECT_EQ(hosts[0].slots, 4);
  EXPECT_THAT(hosts[0].lines, ElementsAre("node1 slots=4 max_slots=8 "));
  EXPECT_EQ(hosts[1].name, "node2");
  EXPECT_EQ(hosts[1].slots, 2);
  EXPECT_EQ(hosts[2].slots, 16);
  EXPECT_EQ(hosts[3].name, "node4");
  EXPECT_EQ(hosts[3].slots, std::nullopt);
}

TEST_F(HostFileTest, CountsTheLinesOfAHost) {
  const auto hosts = read("node1\nnode2\nnode1\nnode1\n");
  ASSERT_EQ(hosts.size(), 2U);
  EXPECT_EQ(hosts[0].slots, 3);
  EXPECT_EQ(hosts[1].slots, std::nullopt);
}

TEST_F(HostFileTest, RefusesWhatALauncherWouldMisread) {
  refuses("node1 slots=2\nnode1 slots=2\n", "line 2 of the host file");
  refuses("node1\nnode1 slots=2\n", "names 'node1' again");
  refuses("node1 slots=2\nnode1\n", "names 'node1' again");
  refuses("node1 slots=0\n", "'0' is no number of slots; legal are 1 to 1000000");
  refuses("node1 slots=2x\n", "'2x' is no number of slots");
  refuses("node1 slots=99999999999\n", "no number of slots");
  refuses("node1:\n", "'' is no number of slots");
  refuses("node1\n-x slots=1\n", "line 2 of the host file");
  refuses("^node1\n", "is no host");
  refuses("a;b\n", "is no host");
  refuses("# nothing\n\n", "names no host");
  refuses(std::string(17 << 20, ' '), "bytes");
}

TEST_F(HostFileTest, RefusesAFileThatIsNone) {
  expect_error(ErrorCode::kData, {directory_.path().string(), "Is a directory"},
               [&] { (void)read_host_file(directory_.path()); });
  expect_error(ErrorCode::kData, {"'/nowhere'", "No such file"},
               [] { (void)read_host_file("/nowhere"); });
}

TEST(SameHostTest, KnowsAHostWithItsDomain) {
  EXPECT_TRUE(same_host("node1", "node1"));
  EXPECT_TRUE(same_host("node1", "node1.cluster.org"));
  EXPECT_TRUE(same_host("node1.cluster.org", "node1"));
  EXPECT_FALSE(same_host("node1", "node10"));
  EXPECT_FALSE(same_host("node1.a", "node1.b"));
  EXPECT_FALSE(same_host("10", "10.77.0.1"));
  EXPECT_FALSE(same_host("", ".x"));
}

TEST(LayoutsTest, AreRefusedByPart) {
  for (const char* text :
       {"", "4", "4x", "x2", "4x2,", ",4x2", "4x2x", "4x2x0", "4x2x2x2", "100x100x101", "0x2",
        "-1x2", "4 x2", "4X2", "4x2;2x2", "99999999999x1", "100000x100000", "4x1.5"}) {
    expect_error(ErrorCode::kUsage, {"is no layout; legal are PIPELINExREPLICAS"},
                 [&] { (void)parse_layouts(text); });
  }
  expect_error(ErrorCode::kUsage, {"'2x2' is given twice"},
               [] { (void)parse_layouts("2x2,4x1,2x2"); });
}

TEST(LayoutsTest, MayHaveTensorRanks) {
  EXPECT_THAT(parse_layouts("4x2,2x1x4,2x2x1"),
              ElementsAre(Layout{4, 2}, Layout{2, 1, 4}, Layout{2, 2}));
  EXPECT_EQ((Layout{2, 3, 4}).ranks(), 24);
  EXPECT_EQ(to_string(Layout{2, 1, 4}), "2x1x4");
  expect_error(ErrorCode::kUsage, {"'2x2' is given twice"},
               [] { (void)parse_layouts("2x2,2x2x1"); });
}

TEST(LayoutsTest, HaveTensorRanksThatCanDivideTheShards) {
  require_division("4x3,2x1x4,1x1x8", &Layout::tensor, kTensorShards, 8);
  expect_error(ErrorCode::kUsage,
               {"'2x1x6' has 6 tensor ranks, which cannot divide the --tensor-shards 8",
                "legal numbers of tensor ranks: 1, 2, 4, 8"},
               [] { require_division("2x1x2,2x1x6", &Layout::tensor, kTensorShards, 8); });
}

TEST(LayoutsTest, HaveReplicasThatCanDivideTheVirtualOnes) {
  const auto require = [](const char* layouts, int parts) {
    require_division(layouts, &Layout::replicas, kVirtualReplicas, parts);
  };
  require("8x1,2x2,4x4,1x8", 8);
  require("2x3,2x6", 6);
  expect_error(ErrorCode::kUsage,
               {"'2x3' has 3 replicas, which cannot divide the --virtual-replicas 8",
                "legal numbers of replicas: 1, 2, 4, 8"},
               [&] { require("4x2,2x3,2x16", 8); });
  expect_error(ErrorCode::kUsage, {"'4x2'", "legal numbers of replicas: 1, 3, 6"},
               [&] { require("4x2", 6); });
}

class PlacesTest : public HostFileTest {
 protected:
  Places places(const std::string& text, const std::string& layouts) const {
    return {directory_.write("hosts", text), layouts};
  }
};

TEST_F(PlacesTest, TakesTheFirstLayoutThatFits) {
  EXPECT_EQ(places("a slots=3\nb slots=5\n", "4x2, 2x2,8x1").layout(), (Layout{4, 2}));
  EXPECT_EQ(places("a slots=3\nb slots=4\n", "4x2, 2x2,8x1").layout(), (Layout{2, 2}));
  EXPECT_EQ(Places("", "4x2,2x2").layout(), (Layout{4, 2}));
  EXPECT_EQ(places("a\n", "").layout(), std::nullopt);
  EXPECT_EQ(to_string(Layout{8, 1}), "8x1");
}

TEST_F(PlacesTest, LeavesHostsOut) {
  Places left = places("a slots=4 # first\nb\nb\nc slots=2\n", "4x2,3x2,4x1");
  EXPECT_EQ(left.layout(), (Layout{4, 2}));
  EXPECT_TRUE(left.leave_out({"c"}));
  EXPECT_EQ(left.layout(), (Layout{3, 2}));
  EXPECT_EQ(left.host_file(), "a slots=4 \nb\nb\n");
  EXPECT_THAT(left.names(), ElementsAre("a", "b"));
  EXPECT_FALSE(left.leave_out({"a"}));
  EXPECT_EQ(left.slots(), 2);
}

TEST_F(PlacesTest, RefusesWhatFitsNowhere) {
  expect_error(ErrorCode::kUsage, {"none of '4x2' fits the 7 slots of"},
               [&] { (void)places("a slots=3\nb slots=4\n", "4x2"); });
  expect_error(ErrorCode::kData, {"host 'b' of", "has no number of slots"},
               [&] { (void)places("a slots=3\nb\n", "4x2"); });
}

}  // namespace
}  // namespace sluice::testing
