#include "runtime/report/arrows.hpp"

#include <algorithm>
#include <compare>
#include <map>

#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>

namespace sluice {
namespace {

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
      if (event.track != TraceTrack::kCompute || kind == ActionKind::kBackwardWeight) continue;
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

}  // namespace

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
    for (int replica = 0; replica < topology.replicas; ++replica) {
      for (int micro_batch = 0; micro_batch < plan.micro_batches; ++micro_batch) {
        add({topology.rank_of(replica, channel.from_rank), forward, channel.from_stage,
             micro_batch},
            {topology.rank_of(replica, channel.to_rank), forward, channel.to_stage, micro_batch});
      }
    }
  }
  return arrows;
}

}  // namespace sluice
