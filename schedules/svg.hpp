// Schedules as SVG pictures that read like the papers' figures: time from left to right, one row
// per rank, forward blue, backward green (its input half teal), weight gradient violet, later
// chunks of a rank lighter, micro-batch numbers in the boxes, idle time white, an overlapped pair
// as two halves of one box; a legend and, as caption, bubbles and peak memory.
#pragma once

#include <cstddef>
#include <string>

#include "schedules/schedule.hpp"
#include "schedules/simulate.hpp"

namespace sluice {

// Beyond it a picture is no help, and viewers choke.
inline constexpr std::size_t kMaxSvgActions = 100'000;

// Boxes are as wide as their actions are long in the simulation; the shortest one has room for its
// number, as long as the picture then stays below 20,000 pixels. At most 400 bytes per action.
// Requires: `simulation` is simulate()'s of this schedule or of what lower() made of it. Throws
// std::invalid_argument for more than kMaxSvgActions actions and for a simulation of another
// schedule.
[[nodiscard]] std::string draw_svg(const Schedule& schedule, const Simulation& simulation);

}  // namespace sluice
