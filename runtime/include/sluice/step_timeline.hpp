// A training step as it ran, beside its plan: what draw_timeline() and draw_svg() of
// <sluice/draw.hpp> show.
//
//   options.checks.trace = true;
//   ...
//   const StepTimeline last = step_timeline(pipeline);
//   if (world.rank() == 0) std::cout << draw_timeline(last.schedule, last.measured);
#pragma once

#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

#pragma GCC visibility push(default)
namespace sluice {

class Pipeline;  // <sluice/pipeline.hpp>

// Times are in seconds, from the first action of any rank on.
struct StepTimeline {
  Schedule schedule;    // what replica 0 ran: compute actions, each in a step of its own
  Simulation measured;  // as it ran; peak_in_flight follows from the order
  Simulation planned;   // with the mean time of each stage's actions, and messages that take none
  // The largest error in seconds of a rank's clock against that of rank 0. An action may seem to
  // begin that much before its input was there.
  double clock_error = 0;
};

// Collective: the last training step, the same on every rank. Takes a few milliseconds per rank,
// which compare their clocks. Throws Error(kUsage) on all ranks without options.checks.trace, and
// before the first step; the pipeline goes on. On a GPU the times are those of the device.
[[nodiscard]] StepTimeline step_timeline(Pipeline& pipeline);

}  // namespace sluice
#pragma GCC visibility pop
