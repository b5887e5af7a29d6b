// The micro-batches whose state a rank offloads between forward and backward.
#pragma once

#include <cstddef>
#include <vector>

#include <sluice/schedule.hpp>

namespace sluice {

// Where moves go in a rank's list, in order of steps.
struct MovePlace {
  std::size_t step = 0;
  Action action;
};
struct RankMoves {
  std::vector<MovePlace> offloads;  // each after its step, and the step's messages
  std::vector<MovePlace> fetches;   // each before its step, and the step's messages
};

// As LowerOptions::resident says; `resident` has an entry for every stage.
[[nodiscard]] RankMoves choose_moves(const std::vector<Step>& steps, const std::vector<int>& own,
                                     const std::vector<int>& resident);

}  // namespace sluice
