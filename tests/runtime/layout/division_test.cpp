#include "runtime/layout/division.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include <sluice/error.hpp>

#include "tests/runtime/expect_error.hpp"

namespace sluice {
namespace {

TEST(DivisionTest, OneHolderComputesAnyNumberOthersAPowerOfTwoEach) {
  for (const int parts : {1, 2, 3, 6, 7, 1000})
    EXPECT_EQ(shares_of(parts, 1, kVirtualReplicas), parts);
  EXPECT_EQ(shares_of(2, 2, kVirtualReplicas), 1);
  EXPECT_EQ(shares_of(6, 3, kVirtualReplicas), 2);
  EXPECT_EQ(shares_of(96, 3, kVirtualReplicas), 32);
  EXPECT_EQ(shares_of(8, 4, kVirtualReplicas), 2);
  for (const int replicas : {1, 2, 3, 64}) EXPECT_EQ(shares_of(0, replicas, kVirtualReplicas), 1);
  for (const int replicas : {2, 4, 5, 12}) EXPECT_FALSE(can_divide(6, replicas)) << replicas;
}

TEST(DivisionTest, KnowsAllHoldersThatCanDivideThem) {
  for (const int parts : {1, 2, 3, 6, 7, 8, 12, 96}) {
    std::vector<int> expected;
    for (int replicas = 1; replicas <= parts; ++replicas) {
      if (can_divide(parts, replicas)) expected.push_back(replicas);
    }
    EXPECT_EQ(dividing(parts), expected) << parts;
  }
}

TEST(DivisionTest, RefusesOthersAndNamesTheNearestLegalNumbers) {
  const auto refused = [](int parts, int replicas, const std::string& text) {
    expect_error(ErrorCode::kUsage, {text},
                 [&] { (void)shares_of(parts, replicas, kVirtualReplicas); });
  };
  refused(-1, 1, "-1 virtual replicas; legal are numbers from 1");
  refused(6, 2, "6 virtual replicas with 2 replicas; legal is");
  refused(6, 2, "here 4 or 8, or one replica");
  refused(2, 4, "here 4, or one replica");
  refused(-3, 3, "here 3, or one replica");
  refused(std::numeric_limits<int>::max(), 2, "here 1073741824, or one replica");
  expect_error(ErrorCode::kUsage,
               {"6 tensor shards with 4 tensor ranks; legal is the number of tensor ranks times a "
                "power of two, here 4 or 8, or one tensor rank with any number"},
               [] { (void)shares_of(6, 4, kTensorShards); });
}

}  // namespace
}  // namespace sluice
