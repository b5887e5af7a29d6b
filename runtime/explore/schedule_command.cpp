#include "runtime/explore/schedule_command.hpp"

#include <optional>

#include <sluice/generate.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/explore/schedule_compare.hpp"
#include "runtime/explore/schedule_output.hpp"
#include "runtime/options/process.hpp"

namespace sluice {
namespace {

constexpr const char* kAbout =
    "Proves, simulates and draws a schedule: no MPI, no model. Time has the unit of the times "
    "given;\n"
    "a backward that is not split takes backward-input-time + backward-weight-time. Times and\n"
    "bytes are one number for a rank, in equal parts on its stages, or one per stage, separated\n"
    "by commas.\n"
    "\n"
    "  sluice schedule --schedule 1f1b --ranks 4 --micro-batches 8\n"
    "  sluice schedule --file mine.json --format svg --output mine.svg\n"
    "  sluice schedule compare --ranks 8 --micro-batches 32\n"
    "  sluice schedule auto --ranks 8 --micro-batches 32\n"
    "\n"
    "Messages queue up on a link of limited bandwidth; peak bytes are counted where bytes are "
    "given.\n"
    "\n"
    "Formats: grid (text), json (figures), svg (picture), trace (Chrome-trace JSON, one unit of\n"
    "time shown as a millisecond), csv (PyTorch's schedule file) and file (Sluice's own schedule\n"
    "file, which --file reads back).";

struct ScheduleOptions {
  std::string schedule = "1f1b";
  ScheduleShape shape = {.ranks = 4, .micro_batches = 8};
  Costs costs;
  std::string file;
  ScheduleOutput output;
};

OptionTable make_table(ScheduleOptions& options) {
  OptionTable table("sluice schedule [options]", kAbout);
  std::vector<std::string> names = schedule_names();
  names.emplace_back("auto");
  table.add_choice("schedule", options.schedule, names,
                   "which; auto: as 'sluice schedule auto', which has options of its own");
  table.add_integer("ranks", options.shape.ranks, 1, kMaxInt, "pipeline depth");
  table.add_integer("micro-batches", options.shape.micro_batches, 1, kMaxInt, "per step");
  table.add_integer("chunks", options.shape.chunks, 1, kMaxChunks,
                    "stages per rank; auto: 2 for schedules that take them", "auto");
  table.add_text("file", options.file, "PATH",
                 "read this schedule instead: Sluice's JSON or PyTorch's CSV");
  table.add_choice("csv-alphabet", options.output.alphabet,
                   {{"detect", CsvAlphabet::kDetect},
                    {"current", CsvAlphabet::kCurrent},
                    {"no-waits", CsvAlphabet::kNoWaits},
                    {"older", CsvAlphabet::kOlder}},
                   "current: PyTorch 2.15; no-waits: 2.6 to 2.14, without waits for messages; "
                   "older: B for the input half and BW for the whole backward");
  add_output_options(table, options.output);
  options.costs.add_options(table, CostsOf::kStage);
  return table;
}

LoadedSchedule loaded(const ScheduleOptions& options, const OptionTable& table) {
  if (options.file.empty()) return generate_schedule(options.schedule, options.shape);
  for (const char* name : {"schedule", "ranks", "micro-batches", "chunks"}) {
    if (!table.given(name)) continue;
    throw_usage("option --{}: --file determines it; give one of the two", name);
  }
  return load_schedule(options.file, options.output.alphabet);
}

void run(ScheduleOptions& options, const OptionTable& table) {
  options.costs.resolve(table, CostsOf::kStage);
  if (options.file.empty()) options.costs.resolve_ranks(table, options.shape.ranks);
  const ScheduleReport report =
      report_schedule(loaded(options, table), options.costs, detail_of(options.output));
  write_output(options.output,
               [&](const PutText& put) { put_schedule(report, options.output, put); });
}

// The other arguments where `--schedule auto` is one of them.
std::optional<std::vector<std::string>> arguments_of_auto(std::vector<std::string> arguments) {
  for (auto it = arguments.begin(); it != arguments.end(); ++it) {
    if (*it == "--schedule=auto") {
      arguments.erase(it);
      return arguments;
    }
    if (*it == "--schedule" && it + 1 != arguments.end() && *(it + 1) == "auto") {
      arguments.erase(it, it + 2);
      return arguments;
    }
  }
  return std::nullopt;
}

}  // namespace

int schedule_command(const std::vector<std::string>& arguments) {
  if (!arguments.empty() && arguments.front() == "compare") {
    return schedule_compare_command({arguments.begin() + 1, arguments.end()});
  }
  if (!arguments.empty() && arguments.front() == "auto") {
    return schedule_auto_command({arguments.begin() + 1, arguments.end()});
  }
  if (const auto rest = arguments_of_auto(arguments)) return schedule_auto_command(*rest);
  ScheduleOptions options;
  OptionTable table = make_table(options);
  return run_guarded(table, arguments, [&] { run(options, table); });
}

}  // namespace sluice
