// The stage maps of a search: placements, and the model cut into their stages.
//
// Internal to schedules/search*.cpp.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <sluice/search.hpp>

namespace sluice::search {

inline constexpr int kMaxLayers = 10'000;  // cutting takes their square

struct StageMap {
  std::string name;  // "linear", "looped", "V", "zigzag" (there and back, several times)
  int chunks = 1;
  Placement placement = Placement::linear(1);
  std::vector<int> first_layer;  // as SearchResult::first_layer
  SimulationTimes times;         // of its stages
};

// The maps for the request, fewest chunks first. Numbers of chunks that the layers do not
// allow leave a sentence in `left_out`. Throws std::invalid_argument where none is left.
[[nodiscard]] std::vector<StageMap> stage_maps_of(const SearchRequest& request,
                                                  std::vector<std::string>& left_out);

// F, I and W together.
[[nodiscard]] double work_of(const StageTimes& times);

// Moves each border between stages by one layer, in place, and keeps the move where is_better()
// says so; round by round while one is kept, at most `rounds`. True where any was.
bool move_borders(std::vector<int>& first, int rounds, const std::function<bool()>& is_better);

// `costs` cut into as many runs as `placement` has stages, none empty: the smallest possible
// largest run, by dynamic programming, then borders moved by one while that makes the most loaded
// rank lighter. Requires: at least as many costs as stages.
[[nodiscard]] std::vector<int> cut(const std::vector<double>& costs, const Placement& placement);

}  // namespace sluice::search
