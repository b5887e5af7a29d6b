// The order of every sum over ranks: a binary tree that splits n leaves at the largest power of two
// below n. Up to three leaves it is the chain (g0 + g1) + g2. An aligned subtree, of 2^k leaves
// from a multiple of 2^k on, has a sum that does not depend on the others.
#pragma once

#include <bit>
#include <cstddef>

namespace sluice {

// The additions that can be made once leaf `leaf` of `leaves` has come, after all before it:
// add(into, from) adds the sum at the place of leaf `from` to that at `into`, which is before it.
// After the last leaf the sum of all is at place 0.
template <typename Add>
constexpr void add_leaf(std::size_t leaf, std::size_t leaves, const Add& add) {
  // Subtrees are the bits of a count of leaves: one more leaf carries.
  for (std::size_t size = 1; (leaf & size) != 0; size *= 2) {
    add(leaf + 1 - 2 * size, leaf + 1 - size);
  }
  if (leaf + 1 < leaves) return;
  std::size_t last = leaves & (leaves - 1);
  for (std::size_t before = last & (last - 1); last != 0; last = before, before &= before - 1) {
    add(before, last);
  }
}

// All of them, of leaves that are all there.
template <typename Add>
constexpr void add_leaves(std::size_t leaves, const Add& add) {
  for (std::size_t leaf = 0; leaf < leaves; ++leaf) add_leaf(leaf, leaves, add);
}

// Where a sum lies whose leaves come one after the other and which keeps no more than it needs:
// that which begins at `leaf`. Among those that are there at once no two have equally many bits.
[[nodiscard]] constexpr std::size_t sum_place(std::size_t leaf) {
  return static_cast<std::size_t>(std::popcount(leaf));
}
// Places of the sums of so many leaves.
[[nodiscard]] constexpr std::size_t sum_places(std::size_t leaves) {
  std::size_t most = 0;
  for (std::size_t leaf = 0; leaf < leaves; ++leaf) {
    if (sum_place(leaf) >= most) most = sum_place(leaf) + 1;
  }
  return most;
}

}  // namespace sluice
