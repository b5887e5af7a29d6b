// The schedules side by side on the same work: what `sluice schedule compare` prints.
#pragma once

#include <string>
#include <vector>

#include "runtime/schedule_report.hpp"

namespace sluice {

struct Comparison {
  std::vector<ScheduleReport> rows;  // ascending makespan, then peak, then name
  // Why the other schedules cannot serve the shape, a sentence each.
  std::vector<std::string> left_out;
};

// Every schedule that trains, on the same work: `costs` are of CostsOf::kRankShare. shape.chunks of
// 0: for each schedule 2 where it takes them, otherwise 1. Throws Error(kUsage) where no schedule
// serves the shape.
[[nodiscard]] Comparison compare_schedules(const ScheduleShape& shape, const Costs& costs);

// A table, one row per schedule.
[[nodiscard]] std::string to_table_text(const Comparison& comparison);
// One JSON object: rows, each as to_json_text() writes it, and left_out.
[[nodiscard]] std::string to_json_text(const Comparison& comparison);

// `sluice schedule compare ...`
int schedule_compare_command(const std::vector<std::string>& arguments);

}  // namespace sluice
