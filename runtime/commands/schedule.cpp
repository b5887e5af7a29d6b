#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <stdexcept>

#include "comm/error.hpp"
#include "runtime/atomic_file.hpp"
#include "runtime/option_table.hpp"
#include "runtime/program.hpp"
#include "runtime/schedule_compare.hpp"
#include "runtime/schedule_costs.hpp"
#include "runtime/schedule_report.hpp"
#include "schedules/schedule_file.hpp"
#include "schedules/svg.hpp"

namespace sluice {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr const char* kAbout =
    "Proves, simulates and draws a schedule: no MPI, no model. Time has the unit of the times "
    "given;\n"
    "a backward that is not parted takes backward-input-time + backward-weight-time. Times and\n"
    "bytes are one number for all stages, or one per stage, separated by commas.\n"
    "\n"
    "  sluice schedule --schedule 1f1b --ranks 4 --micro-batches 8\n"
    "  sluice schedule --file mine.json --format svg --output mine.svg\n"
    "  sluice schedule compare --ranks 8 --micro-batches 32\n"
    "\n"
    "Messages queue up on a link of limited bandwidth; peak bytes are counted where bytes are "
    "given.\n"
    "\n"
    "Formats: grid (text), json (figures), svg (picture), trace (Chrome-trace JSON, one unit of\n"
    "time shown as a millisecond), csv (PyTorch's schedule file) and file (Sluice's own schedule\n"
    "file, which --file reads back).";

struct ScheduleOptions {
  std::string schedule = "1f1b";
  ScheduleShape shape = {.ranks = 4, .micro_batches = 8, .chunks = 1};
  CostOptions costs;
  std::string file, csv_alphabet = "detect";
  std::string format = "grid", output;
  bool timeline = false, messages = false;
};

CsvAlphabet alphabet_of(const ScheduleOptions& options) {
  if (options.csv_alphabet == "older") return CsvAlphabet::kOlder;
  return options.csv_alphabet == "current" ? CsvAlphabet::kCurrent : CsvAlphabet::kDetect;
}

OptionTable make_table(ScheduleOptions& options) {
  OptionTable table("sluice schedule [options]", kAbout);
  table.add_choice("schedule", options.schedule, schedule_names(), "which");
  table.add_integer("ranks", options.shape.ranks, 1, kMaxInt, "pipeline depth");
  table.add_integer("micro-batches", options.shape.micro_batches, 1, kMaxInt, "per step");
  table.add_integer("chunks", options.shape.chunks, 1, kMaxInt, "stages per rank");
  table.add_text("file", options.file, "PATH",
                 "read this schedule instead: Sluice's JSON or PyTorch's CSV");
  table.add_choice("csv-alphabet", options.csv_alphabet, {"detect", "current", "older"},
                   "older CSV files write B for the input half and BW for the whole backward");
  table.add_choice("format", options.format, {"grid", "json", "csv", "svg", "trace", "file"},
                   "of the output");
  table.add_text("output", options.output, "PATH", "write here instead of standard output");
  table.add_flag("messages", options.messages, "add SEND and RECV cells to the CSV");
  table.add_flag("timeline", options.timeline,
                 "add start and end of every action to the JSON, and the bytes held over time");
  add_cost_options(table, options.costs, CostsOf::kStage);
  return table;
}

ScheduleReport report_of(const ScheduleOptions& options, const OptionTable& table) {
  const Costs costs(options.costs, table, CostsOf::kStage);
  ReportRequest request;
  const bool listed = options.format == "json" && options.timeline;
  request.detail.timeline = listed || options.format == "svg" || options.format == "trace";
  request.detail.memory = listed;
  if (options.file.empty()) {
    return report_schedule(options.schedule, options.shape, costs, request);
  }
  for (const char* name : {"schedule", "ranks", "micro-batches", "chunks"}) {
    if (!table.given(name)) continue;
    throw Error(
        ErrorCode::kUsage,
        fmt::format("option --{}: the schedule of --file says it; give one of the two", name));
  }
  return report_schedule(load_schedule(options.file, alphabet_of(options)), costs, request);
}

std::string csv_of(const ScheduleOptions& options, const Schedule& schedule) {
  const LowerOptions no_reductions = {.reduce_grad = false, .tied = {}};
  return to_pytorch_csv(options.messages ? lower(schedule, no_reductions) : schedule,
                        alphabet_of(options));
}

void print_report(const ScheduleOptions& options, const ScheduleReport& report,
                  const std::function<void(std::string_view)>& put) {
  if (options.format == "grid") {
    const bool colours =
        options.output.empty() && terminal_output() && std::getenv("NO_COLOR") == nullptr;
    put(to_grid_text(report, colours));
  } else if (options.format == "json") {
    put(to_json_text(report));
  } else if (options.format == "csv") {
    put(csv_of(options, report.schedule));
  } else if (options.format == "svg") {
    put(draw_svg(report.schedule, report.simulation));
  } else if (options.format == "trace") {
    put_trace(report, put);
  } else {
    put(to_schedule_json(report.schedule));
  }
}

void run(const ScheduleOptions& options, const OptionTable& table) {
  const ScheduleReport report = report_of(options, table);
  try {
    if (options.output.empty()) {
      print_report(options, report, [](std::string_view text) { fmt::print("{}", text); });
      return;
    }
    AtomicFile file(options.output);
    print_report(options, report, [&file](std::string_view text) { file.write(text); });
    file.commit();
  } catch (const std::invalid_argument& error) {
    throw Error(ErrorCode::kUsage, error.what());
  }
}

}  // namespace

int schedule_command(const std::vector<std::string>& arguments) {
  if (!arguments.empty() && arguments.front() == "compare") {
    return schedule_compare_command({arguments.begin() + 1, arguments.end()});
  }
  return run_guarded([&] {
    ScheduleOptions options;
    OptionTable table = make_table(options);
    table.parse(arguments);
    if (table.help_wanted()) {
      fmt::print("{}", table.help());
      return;
    }
    run(options, table);
  });
}

}  // namespace sluice
