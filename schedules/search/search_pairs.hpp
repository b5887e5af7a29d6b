// Overlapped pairs: forwards that run together with the backward beside them in a rank's list.
//
// Internal to schedules/search*.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include <sluice/schedule.hpp>

namespace sluice::search {

// Whether some rank has an overlapped pair.
[[nodiscard]] bool has_pairs(const Schedule& schedule);

// What a schedule is worth; nothing where it is not legal.
using Worth = std::function<std::optional<double>(const Schedule&)>;

// Pairs each forward with the backward right after it (`backward_first`: right before it) in its
// rank's list, where they are of different micro-batches. An I with its W right behind it is that
// backward, and becomes B. Ranks whose pairs would wait in a circle, or make the schedule worth
// more time, keep their list. Nothing where no pair is left.
[[nodiscard]] std::optional<Schedule> with_pairs(const Schedule& schedule, bool backward_first,
                                                 const Worth& worth);

// Takes pairs apart, one at a time, and lets a forward change its partner for the backward on its
// other side, while that makes the schedule worth less. Asks at most `most` times.
[[nodiscard]] Schedule improved_pairs(Schedule schedule, const Worth& worth, std::int64_t most);

}  // namespace sluice::search
