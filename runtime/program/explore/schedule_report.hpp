// The report of `sluice schedule` on one schedule, generated, found or read from a file: proven by
// verify(), timed by simulate(). Its JSON is the document that every text is made of.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include <sluice/schedule.hpp>
#include <sluice/schedule_file.hpp>
#include <sluice/simulate.hpp>

#include "runtime/program/explore/schedule_costs.hpp"

namespace sluice {

struct LoadedSchedule {
  Schedule schedule;
  std::string source;  // one line: the file, its format and alphabet, what was dropped; empty: none
  std::optional<MadeFor> made_for = {};
};

// Sluice's JSON or PyTorch's CSV, distinguished by the first byte. Throws Error(kPlan) naming the
// path where it cannot be read or is refused.
[[nodiscard]] LoadedSchedule load_schedule(const std::filesystem::path& path,
                                           CsvAlphabet alphabet = CsvAlphabet::kDetect);

// The schedule of that name. Throws Error(kUsage) with the nearest legal values where name or shape
// cannot be served, or the shape has more pairs of stage and micro-batch than can be simulated
// here.
[[nodiscard]] LoadedSchedule generate_schedule(std::string_view name, const ScheduleShape& shape);

struct ScheduleReport {
  Schedule schedule;  // compute actions only
  Simulation simulation;
  std::optional<MadeFor> made_for;  // for the schedule file
  nlohmann::ordered_json json;      // as schedule_output.schema.json says of a report
};

// `known`: what the schedule's stages cost, where a search has said it; else `costs` say that, and
// the memory limit. Requires nothing of the schedule. Throws Error(kUsage) where it has more pairs
// of stage and micro-batch than can be simulated here, or costs do not fit it; Error(kPlan), with
// the grid, where it breaks a rule, and where a rank exceeds the memory limit.
[[nodiscard]] ScheduleReport report_schedule(LoadedSchedule loaded, const Costs& costs,
                                             const SimulationDetail& detail,
                                             const SimulationTimes* known = nullptr);

}  // namespace sluice
