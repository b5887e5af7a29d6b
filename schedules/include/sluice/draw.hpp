// Schedules as text and as SVG pictures. Pure and thread-safe.
#pragma once

#include <cstddef>
#include <string>

#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

#pragma GCC visibility push(default)
namespace sluice {

// The schedule as text: one row per rank, one column per unit of time, cells `F0 B0 I0 W0` (stage
// index in front where a rank has several), idle cells blank. Every compute step takes one unit, a
// pair prints as `F7+B3`. `mark` brackets one cell and points at its row; a schedule that cannot
// run, or whose marked step does not compute, is drawn by list position instead of time. Any
// schedule can be drawn, also a broken one. Rows end in a line feed, without trailing blanks.
[[nodiscard]] std::string draw_grid(const Schedule& schedule, const Violation* mark = nullptr);

// The violation's message, then its grid with the offending cell marked.
[[nodiscard]] std::string describe(const Schedule& schedule, const Violation& violation);

// Beyond that many an SVG picture is no help, and viewers choke.
inline constexpr std::size_t kMaxSvgActions = 100'000;

// Pictures read like the papers' figures: time from left to right, one row per rank. Forwards are
// blue, backwards green (the input half teal), weight gradients violet, idle time white; later
// chunks of a rank are lighter. Boxes show the micro-batch; an overlapped pair is two halves of one
// box. A legend and a caption with bubbles and peak memory follow.
//
// Boxes are as wide as their actions are long in the simulation; the shortest one has room for its
// number, as long as the picture then stays below 20,000 pixels. At most 400 bytes per action.
// Requires: `simulation` is simulate()'s of this schedule or of what lower() made of it. Throws
// std::invalid_argument for more than kMaxSvgActions actions and for a simulation of another
// schedule.
[[nodiscard]] std::string draw_svg(const Schedule& schedule, const Simulation& simulation);

}  // namespace sluice
#pragma GCC visibility pop
