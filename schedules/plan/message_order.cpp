#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <tuple>

#include "schedules/model/dataflow.hpp"
#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"
#include "schedules/plan/plan_parts.hpp"

namespace sluice {
namespace {

std::int64_t units(const Action& action) {
  if (!is_compute(action.kind)) return 0;
  return action.kind == ActionKind::kBackward ? 2 : 1;
}

int channel_of(const PlanMessages& messages, const Action& action) {
  const auto stage = at(action.stage);
  switch (action.kind) {
    case ActionKind::kSendForward:
      return messages.forward[stage];
    case ActionKind::kSendBackward:
      return messages.backward[stage];
    case ActionKind::kRecvForward:
      return messages.forward[stage - 1];
    default:
      return messages.backward[stage + 1];
  }
}

// One run in unit time.
struct UnitTime {
  // [rank][step] When the step starts; for a RECV when its message is there.
  std::vector<std::vector<std::int64_t>> reached;
  std::vector<std::int64_t> sent;  // [channel * micro_batches + micro_batch]

  UnitTime(const Schedule& lowered, const PlanMessages& messages)
      : reached(lowered.ranks.size()), sent(messages.channels.size() * at(lowered.micro_batches)) {
    for (std::size_t rank = 0; rank < reached.size(); ++rank) {
      reached[rank].reserve(lowered.ranks[rank].size());
    }
    std::vector<std::int64_t> clocks(lowered.ranks.size());
    Dataflow dataflow(lowered);
    const bool finished = dataflow.run([&](int rank, int, const Step& step) {
      std::int64_t& clock = clocks[at(rank)];
      const Action& action = step.action;
      if (is_message(action.kind)) {
        std::int64_t& time = sent[at(channel_of(messages, action)) * at(lowered.micro_batches) +
                                  at(action.micro_batch)];
        if (is_send(action.kind)) time = clock;
        clock = std::max(clock, time);
      }
      reached[at(rank)].push_back(clock);
      clock += units(action);
      if (step.overlapped) clock += units(*step.overlapped);
    });
    if (!finished) {
      refuse("plan of '", lowered.name, "': the schedule cannot run to its end; check() says why");
    }
  }
};

// Places channels in the order their messages of one time are issued, and numbers the unordered
// pairs of ranks.
struct ChannelOrder {
  std::vector<std::int32_t> place;     // [channel]
  std::vector<std::int32_t> exchange;  // [channel] equal where the same two ranks talk

  explicit ChannelOrder(const std::vector<Channel>& channels)
      : place(channels.size()), exchange(channels.size()) {
    const auto key = [&](std::size_t i) {
      const auto [low, high] = std::minmax(channels[i].from_rank, channels[i].to_rank);
      return std::tuple(low % 2, low, high);
    };
    std::vector<std::size_t> order(channels.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
    for (std::size_t i = 0; i < order.size(); ++i) {
      place[order[i]] = static_cast<std::int32_t>(i);
      const bool first = i == 0 || key(order[i]) != key(order[i - 1]);
      exchange[order[i]] = first ? static_cast<std::int32_t>(i) : exchange[order[i - 1]];
    }
  }
};

// A rank's side of a message; index is its position in the channel.
struct Side {
  std::int64_t time = 0;
  std::int32_t place = 0, index = 0, channel = 0, micro_batch = 0;
  bool receives = false;
};

// The step of a list before which what happens at `time` must be issued. `step` only moves on.
std::size_t first_step_from(const std::vector<std::int64_t>& reached, std::int64_t time,
                            std::size_t step) {
  while (step < reached.size() && reached[step] < time) ++step;
  return step;
}

}  // namespace

std::vector<std::vector<Issue>> global_issue_order(const Schedule& lowered,
                                                   const PlanMessages& messages) {
  const UnitTime unit(lowered, messages);
  const ChannelOrder order(messages.channels);
  const auto micro_batches = at(lowered.micro_batches);
  std::vector<std::int32_t> index_of(unit.sent.size());
  for (std::size_t channel = 0; channel < messages.orders.size(); ++channel) {
    std::int32_t next = 0;
    for (const int micro_batch : messages.orders[channel]) {
      index_of[channel * micro_batches + at(micro_batch)] = next++;
    }
  }
  std::vector<std::vector<Issue>> issues(lowered.ranks.size());
  std::vector<Side> sides;
  for (std::size_t rank = 0; rank < issues.size(); ++rank) {
    sides.clear();
    for (const Step& step : lowered.ranks[rank]) {
      if (!is_message(step.action.kind)) continue;
      const int channel = channel_of(messages, step.action);
      const std::size_t message = at(channel) * micro_batches + at(step.action.micro_batch);
      sides.push_back({unit.sent[message], order.place[at(channel)], index_of[message], channel,
                       step.action.micro_batch, is_receive(step.action.kind)});
    }
    std::sort(sides.begin(), sides.end(), [](const Side& a, const Side& b) {
      return std::tie(a.time, a.place, a.index) < std::tie(b.time, b.place, b.index);
    });
    issues[rank].reserve(sides.size());
    std::size_t step = 0;
    for (std::size_t i = 0; i < sides.size(); ++i) {
      const Side& side = sides[i];
      step = first_step_from(unit.reached[rank], side.time, step);
      const bool together =
          i > 0 && sides[i - 1].time == side.time &&
          order.exchange[at(sides[i - 1].channel)] == order.exchange[at(side.channel)];
      issues[rank].push_back({side.channel, side.micro_batch, static_cast<std::int32_t>(step),
                              side.receives, together});
    }
  }
  return issues;
}

std::vector<int> unit_time_depths(const Schedule& lowered, const PlanMessages& messages) {
  const UnitTime unit(lowered, messages);
  const std::size_t count = messages.channels.size();
  const auto micro_batches = at(lowered.micro_batches);
  std::vector<std::vector<std::int64_t>> released(count);
  const auto release = [&](const Action& action, std::int64_t time) {
    if (!ends_use(action.kind, lowered.forward_only)) return;
    const auto stage = at(action.stage);
    const int forward = stage > 0 ? messages.forward[stage - 1] : -1;
    const int backward = stage + 1 < messages.backward.size() ? messages.backward[stage + 1] : -1;
    if (forward >= 0) released[at(forward)].push_back(time);
    if (backward >= 0) released[at(backward)].push_back(time);
  };
  for (std::size_t rank = 0; rank < lowered.ranks.size(); ++rank) {
    for (std::size_t i = 0; i < lowered.ranks[rank].size(); ++i) {
      const Step& step = lowered.ranks[rank][i];
      const std::int64_t end = unit.reached[rank][i] + units(step.action) +
                               (step.overlapped ? units(*step.overlapped) : 0);
      release(step.action, end);
      if (step.overlapped) release(*step.overlapped, end);
    }
  }
  std::vector<int> depths(count);
  for (std::size_t channel = 0; channel < count; ++channel) {
    std::size_t gone = 0, begun = 0;
    for (const int micro_batch : messages.orders[channel]) {
      const std::int64_t time = unit.sent[channel * micro_batches + at(micro_batch)];
      while (gone < released[channel].size() && released[channel][gone] < time) ++gone;
      depths[channel] = std::max(depths[channel], static_cast<int>(++begun - gone));
    }
  }
  return depths;
}

}  // namespace sluice
