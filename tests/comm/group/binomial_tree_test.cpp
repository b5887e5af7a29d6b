#include "comm/group/binomial_tree.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace sluice {
namespace {

// Job sizes: all small ones, and a large one.
std::vector<int> sizes() {
  std::vector<int> result(70);
  std::iota(result.begin(), result.end(), 1);
  result.push_back(4096);
  return result;
}

int ceil_log2(int ranks) {
  int log = 0;
  while ((1 << log) < ranks) ++log;
  return log;
}

TEST(BinomialTreeTest, SubtreesOfChildrenFollowOnEachOther) {
  for (const int ranks : sizes()) {
    for (int rank = 0; rank < ranks; ++rank) {
      int next = rank + 1;
      for (int i = 0; i < child_count(rank, ranks); ++i) {
        const int child = tree_child(rank, i);
        ASSERT_EQ(child, next) << ranks;
        ASSERT_EQ(tree_parent(child), rank) << ranks;
        next = subtree_end(child, ranks);
        ASSERT_LE(next, ranks) << rank;
      }
      ASSERT_EQ(next, subtree_end(rank, ranks)) << ranks;
    }
    EXPECT_EQ(subtree_end(0, ranks), ranks);
  }
}

// What a gather costs: the root's receives, the messages one after the other, and what passes
// through the ranks when each has one byte.
TEST(BinomialTreeTest, IsAsDeepAsTheLogarithmOfItsSize) {
  for (const int ranks : sizes()) {
    int deepest = 0, received = 0;
    std::int64_t moved = 0;
    for (int rank = 1; rank < ranks; ++rank) {
      int depth = 1;
      for (int up = tree_parent(rank); up != 0; up = tree_parent(up)) ++depth;
      deepest = std::max(deepest, depth);
      const int subtree = subtree_end(rank, ranks) - rank;
      moved += subtree;
      if (tree_parent(rank) == 0) received += subtree;
    }
    EXPECT_EQ(child_count(0, ranks), ceil_log2(ranks)) << ranks;
    EXPECT_LE(deepest, ceil_log2(ranks)) << ranks;
    EXPECT_EQ(received, ranks - 1) << ranks;
    EXPECT_LE(2 * moved, std::int64_t{ranks} * ceil_log2(ranks)) << ranks;
  }
  EXPECT_EQ(child_count(0, 4096), 12);
  EXPECT_EQ(subtree_end(2048, 4096), 4096);
}

}  // namespace
}  // namespace sluice
