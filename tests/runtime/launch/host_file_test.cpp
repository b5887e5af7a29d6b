#include "runtime/launch/host_file.hpp"

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
  EXPECT_EQ(host_file_text(hosts), "node1\nnode1\nnode1\nnode2\n");
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
  refuses(std::string(17 << 20, ' '), "more than");
}

TEST_F(HostFileTest, RefusesAFileThatIsNone) {
  expect_error(ErrorCode::kData, {"cannot read the host file"},
               [&] { (void)read_host_file(directory_.path()); });
  expect_error(ErrorCode::kData, {"cannot read the host file '/nowhere'"},
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

}  // namespace
}  // namespace sluice::testing
