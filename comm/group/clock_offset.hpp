// How far the ranks' clocks are apart, by ping-pong.
//
// The method is that of F. Cristian, "Probabilistic clock synchronization" (Distributed Computing
// 3, 1989), which NTP uses too. Rank 0 reads its clock, asks a rank for its time, and reads its
// clock again. The rank read its own clock between the two. So the offset is known within half of
// the round trip, and the quickest of several round trips is taken.
#pragma once

#include <functional>

#include "comm/group/collectives.hpp"

namespace sluice {

// Seconds on a clock that never goes back.
using ClockReader = std::function<double()>;

// Of one rank, at one moment.
struct ClockOffset {
  double at = 0;      // the rank's clock then
  double offset = 0;  // the rank's clock minus rank 0's, in seconds
  double error = 0;   // the true offset lies within offset - error and offset + error
};

// Collective over the ranks of `ranks`. Returns the offset of this rank's clock; rank 0's is 0
// without error. Where 0 is within the error it is the offset: ranks of one host usually share a
// clock. Rank 0 serves the ranks one after another. Each takes at most 64 round trips, and after
// 5 ms on rank 0's clock no more than 8. So it takes a few milliseconds per rank, or 8 round trips
// on a slower link. Time that a rank takes until it calls this does not count. `clock` is called
// on this thread. Errors are those of `ranks`.
[[nodiscard]] ClockOffset measure_clock_offset(Collectives& ranks, const ClockReader& clock);

// The time on rank 0's clock when this rank's shows `time`. Between the two measurements the offset
// is linear, which corrects a constant drift. Before and after them it is that of the nearer one.
// Requires: first.at <= last.at. Between them the error is at most the larger of the two, if the
// drift is constant.
[[nodiscard]] double on_first_rank(const ClockOffset& first, const ClockOffset& last, double time);

}  // namespace sluice
