// The schedules side by side on the same work: what `sluice schedule compare` prints.
#pragma once

#include <string>
#include <vector>

#include <sluice/search.hpp>

#include "runtime/explore/schedule_report.hpp"

namespace sluice {

struct StepTimes {
  double makespan = 0, span = 0;
};

// A sentence where zb-h2's shorter spans, which papers count, do not shorten a step that ends with
// a barrier; else empty.
[[nodiscard]] std::string remark_on_barrier(const StepTimes& zb_h1, const StepTimes& zb_h2);

struct Comparison {
  Objective objective = Objective::kMakespan;
  std::vector<ScheduleReport> rows;  // ascending objective, then peak, then name; without actions
  std::vector<std::string> remarks;  // what a reader may wonder about, a sentence each
  // Why the other schedules cannot serve the shape or exceed the memory limit, a sentence
  // each.
  std::vector<std::string> left_out;
};

// Every schedule that trains, on the same work: `costs` are of CostsOf::kRankShare. shape.chunks of
// 0: for each schedule 2 where it takes them, otherwise 1. Throws Error(kUsage) where no schedule
// serves the shape.
[[nodiscard]] Comparison compare_schedules(const ScheduleShape& shape, const Costs& costs,
                                           Objective objective = Objective::kMakespan);

// A table, one row per schedule.
[[nodiscard]] std::string to_table_text(const Comparison& comparison);
// One JSON object: objective, rows, each as to_json_text() writes it, remarks and left_out.
[[nodiscard]] std::string to_json_text(const Comparison& comparison);

// `sluice schedule compare ...`
int schedule_compare_command(const std::vector<std::string>& arguments);

}  // namespace sluice
