// The schedule that search_schedule() finds for given costs: what `sluice schedule auto` prints.
#pragma once

#include <string>
#include <vector>

#include <sluice/search.hpp>

#include "runtime/explore/schedule_report.hpp"

namespace sluice {

struct AutoSchedule {
  SearchResult result;
  ScheduleReport report;  // of result.schedule; `source` says where it comes from
};

// `request` without model and limits, which are those of `costs`: of CostsOf::kRankShare, or with
// layers > 0 of CostsOf::kStage for as many layers. Throws Error(kUsage) for illegal requests and
// where nothing fits the memory, with the nearest legal values.
[[nodiscard]] AutoSchedule find_schedule(SearchRequest request, const Costs& costs, int layers,
                                         const SimulationDetail& detail);

// What was tried, best first, and what was chosen; as a table.
[[nodiscard]] std::string to_table_text(const AutoSchedule& found, Objective objective);
// to_json_text() of the report, and origin, placement, objective, lower_bound, ratio, first_layer,
// candidates, left_out.
[[nodiscard]] std::string to_json_text(const AutoSchedule& found, Objective objective);

// `sluice schedule auto ...`
int schedule_auto_command(const std::vector<std::string>& arguments);

}  // namespace sluice
