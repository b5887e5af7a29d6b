// The report of `sluice schedule` on one schedule, generated or read from a file: proven by
// verify(), timed by simulate(), drawn.
#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>
#include <sluice/schedule_file.hpp>
#include <sluice/simulate.hpp>
#include <sluice/verify.hpp>

#include "runtime/explore/schedule_costs.hpp"

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
  int chunks = 1;     // most stages of a rank
  Simulation simulation;
  bool exact = false;
  bool planned = false;                    // where not, `transports` is unknown
  std::vector<TransportModel> transports;  // under which its plans end: MPI's, or NCCL's
  std::string source;                      // as LoadedSchedule::source
  std::string costs_source;                // Costs::source()
  std::optional<MadeFor> made_for;         // for the schedule file
  std::vector<std::string> remarks;        // what makes the figures doubtful, a sentence each
};

// Requires nothing of the schedule. Throws Error(kUsage) where it has more pairs of stage and
// micro-batch than can be simulated here, or costs do not fit it; Error(kPlan), with the grid,
// where it breaks a rule, and where a rank exceeds the memory limit.
[[nodiscard]] ScheduleReport report_schedule(LoadedSchedule loaded, const Costs& costs,
                                             const SimulationDetail& detail);
// The same for a schedule whose costs are known for each stage, without a limit.
[[nodiscard]] ScheduleReport report_schedule(LoadedSchedule loaded, const SimulationTimes& times,
                                             const SimulationDetail& detail);

// The grid, where it has at most 200 columns of cells (a sentence instead of a wider one), and
// below it makespan, bubbles, memory, messages, transports. `colours`: terminal escapes in the
// grid, by kind.
[[nodiscard]] std::string to_grid_text(const ScheduleReport& report, bool colours);

// "eager, rendezvous", or "not proven".
[[nodiscard]] std::string transport_names(const ScheduleReport& report);

// One object: schedule, ranks, stages, micro_batches, chunks, makespan, span, busy and waiting
// ([rank]), bubble_makespan, bubble_span, peak_in_flight ([rank], chunks), peak_bytes ([rank],
// where bytes are given), transports (null where not proven), messages, exact; of the simulation's
// details those it has, remarks where there are any: timeline and reductions ([rank] lists of
// {action, start, end}) and memory
// ([rank] lists of {time, bytes}).
[[nodiscard]] nlohmann::ordered_json to_json(const ScheduleReport& report);
// As one line of text; bytes that are not UTF-8 become U+FFFD.
[[nodiscard]] std::string to_json_line(const nlohmann::ordered_json& json);

// The timeline, which the report must have, as Chrome-trace JSON, one unit of time shown as a
// millisecond; reductions are slices of the same track, messages arrows, bytes held a counter.
// Throws Error(kUsage) where stages or times exceed what a trace can hold.
void put_trace(const ScheduleReport& report, const std::function<void(std::string_view)>& put);

}  // namespace sluice
