#include <algorithm>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <sluice/pipeline.hpp>
#include <sluice/step_timeline.hpp>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/group/clock_offset.hpp"
#include "runtime/engine/engine_config.hpp"
#include "runtime/engine/steady_seconds.hpp"
#include "runtime/files/trace.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/call.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/report/profile.hpp"

namespace sluice {
namespace {

// This rank's compute actions of the last step, in order, on the clock of rank 0.
std::vector<TraceEvent> compute_events(const Pipeline& pipeline, const ClockOffset& clock) {
  std::vector<TraceEvent> events;
  for (TraceEvent event : PipelineAccess::trace(pipeline)) {
    if (event.track != TraceTrack::kCompute) continue;
    event.start = on_first_rank(clock, clock, event.start);
    event.end = on_first_rank(clock, clock, event.end);
    events.push_back(event);
  }
  return events;
}

// [rank of the job]
std::vector<std::vector<TraceEvent>> gathered(Collectives& world,
                                              const std::vector<TraceEvent>& mine) {
  const auto bytes = std::as_bytes(std::span(mine));
  std::vector<std::vector<TraceEvent>> all;
  for (const std::string& text :
       world.all_gather_strings({reinterpret_cast<const char*>(bytes.data()), bytes.size()})) {
    std::vector<TraceEvent>& events = all.emplace_back(text.size() / sizeof(TraceEvent));
    text.copy(reinterpret_cast<char*>(events.data()), text.size());
  }
  return all;
}

double largest(Collectives& world, double mine) {
  std::vector<double> all(at(world.communicator().size()));
  world.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  return *std::max_element(all.begin(), all.end());
}

SimulatedAction simulated(const TraceEvent& event, double origin) {
  return {.action = {.kind = static_cast<ActionKind>(event.action),
                     .stage = event.stage,
                     .micro_batch = event.micro_batch},
          .start = event.start - origin,
          .end = event.end - origin};
}

// What the ranks did, as a schedule and as a simulation of it: events[rank].
void fill(StepTimeline& step, const std::vector<std::vector<TraceEvent>>& events) {
  double origin = std::numeric_limits<double>::max();
  for (const auto& row : events) {
    for (const TraceEvent& event : row) origin = std::min(origin, event.start);
  }
  Simulation& run = step.measured;
  double idle = 0;
  for (std::size_t rank = 0; rank < events.size(); ++rank) {
    std::vector<SimulatedAction>& row = run.timeline.emplace_back();
    double busy = 0;
    for (const TraceEvent& event : events[rank]) {
      row.push_back(simulated(event, origin));
      step.schedule.ranks[rank].push_back({.action = row.back().action});
      step.schedule.micro_batches = std::max(step.schedule.micro_batches, event.micro_batch + 1);
      busy += event.end - event.start;
    }
    const double span = row.empty() ? 0 : row.back().end - row.front().start;
    run.busy.push_back(busy);
    run.waiting.push_back(std::max(0.0, span - busy));
    if (!row.empty()) run.makespan = std::max(run.makespan, row.back().end);
    if (span < run.span) continue;
    run.span = span;
    run.bubble_span = span > 0 ? run.waiting.back() / span : 0;
  }
  for (const double busy : run.busy) idle += run.makespan - busy;
  if (run.makespan > 0) {
    run.bubble_makespan = idle / run.makespan / static_cast<double>(run.busy.size());
  }
  run.peak_in_flight = peak_in_flight(step.schedule);
}

std::vector<StageTimes> stage_times(const StepTimeline& step) {
  std::vector<ActionSeconds> sums(at(step.schedule.placement.stages()));
  for (const auto& row : step.measured.timeline) {
    for (const SimulatedAction& each : row) {
      ActionSeconds::Sum& sum = sums[at(each.action.stage)].of(each.action.kind);
      sum.seconds += each.end - each.start;
      ++sum.count;
    }
  }
  std::vector<StageTimes> times;
  for (const ActionSeconds& sum : sums) times.push_back(mean_times(sum));
  return times;
}

}  // namespace

StepTimeline step_timeline(Pipeline& pipeline) {
  StepTimeline step;
  PipelineAccess::run_call(pipeline, Call::kTimeline, "the timeline of a step", [&] {
    Collectives& world = PipelineAccess::world(pipeline);
    const JobLayout& layout = PipelineAccess::layout(pipeline);
    on_all_ranks(world, [&] {
      if (!PipelineAccess::trace(pipeline).empty()) return;
      throw_usage(
          "there is no timeline of a step; legal: options.checks.trace, and a training "
          "step before");
    });
    const ClockOffset clock = measure_clock_offset(world, steady_seconds);
    step.clock_error = largest(world, clock.error);
    const auto all = gathered(world, compute_events(pipeline, clock));
    const Placement& placement = layout.plans.placement();
    std::vector<std::vector<TraceEvent>> events;
    for (int rank = 0; rank < placement.ranks(); ++rank) {
      events.push_back(all[at(layout.place.topology.rank_of(0, rank))]);
    }
    step.schedule = empty_schedule(layout.plans.order.name, placement, 1);
    fill(step, events);
  });
  step.planned = simulate(step.schedule, {.stages = stage_times(step)});
  return step;
}

}  // namespace sluice
