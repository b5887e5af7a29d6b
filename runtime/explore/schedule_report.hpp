// What `sluice schedule` says of one schedule: proven by verify(), timed by simulate(), drawn; and
// where the schedule comes from when it is a file.
#pragma once

#include <filesystem>
#include <functional>
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

// Above this many pairs of stage and micro-batch nothing is simulated on one machine: 1024 ranks
// with two chunks each and 4096 micro-batches.
inline constexpr std::int64_t kMaxReportPairs = 8'388'608;

struct ReportRequest {
  SimulationDetail detail = {.timeline = false, .memory = false};
  std::int64_t max_pairs = kMaxReportPairs;
  std::int64_t max_planned_pairs = kMaxPlannedPairs;
};

struct ScheduleReport {
  Schedule schedule;  // compute actions only
  int chunks = 1;     // most stages of a rank
  Simulation simulation;
  bool exact = false;
  bool planned = false;                    // nothing is known of transports where not
  std::vector<TransportModel> transports;  // under which its plans end: MPI's, or NCCL's
  std::string source;                      // what was read from which file; empty: generated
  std::string costs_source;                // Costs::source()
};

// Throws Error(kUsage) where name, shape or costs cannot be served, with the nearest legal values,
// and where the shape has more than `max_pairs` pairs of stage and micro-batch; Error(kPlan), with
// the grid, where the schedule breaks a rule, and where a rank exceeds the memory limit.
[[nodiscard]] ScheduleReport report_schedule(std::string_view name, const ScheduleShape& shape,
                                             const Costs& costs, const ReportRequest& request = {});

struct LoadedSchedule {
  Schedule schedule;
  std::string source;  // one line: the file, its format and alphabet, what was dropped
};

// Sluice's JSON or PyTorch's CSV, told apart by the first byte. Throws Error(kPlan) naming the path
// where it cannot be read or is refused.
[[nodiscard]] LoadedSchedule load_schedule(const std::filesystem::path& path,
                                           CsvAlphabet alphabet = CsvAlphabet::kDetect);

// The same for a schedule that was loaded. Requires nothing of it.
[[nodiscard]] ScheduleReport report_schedule(LoadedSchedule loaded, const Costs& costs,
                                             const ReportRequest& request = {});

// The same for a schedule whose costs are known for each stage. Requires: simulate() takes them.
[[nodiscard]] ScheduleReport report_schedule(LoadedSchedule loaded, const SimulationTimes& times,
                                             const ReportRequest& request = {});

// The grid, where it has at most `max_columns` of cells (a sentence instead of a wider one), and
// below it makespan, bubbles, memory, messages, transports. `colours`: terminal escapes in the
// grid, by kind.
[[nodiscard]] std::string to_grid_text(const ScheduleReport& report, bool colours = false,
                                       int max_columns = 200);

// One JSON object: schedule, ranks, stages, micro_batches, chunks, makespan, span, busy and waiting
// ([rank]), bubble_makespan, bubble_span, peak_in_flight ([rank], chunks), peak_bytes ([rank],
// where bytes are given), transports (null where not planned), messages, exact; of the simulation's
// details those it has: timeline and reductions ([rank] lists of {action, start, end}) and memory
// ([rank] lists of {time, bytes}).
[[nodiscard]] std::string to_json_text(const ScheduleReport& report);

// The timeline, which the report must have, as Chrome-trace JSON, one unit of time shown as a
// millisecond; reductions are slices beside it. Throws Error(kUsage) where stages or times exceed
// what a trace can hold.
void put_trace(const ScheduleReport& report, const std::function<void(std::string_view)>& put);

}  // namespace sluice
