#include "runtime/explore/schedule_output.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include <sluice/draw.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule_file.hpp>

#include "runtime/files/atomic_file.hpp"
#include "runtime/options/process.hpp"

namespace sluice {
namespace {

std::string csv_of(const ScheduleOutput& output, const Schedule& schedule) {
  LowerOptions no_reductions;
  no_reductions.reduce_grad = false;
  no_reductions.keep_sharding = true;
  no_reductions.keep_pairs = true;
  return to_pytorch_csv(output.messages ? lower(schedule, no_reductions) : schedule,
                        output.alphabet);
}

}  // namespace

void add_output_options(OptionTable& table, ScheduleOutput& output) {
  table.add_choice("format", output.format, {"grid", "json", "csv", "svg", "trace", "file"},
                   "of the output");
  table.add_text("output", output.path, "PATH", "write here instead of standard output");
  table.add_flag("messages", output.messages,
                 "add SEND and RECV cells to the CSV, and their waits");
  table.add_flag("timeline", output.timeline,
                 "add start and end of every action to the JSON, and the bytes held over time");
}

SimulationDetail detail_of(const ScheduleOutput& output) {
  const bool listed = output.format == "json" && output.timeline;
  const bool drawn = output.format == "svg" || output.format == "trace";
  return {.timeline = listed || drawn, .memory = listed || drawn, .messages = drawn};
}

void write_output(const ScheduleOutput& output, const std::function<void(const PutText&)>& body) {
  usage_errors([&] {
    if (output.path.empty()) {
      body([](std::string_view text) { fmt::print("{}", text); });
      return;
    }
    AtomicFile file(output.path);
    body([&file](std::string_view text) { file.write(text); });
    file.commit();
  });
}

void put_schedule(const ScheduleReport& report, const ScheduleOutput& output, const PutText& put) {
  if (output.format == "grid") {
    const bool colours =
        output.path.empty() && terminal_output() && std::getenv("NO_COLOR") == nullptr;
    put(to_grid_text(report, colours));
  } else if (output.format == "json") {
    put(to_json_line(to_json(report)));
  } else if (output.format == "csv") {
    put(csv_of(output, report.schedule));
  } else if (output.format == "svg") {
    put(draw_svg(report.schedule, report.simulation));
  } else if (output.format == "trace") {
    put_trace(report, put);
  } else {
    put(to_schedule_json(report.schedule, report.made_for));
  }
}

}  // namespace sluice
