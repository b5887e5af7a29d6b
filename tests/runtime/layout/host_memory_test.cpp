#include "runtime/layout/host_memory.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "tests/runtime/temporary_directory.hpp"

namespace sluice {
namespace {

class HostMemoryTest : public ::testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_.path() / path).parent_path());
    (void)root_.write(path, text + "\n");
  }
  [[nodiscard]] HostMemory here() const { return host_memory(root_.path()); }

  TemporaryDirectory root_;
};

TEST_F(HostMemoryTest, IsTheHostsWithoutAGroupThatAllowsLess) {
  const HostMemory whole = here();
  EXPECT_GT(whole.bytes, std::size_t{1} << 20);
  EXPECT_EQ(whole.group, "");
  write("proc/self/cgroup", "12:memory:/a\n0::/a/b");
  write("sys/fs/cgroup/a/b/memory.max", "max");
  write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712");
  EXPECT_EQ(here().bytes, whole.bytes);
  EXPECT_EQ(here().group, "");
}

TEST_F(HostMemoryTest, IsTheLeastThatAGroupAllowsOrOneAboveIt) {
  write("proc/self/cgroup", "0::/a/b");
  write("sys/fs/cgroup/a/b/memory.max", "5000000");
  EXPECT_EQ(here().allowed, 5000000U);
  const std::string of_b = here().group;
  EXPECT_NE(of_b, "");
  write("sys/fs/cgroup/a/memory.max", "4000000");
  EXPECT_EQ(here().allowed, 4000000U);
  EXPECT_NE(here().group, of_b);
  const std::string of_a = here().group;
  write("sys/fs/cgroup/memory.max", "4000000");  // that of a container's own tree: shared by more
  EXPECT_EQ(here().allowed, 4000000U);
  EXPECT_NE(here().group, of_a);
}

// A group may have no limit and yet hold its processes back from an amount on.
TEST_F(HostMemoryTest, CountsWhereAGroupIsSlowedAsALimit) {
  write("proc/self/cgroup", "0::/a/b");
  write("sys/fs/cgroup/a/b/memory.max", "max");
  write("sys/fs/cgroup/a/b/memory.high", "6000000");
  EXPECT_EQ(here().allowed, 6000000U);
  const std::string of_b = here().group;
  write("sys/fs/cgroup/a/b/memory.max", "5000000");
  EXPECT_EQ(here().allowed, 5000000U);
  EXPECT_EQ(here().group, of_b);
  write("sys/fs/cgroup/a/memory.max", "7000000");
  write("sys/fs/cgroup/a/memory.high", "4000000");
  EXPECT_EQ(here().allowed, 4000000U);
  EXPECT_NE(here().group, of_b);
}

TEST_F(HostMemoryTest, KnowsGroupsOfTheFirstVersion) {
  write("proc/self/cgroup", "4:memory:/job\n1:cpu:/job\n0::/");
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "7000000");
  EXPECT_EQ(here().allowed, 7000000U);
  EXPECT_NE(here().group, "");
}

}  // namespace
}  // namespace sluice
