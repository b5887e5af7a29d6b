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

// The times of a simulation, or of a step that ran, as text: one row per rank, time from left to
// right over at most `columns` columns of 1 and more. An action begins with its name, `F0` (with
// the stage in front where a rank has several), as far as it has columns, and goes on with `-`; one
// that has no column is left out. A line with the makespan and the bubble follows. Throws
// Error(kUsage) for a simulation without timeline.
[[nodiscard]] std::string draw_timeline(const Schedule& schedule, const Simulation& simulation,
                                        int columns = 80);

// Beyond that many boxes viewers choke.
inline constexpr std::size_t kMaxSvgActions = 100'000;

// Pictures read like the papers' figures: time from left to right, one row per rank. Forwards are
// blue, backwards green (the input half teal), weight gradients violet, idle time white; later
// chunks of a rank are lighter. Boxes show the micro-batch; an overlapped pair is two halves of one
// box. A pointer over a box shows its rank, action and times. Thin lines lead from the end of an
// action to where its message arrives, where the simulation has transfers that take time. Below the
// rows, the bytes that each rank holds over time, where it has them. A legend and a caption with
// bubbles and peak memory follow.
//
// Boxes are as wide as their actions are long in the simulation; the shortest one has room for its
// number, as long as the picture then stays below `most_width` pixels. At most 500 bytes per
// action. Requires: `simulation` is simulate()'s of this schedule or of what lower() made of it, or
// of step_timeline(), as `schedule` then is. Throws Error(kUsage) for a simulation of
// another schedule, and for more than kMaxSvgActions actions.
[[nodiscard]] std::string draw_svg(const Schedule& schedule, const Simulation& simulation,
                                   int most_width = 20'000);

}  // namespace sluice
#pragma GCC visibility pop
