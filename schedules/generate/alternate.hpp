// The shape that 1F1B and its relatives share: some forwards ahead, then one forward and one
// backward in turn, then the remaining backwards.
#pragma once

#include <algorithm>
#include <string_view>

#include <sluice/schedule.hpp>

namespace sluice::generators {

struct StageMicroBatch {
  int stage = 0, micro_batch = 0;
};

struct Alternation {
  int count = 0;       // forwards, and as many backwards
  int ahead = 0;       // forwards before the first backward's own; above `count`: all of them
  bool split = false;  // backwards as I and W
  int trail = 0;       // how many backwards W runs after I
};

// Appends one rank's list. forward(i) and backward(i) name the i-th, from 0 on.
template <class Forward, class Backward>
void append_alternating(Schedule& schedule, Alternation rank, const Forward& forward,
                        const Backward& backward) {
  const auto add = [&](ActionKind kind, const StageMicroBatch& of) {
    append(schedule, kind, of.stage, of.micro_batch);
  };
  const int count = rank.count;
  const int ahead = std::min(rank.ahead, count);
  const int trail = std::min(rank.trail, count);
  for (int i = 0; i < ahead; ++i) add(ActionKind::kForward, forward(i));
  for (int i = 0; i < count; ++i) {
    if (ahead + i < count) add(ActionKind::kForward, forward(ahead + i));
    add(rank.split ? ActionKind::kBackwardInput : ActionKind::kBackward, backward(i));
    if (rank.split && i >= trail) add(ActionKind::kBackwardWeight, backward(i - trail));
  }
  for (int i = count - trail; rank.split && i < count; ++i) {
    add(ActionKind::kBackwardWeight, backward(i));
  }
}

// One chunk per rank, micro-batches ascending. Stage s forwards k(p - 1 - s) micro-batches ahead;
// with `split`, W runs ks micro-batches after I.
[[nodiscard]] Schedule alternating(std::string_view name, const ScheduleShape& shape, int k,
                                   bool split);

}  // namespace sluice::generators
