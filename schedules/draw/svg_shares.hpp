// A timeline of too many actions for a box each: ranks that follow each other share a row, and a
// column shows which share of its time they forward, go backward and idle.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include <sluice/simulate.hpp>

namespace sluice {

// [row][column][F, B, I, W] shares of the ranks' time, 0 to 1.
struct ActionShares {
  int ranks_per_row = 1;
  std::vector<std::vector<std::array<double, 4>>> rows;
};

// At most `most_cells` pairs of row and column, and at most 128 rows and 1200 columns. Linear in
// the actions and columns. Requires: a timeline.
[[nodiscard]] ActionShares action_shares(const Simulation& simulation, std::size_t most_cells);

}  // namespace sluice
