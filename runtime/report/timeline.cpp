#include "runtime/report/timeline.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <compare>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include <sluice/pipeline.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

#include "comm/base/index.hpp"
#include "comm/base/steady_seconds.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/engine/engine.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/layout/job_layout.hpp"
#include "runtime/pipeline/call.hpp"
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

// The least of each value over all ranks.
std::vector<double> least(Collectives& world, std::vector<double> mine) {
  std::vector<double> all(mine.size() * at(world.communicator().size()));
  world.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  for (std::size_t i = 0; i < all.size(); ++i) {
    mine[i % mine.size()] = std::min(mine[i % mine.size()], all[i]);
  }
  return mine;
}

// `events`: [rank of the job]
std::vector<RankTrace> traces_of(std::vector<std::vector<TraceEvent>> events,
                                 const JobLayout& layout) {
  std::vector<RankTrace> traces;
  for (std::vector<TraceEvent>& each : events) {
    const int rank = static_cast<int>(traces.size());
    const Topology& topology = layout.place.topology;
    const Place place = topology.place_of(rank);
    traces.push_back(
        {.rank = rank,
         .label = fmt::format(
             "rank {}: replica {}, pipeline rank {}{}", rank, place.replica, place.pipeline,
             topology.size.tensor > 1 ? fmt::format(", tensor rank {}", place.tensor) : ""),
         .events = std::move(each)});
  }
  return traces;
}

// What makes or uses a tensor: F, or B and I, of a stage and micro-batch.
struct Half {
  int rank = 0;  // of the job
  bool forward = true;
  int stage = 0, micro_batch = 0;
  friend auto operator<=>(const Half&, const Half&) = default;
};

// [half][step]
using EventsOfSteps = std::map<Half, std::vector<TraceEventPlace>>;

EventsOfSteps events_of_steps(const std::vector<RankTrace>& traces) {
  EventsOfSteps found;
  for (std::size_t t = 0; t < traces.size(); ++t) {
    for (std::size_t i = 0; i < traces[t].events.size(); ++i) {
      const TraceEvent& event = traces[t].events[i];
      const auto kind = static_cast<ActionKind>(event.action);
      if (event.track != TraceTrack::kCompute || kind == ActionKind::kBackwardWeight ||
          kind == ActionKind::kRecompute) {
        continue;
      }
      found[{static_cast<int>(t), kind == ActionKind::kForward, event.stage, event.micro_batch}]
          .push_back({t, i});
    }
  }
  return found;
}

bool carries_anything(const Channel& channel, const EdgeTable& edges) {
  if (channel.kind == ActionKind::kSendForward) return true;
  const auto tensors = edges.inputs(edges.largest(), channel.from_stage);
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const EdgeTensor& tensor) { return tensor.wants_gradient; });
}

// `traces`: [rank of the job], each with the compute events of the same steps in their order. An
// arrow for each message of the layout's training plan, pipeline and step: from F of a stage to F
// of the next one, and from B or I of a stage to B or I of the one before. Stages of one rank
// exchange no message, nor does an edge without gradients on the way back. Arrows need not be in
// order of time.
std::vector<TraceArrow> message_arrows(const std::vector<RankTrace>& traces,
                                       const JobLayout& layout) {
  const EventsOfSteps events = events_of_steps(traces);
  const Topology& topology = layout.place.topology;
  const Plan& plan = layout.plans.train;
  std::vector<TraceArrow> arrows;
  const auto add = [&](const Half& from, const Half& to) {
    const auto made = events.find(from), used = events.find(to);
    if (made == events.end() || used == events.end()) return;
    const std::size_t steps = std::min(made->second.size(), used->second.size());
    for (std::size_t i = 0; i < steps; ++i) arrows.push_back({made->second[i], used->second[i]});
  };
  for (const Channel& channel : plan.channels) {
    if (!carries_anything(channel, layout.wires.edges)) continue;
    const bool forward = channel.kind == ActionKind::kSendForward;
    for (const std::vector<int>& pipeline : topology.groups(Axis::kPipeline)) {
      for (int micro_batch = 0; micro_batch < plan.micro_batches; ++micro_batch) {
        add({pipeline[at(channel.from_rank)], forward, channel.from_stage, micro_batch},
            {pipeline[at(channel.to_rank)], forward, channel.to_stage, micro_batch});
      }
    }
  }
  return arrows;
}

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
      sums[at(each.action.stage)].add(each.action.kind, each.end - each.start);
    }
  }
  std::vector<StageTimes> times;
  for (const ActionSeconds& sum : sums) times.push_back(mean_times(sum));
  return times;
}

double mean(const ActionSeconds::Sum& sum) {
  return sum.count == 0 ? 0 : sum.seconds / static_cast<double>(sum.count);
}

// Of I, and of whole backwards without their weight half.
double mean_input(const ActionSeconds& sums) {
  const std::int64_t count = sums.backward.count + sums.backward_input.count;
  if (count == 0) return 0;
  const double weight_halves =
      mean(sums.backward_weight) * static_cast<double>(sums.backward.count);
  return (sums.backward.seconds - weight_halves + sums.backward_input.seconds) /
         static_cast<double>(count);
}

std::vector<PlannedCollective> joined(std::vector<PlannedCollective> list,
                                      const std::vector<PlannedCollective>& more) {
  list.insert(list.end(), more.begin(), more.end());
  return list;
}

