// The schedules that Sluice knows by name: what each returns is compute actions alone, and check()
// finds nothing in it. Pure and thread-safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <sluice/schedule.hpp>

#pragma GCC visibility push(default)
namespace sluice {

// Names generate() accepts, in the order they are presented to users.
[[nodiscard]] const std::vector<std::string>& schedule_names();

// Compute actions only. Throws Error(kUsage) for an unknown name (listing the known ones)
// and for shapes the algorithm cannot serve (with the nearest legal values).
[[nodiscard]] Schedule generate(std::string_view name, const ScheduleShape& shape);

// How many stages generate(name, shape) places. Throws as generate() does.
[[nodiscard]] int stages_of(std::string_view name, const ScheduleShape& shape);
// Where it places them. Throws as stages_of().
[[nodiscard]] Placement placement_of(std::string_view name, const ScheduleShape& shape);

// "forward-only" over any placement: every stage forwards every micro-batch, in an order that
// cannot deadlock. Requires: micro_batches >= 1, stages times micro_batches fits an int.
[[nodiscard]] Schedule generate_forward_only(const Placement& placement, int micro_batches);

}  // namespace sluice
#pragma GCC visibility pop
