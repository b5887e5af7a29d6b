#include "runtime/report/timeline.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <span>
#include <string>

#include <sluice/simulate.hpp>

#include "comm/base/index.hpp"
#include "runtime/engine/steady_seconds.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"
#include "runtime/report/arrows.hpp"

namespace sluice {
namespace {

// The plan's simulation on `rank`, from `origin` on.
void add_planned(std::vector<TraceEvent>& events, const Simulation& planned, int rank,
                 double origin) {
  for (const SimulatedAction& action : planned.timeline[at(rank)]) {
    events.push_back({.start = origin + action.start,
                      .end = origin + action.end,
                      .action = static_cast<std::uint8_t>(action.action.kind),
                      .track = TraceTrack::kPlanned,
                      .stage = static_cast<std::int16_t>(action.action.stage),
                      .micro_batch = action.action.micro_batch});
  }
}

std::string bytes_of(const std::vector<TraceEvent>& events) {
  const auto bytes = std::as_bytes(std::span(events));
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// `gathered`: [rank of the job] bytes_of() its events.
std::vector<RankTrace> traces_of(const std::vector<std::string>& gathered,
                                 const JobLayout& layout) {
  std::vector<RankTrace> traces;
  for (const std::string& bytes : gathered) {
    const int rank = static_cast<int>(traces.size());
    RankTrace& trace = traces.emplace_back();
    trace.rank = rank;
    trace.label =
        fmt::format("rank {}: replica {}, pipeline rank {}", rank,
                    layout.place.topology.replica(rank), layout.place.topology.pipeline_rank(rank));
    trace.events.resize(bytes.size() / sizeof(TraceEvent));
    bytes.copy(reinterpret_cast<char*>(trace.events.data()), bytes.size());
  }
  return traces;
}

// What all ranks agree on.
struct CommonTimes {
  std::vector<double> step_starts;  // a step starts with its first action on any rank
  double first = 0;                 // event of all
  double clock_error = 0;           // the largest, in seconds
};

// Collective. `starts`: of the steps on this rank, and `first` its first event, on rank 0's clock.
CommonTimes common_times(Collectives& world, const std::vector<double>& starts, double first,
                         double clock_error) {
  std::vector<double> mine = starts;
  mine.insert(mine.end(), {first, -clock_error});
  std::vector<double> all(mine.size() * at(world.communicator().size()));
  world.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  for (std::size_t i = 0; i < all.size(); ++i) {
    mine[i % mine.size()] = std::min(mine[i % mine.size()], all[i]);
  }
  CommonTimes common;
  common.clock_error = -mine.back();
  mine.pop_back();
  common.first = mine.back();
  mine.pop_back();
  common.step_starts = std::move(mine);
  return common;
}

}  // namespace

void Timeline::begin(Pipeline& pipeline) {
  PipelineAccess::guarded(pipeline, [&] {
    begun_ = measure_clock_offset(PipelineAccess::world(pipeline), steady_seconds);
  });
}

void Timeline::add(const Pipeline& pipeline) {
  Step step;
  step.events = PipelineAccess::trace(pipeline);
  step.start = std::numeric_limits<double>::max();
  for (const TraceEvent& event : step.events) {
    if (event.track == TraceTrack::kCompute) step.start = std::min(step.start, event.start);
  }
  steps_.push_back(std::move(step));
  profile_.add(PipelineAccess::last_outcome(pipeline));
}

double Timeline::write(Pipeline& pipeline, const std::filesystem::path& path,
                       const LayerTable& layers) const {
  const std::vector<StageTimes> times = profile_.gather(pipeline);
  double clock_error = 0;
  PipelineAccess::guarded(pipeline, [&] {
    const JobLayout& layout = PipelineAccess::layout(pipeline);
    Collectives& world = PipelineAccess::world(pipeline);
    const ClockOffset ended = measure_clock_offset(world, steady_seconds);
    const ClockOffset begun = begun_.value_or(ended);
    const auto common_clock = [&](double time) { return on_first_rank(begun, ended, time); };

    std::vector<double> starts;
    double first = std::numeric_limits<double>::max();
    std::vector<TraceEvent> actual;
    for (const Step& step : steps_) {
      starts.push_back(common_clock(step.start));
      for (TraceEvent event : step.events) {
        event.start = common_clock(event.start);
        event.end = common_clock(event.end);
        first = std::min(first, event.start);
        actual.push_back(event);
      }
    }
    const CommonTimes common =
        common_times(world, starts, first, std::max(begun.error, ended.error));
    clock_error = common.clock_error;

    std::vector<TraceEvent> events;
    const Simulation planned = simulate(layout.plans.order, {.stages = times, .message = 0});
    for (const double start : common.step_starts) {
      add_planned(events, planned, layout.place.rank, start);
    }
    events.insert(events.end(), actual.begin(), actual.end());
    for (TraceEvent& event : events) {
      event.start -= common.first;
      event.end -= common.first;
    }
    const std::vector<std::string> gathered = world.all_gather_strings(bytes_of(events));
    if (world.communicator().rank() == 0) {
      const std::vector<RankTrace> traces = traces_of(gathered, layout);
      write_trace(path, traces, message_arrows(traces, layout), to_json_text(layers, times));
    }
    world.barrier();
  });
  return clock_error;
}

}  // namespace sluice
