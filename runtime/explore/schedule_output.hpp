// Formats and destination of the output of `sluice schedule` and its `auto`.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "runtime/explore/schedule_report.hpp"
#include "runtime/options/option_table.hpp"

namespace sluice {

struct ScheduleOutput {
  std::string format = "grid", path;
  bool timeline = false, messages = false;
  CsvAlphabet alphabet = CsvAlphabet::kDetect;
};

using PutText = std::function<void(std::string_view)>;

// --format, --output, --messages, --timeline. `output` outlives the table.
void add_output_options(OptionTable& table, ScheduleOutput& output);

// The details of a simulation that the format shows.
[[nodiscard]] SimulationDetail detail_of(const ScheduleOutput& output);

// Calls body(put). `put` writes to the path, whole or not at all, or to standard output where the
// path is empty. Throws Error(kUsage) where the format cannot hold the schedule, and as AtomicFile.
void write_output(const ScheduleOutput& output, const std::function<void(const PutText&)>& body);

// The report in the format of `output`.
void put_schedule(const ScheduleReport& report, const ScheduleOutput& output, const PutText& put);

}  // namespace sluice
