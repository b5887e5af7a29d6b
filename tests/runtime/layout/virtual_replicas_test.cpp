#include "runtime/layout/virtual_replicas.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include <sluice/error.hpp>

#include "tests/runtime/expect_error.hpp"

namespace sluice {
namespace {

TEST(VirtualReplicasTest, OneReplicaComputesAnyNumberOthersAPowerOfTwoEach) {
  for (const int parts : {1, 2, 3, 6, 7, 1000}) EXPECT_EQ(shares_of(parts, 1), parts);
  EXPECT_EQ(shares_of(2, 2), 1);
  EXPECT_EQ(shares_of(6, 3), 2);
  EXPECT_EQ(shares_of(96, 3), 32);
  EXPECT_EQ(shares_of(8, 4), 2);
  for (const int replicas : {1, 2, 3, 64}) EXPECT_EQ(shares_of(0, replicas), 1);
  for (const int replicas : {2, 4, 5, 12}) EXPECT_FALSE(can_divide(6, replicas)) << replicas;
}

TEST(VirtualReplicasTest, KnowsAllReplicasThatCanDivideThem) {
  for (const int parts : {1, 2, 3, 6, 7, 8, 12, 96}) {
    std::vector<int> expected;
    for (int replicas = 1; replicas <= parts; ++replicas) {
      if (can_divide(parts, replicas)) expected.push_back(replicas);
    }
    EXPECT_EQ(dividing(parts), expected) << parts;
  }
}

TEST(VirtualReplicasTest, RefusesOthersAndNamesTheNearestLegalNumbers) {
  const auto refused = [](int parts, int replicas, const std::string& text) {
    expect_error(ErrorCode::kUsage, {text}, [&] { (void)shares_of(parts, replicas); });
  };
  refused(-1, 1, "-1 virtual replicas; legal are numbers from 1");
  refused(6, 2, "6 virtual replicas with 2 replicas; legal is");
  refused(6, 2, "here 4 or 8, or one replica");
  refused(2, 4, "here 4, or one replica");
  refused(-3, 3, "here 3, or one replica");
  refused(std::numeric_limits<int>::max(), 2, "here 1073741824, or one replica");
}

}  // namespace
}  // namespace sluice
