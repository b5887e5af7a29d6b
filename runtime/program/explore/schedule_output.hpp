// What `sluice schedule`, its `compare` and `auto` print: formats, destination, and the text that
// is made of their JSON (schedule_output.schema.json).
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "runtime/program/explore/schedule_report.hpp"
#include "runtime/program/options/option_table.hpp"

namespace sluice {

struct ScheduleOutput {
  std::string format = "grid", path;
  bool timeline = false, messages = false;
  CsvAlphabet alphabet = CsvAlphabet::kDetect;
};

// --format, --output, --messages, --timeline. `output` outlives the table.
void add_output_options(OptionTable& table, ScheduleOutput& output);

// The details of a simulation that the format shows.
[[nodiscard]] SimulationDetail detail_of(const ScheduleOutput& output);

// The report in the format of `output`, to the path, whole or not at all, or to standard output
// where the path is empty. Throws Error(kUsage) where the format cannot hold the schedule, and as
// AtomicFile.
void write_report(const ScheduleReport& report, const ScheduleOutput& output);

// A comparison, or a report with or without a search's fields, as text. `drawn`: the report's
// schedule, for a grid of at most 200 columns of cells; a sentence stands for a wider one.
[[nodiscard]] std::string to_text(const nlohmann::ordered_json& json, const Schedule* drawn);
// As one line of text; bytes that are not UTF-8 become U+FFFD.
[[nodiscard]] std::string to_json_line(const nlohmann::ordered_json& json);

}  // namespace sluice
