#include "comm/base/sum_tree.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace sluice {
namespace {

// How the leaves [first, first + count) are added, by the definition.
std::string definition(std::size_t first, std::size_t count) {
  if (count == 1) return std::to_string(first);
  const std::size_t half = std::bit_floor(count - 1);
  return "(" + definition(first, half) + "+" + definition(first + half, count - half) + ")";
}

TEST(SumTreeTest, SplitsLeavesAtTheLargestPowerOfTwoBelowTheirNumber) {
  for (std::size_t leaves = 1; leaves <= 64; ++leaves) {
    std::vector<std::string> sums(leaves);
    for (std::size_t leaf = 0; leaf < leaves; ++leaf) {
      sums[leaf] = std::to_string(leaf);
      add_leaf(leaf, leaves, [&](std::size_t into, std::size_t from) {
        ASSERT_LT(into, from);
        ASSERT_FALSE(sums[into].empty() || sums[from].empty()) << into << " + " << from;
        sums[into] = "(" + sums[into] + "+" + std::exchange(sums[from], "") + ")";
      });
    }
    EXPECT_EQ(sums[0], definition(0, leaves));
  }
}

TEST(SumTreeTest, UpToThreeLeavesIsAChain) {
  EXPECT_EQ(definition(0, 3), "((0+1)+2)");
  EXPECT_EQ(definition(0, 4), "((0+1)+(2+3))");
}

TEST(SumTreeTest, AddsLeavesThatAreAllThere) {
  for (std::size_t leaves = 1; leaves <= 64; ++leaves) {
    std::vector<double> values;
    for (std::size_t leaf = 0; leaf < leaves; ++leaf) values.push_back(static_cast<double>(leaf));
    add_leaves(leaves, [&](std::size_t into, std::size_t from) { values[into] += values[from]; });
    EXPECT_EQ(values[0], static_cast<double>(leaves * (leaves - 1) / 2));
  }
}

}  // namespace
}  // namespace sluice
