// Lower bounds of what a problem's orders take, memory counted.
//
// One stage alone: the k-th forward waits for its input, for the forward before it, and where
// memory is full for the end of an earlier micro-batch. All stages together give a recursion over
// micro-batches, in which each entry is the k-th smallest time of any order, not that of a certain
// micro-batch: if y_j >= x_j + c for all j, then the k-th smallest y is at least the k-th smallest
// x plus c. A rank runs one action at a time, so that what it must have done before also counts.
// Ranks with several stages share their memory: the chunks held, times how long each is held at
// least, fit into the limit times the time the rank has.
//
// Not counted: messages that queue on a link.
//
// Internal to schedules/search*.cpp. Requires of all: backward passes are all split, or none.
#pragma once

#include "schedules/search/search_problem.hpp"

namespace sluice::search {

// See makespan_lower_bound(). Linear in the stages times micro-batches.
[[nodiscard]] double makespan_bound(const Problem& problem);
// The same for the longest own span of a rank.
[[nodiscard]] double span_bound(const Problem& problem);

}  // namespace sluice::search
