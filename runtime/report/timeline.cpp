#include "runtime/report/timeline.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <span>
#include <string>

#include <sluice/simulate.hpp>

#include "comm/base/index.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/pipeline_access.hpp"

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

}  // namespace

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

void Timeline::write(Pipeline& pipeline, const std::filesystem::path& path) const {
  const std::vector<StageTimes> times = profile_.gather(pipeline);
  PipelineAccess::guarded(pipeline, [&] {
    const JobLayout& layout = PipelineAccess::layout(pipeline);
    Collectives& world = PipelineAccess::world(pipeline);
    // A step's origin is its first action on any rank; time 0 is the first event of all.
    std::vector<double> starts;
    double first = std::numeric_limits<double>::max();
    for (const Step& step : steps_) {
      starts.push_back(step.start);
      for (const TraceEvent& event : step.events) first = std::min(first, event.start);
    }
    starts.push_back(first);
    std::vector<double> all(starts.size() * at(layout.place.topology.ranks()));
    world.all_gather(std::as_bytes(std::span(starts)), std::as_writable_bytes(std::span(all)));
    for (std::size_t i = 0; i < all.size(); ++i) {
      starts[i % starts.size()] = std::min(starts[i % starts.size()], all[i]);
    }

    std::vector<TraceEvent> events;
    const Simulation planned = simulate(layout.plans.order, {.stages = times, .message = 0});
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      add_planned(events, planned, layout.place.rank, starts[i]);
      events.insert(events.end(), steps_[i].events.begin(), steps_[i].events.end());
    }
    for (TraceEvent& event : events) {
      event.start -= starts.back();
      event.end -= starts.back();
    }
    const std::vector<std::string> gathered = world.all_gather_strings(bytes_of(events));
    if (world.communicator().rank() == 0) write_trace(path, traces_of(gathered, layout));
    world.barrier();
  });
}

}  // namespace sluice
