#include "runtime/report/timeline.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include <sluice/simulate.hpp>

#include "runtime/layout/layout.hpp"

namespace sluice {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

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

}  // namespace

void Timeline::add(const Pipeline& pipeline) {
  Step step;
  step.events = pipeline.trace();
  step.start = std::numeric_limits<double>::max();
  for (const TraceEvent& event : step.events) {
    if (event.track == TraceTrack::kCompute) step.start = std::min(step.start, event.start);
  }
  steps_.push_back(std::move(step));
  profile_.add(pipeline.last_outcome());
}

void Timeline::write(Pipeline& pipeline, const std::filesystem::path& path) const {
  const std::vector<StageTimes> times = profile_.gather(pipeline);
  pipeline.guarded([&] {
    const PipelineLayout& layout = pipeline.layout();
    // A step's origin is its first action on any rank; time 0 is the first event of all.
    std::vector<double> starts;
    double first = std::numeric_limits<double>::max();
    for (const Step& step : steps_) {
      starts.push_back(step.start);
      for (const TraceEvent& event : step.events) first = std::min(first, event.start);
    }
    starts.push_back(first);
    std::vector<double> all(starts.size() * at(layout.topology.ranks()));
    pipeline.world().all_gather(std::as_bytes(std::span(starts)),
                                std::as_writable_bytes(std::span(all)));
    for (std::size_t i = 0; i < all.size(); ++i) {
      starts[i % starts.size()] = std::min(starts[i % starts.size()], all[i]);
    }
    const double zero = starts.back();

    const int rank = pipeline.world().communicator().rank();
    RankTrace mine{.rank = rank,
                   .label = fmt::format("rank {}: replica {}, pipeline rank {}", rank,
                                        layout.replica, layout.rank),
                   .events = {}};
    const Simulation planned = simulate(layout.order, {.stages = times, .message = 0});
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      add_planned(mine.events, planned, layout.rank, starts[i]);
      mine.events.insert(mine.events.end(), steps_[i].events.begin(), steps_[i].events.end());
    }
    for (TraceEvent& event : mine.events) {
      event.start -= zero;
      event.end -= zero;
    }
    std::vector<RankTrace> traces;
    for (const std::string& packed : pipeline.world().all_gather_strings(pack(mine))) {
      if (rank == 0) traces.push_back(unpack(packed));
    }
    if (rank == 0) write_trace(path, traces);
    pipeline.world().barrier();
  });
}

}  // namespace sluice