// [layer] milliseconds. Layers without cost share their stage's time equally.
std::vector<StageTimes> divided(const LayerTable& table, std::span<const StageTimes> stages) {
  std::vector<StageTimes> times(table.costs.size());
  for (std::size_t s = 0; s + 1 < table.first_layer.size(); ++s) {
    const int first = table.first_layer[s], last = table.first_layer[s + 1];
    for (const auto part :
         {&StageTimes::forward, &StageTimes::backward_input, &StageTimes::backward_weight}) {
      double sum = 0;
      for (int layer = first; layer < last; ++layer) sum += table.costs[at(layer)].*part;
      const double took = stages[s].*part;
      for (int layer = first; layer < last; ++layer) {
        const double cost = table.costs[at(layer)].*part;
        times[at(layer)].*part = 1000 * (sum > 0 ? took * cost / sum : took / (last - first));
      }
    }
  }
  return times;
}

}  // namespace

StageTimes mean_times(const ActionSeconds& sums) {
  return {.forward = mean(sums.forward),
          .backward_input = mean_input(sums),
          .backward_weight = mean(sums.backward_weight)};
}

void Profile::add(const StepOutcome& outcome) {
  if (sums_.empty()) {
    sums_ = outcome.actions;
    return;
  }
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    for (const auto kind : {&ActionSeconds::forward, &ActionSeconds::backward,
                            &ActionSeconds::backward_input, &ActionSeconds::backward_weight}) {
      (sums_[i].*kind).seconds += (outcome.actions[i].*kind).seconds;
      (sums_[i].*kind).count += (outcome.actions[i].*kind).count;
    }
  }
}

std::vector<StageTimes> Profile::gather(Pipeline& pipeline) const {
  const JobLayout& layout = PipelineAccess::layout(pipeline);
  const auto stages = static_cast<std::size_t>(layout.plans.num_stages());
  std::vector<StageTimes> times(stages, {0, 0, 0});
  for (const ActionSeconds& sum : sums_) {
    times[static_cast<std::size_t>(sum.stage)] = mean_times(sum);
  }
  static_assert(std::is_trivially_copyable_v<StageTimes>);
  std::vector<StageTimes> all(stages * static_cast<std::size_t>(layout.place.topology.ranks()));
  PipelineAccess::guarded(pipeline, [&] {
    PipelineAccess::world(pipeline).all_gather(std::as_bytes(std::span(times)),
                                               std::as_writable_bytes(std::span(all)));
  });
  for (std::size_t s = 0; s < stages; ++s) {
    const int rank = layout.plans.placement().rank_of(static_cast<int>(s));
    times[s] =
        all[static_cast<std::size_t>(layout.place.topology.rank_of({.pipeline = rank})) * stages +
            s];
  }
  return times;
}

std::string to_json_text(const LayerTable& table, std::span<const StageTimes> stages) {
  nlohmann::ordered_json json;
  json["first"] = table.first_layer;
  json["times"] = nlohmann::ordered_json::array();
  for (const StageTimes& each : stages.empty() ? table.costs : divided(table, stages)) {
    json["times"].push_back({each.forward, each.backward_input, each.backward_weight});
  }
  if (table.collectives.empty()) return dump_json(json);
  json["tensor_ranks"] = table.tensor_ranks;
  json["tensor_shards"] = table.tensor_shards;
  for (const StageCollectives& layer : table.collectives) {
    nlohmann::ordered_json lists = nlohmann::ordered_json::array();
    for (const auto& list :
         {joined(layer.forward, layer.loss), layer.backward_input, layer.backward_weight}) {
      nlohmann::ordered_json& calls = lists.emplace_back(nlohmann::ordered_json::array());
      for (const PlannedCollective& each : list) {
        calls.push_back({name_of(each.kind), each.bytes});
      }
    }
    json["collectives"].push_back(std::move(lists));
  }
  return dump_json(json);
}

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
    // What all ranks agree on: a step starts with its first action on any rank.
    starts.insert(starts.end(), {first, -std::max(begun.error, ended.error)});
    starts = least(world, std::move(starts));
    clock_error = -starts.back();
    starts.pop_back();
    first = starts.back();
    starts.pop_back();

    std::vector<TraceEvent> events;
    const Simulation planned = simulate(layout.plans.order, {.stages = times, .message = 0});
    for (const double start : starts) {
      add_planned(events, planned, layout.place.here.pipeline, start);
    }
    events.insert(events.end(), actual.begin(), actual.end());
    for (TraceEvent& event : events) {
      event.start -= first;
      event.end -= first;
    }
    std::vector<std::vector<TraceEvent>> all = gathered(world, events);
    if (world.communicator().rank() == 0) {
      const std::vector<RankTrace> traces = traces_of(std::move(all), layout);
      write_trace(path, traces, message_arrows(traces, layout), to_json_text(layers, times));
    }
    world.barrier();
  });
  return clock_error;
}

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
    step.clock_error = -least(world, {-clock.error}).front();
    const auto all = gathered(world, compute_events(pipeline, clock));
    const Placement& placement = layout.plans.placement();
    std::vector<std::vector<TraceEvent>> events;
    for (int rank = 0; rank < placement.ranks(); ++rank) {
      events.push_back(all[at(layout.place.topology.rank_of({.pipeline = rank}))]);
    }
    step.schedule = empty_schedule(layout.plans.order.name, placement, 1);
    fill(step, events);
  });
  step.planned = simulate(step.schedule, {.stages = stage_times(step)});
  return step;
}

}  // namespace sluice
