// The binomial tree of the small collectives: which rank passes on to which. Ranks are counted from
// the collective's root, which is rank 0 here. A rank's subtree is the ranks from itself to
// subtree_end(), without a gap, so that what is gathered keeps the order of ranks. Of n ranks the
// root has ceil(log2(n)) children, and no rank is further from it than that.
#pragma once

#include <algorithm>
#include <bit>

namespace sluice {

// Requires: rank > 0.
[[nodiscard]] constexpr int tree_parent(int rank) { return rank & (rank - 1); }

// One beyond the last rank of the subtree of `rank`, among `ranks`.
[[nodiscard]] constexpr int subtree_end(int rank, int ranks) {
  return rank == 0 ? ranks : std::min(ranks, rank + (rank & -rank));
}

[[nodiscard]] constexpr int child_count(int rank, int ranks) {
  return static_cast<int>(
      std::bit_width(static_cast<unsigned>(subtree_end(rank, ranks) - rank - 1)));
}

// Child `index` of [0, child_count()): their subtrees follow on each other, the smallest first.
[[nodiscard]] constexpr int tree_child(int rank, int index) { return rank + (1 << index); }

}  // namespace sluice
