// Nanoseconds per compute action of each planning step, by default for 1F1B at m = 4p: what matters
// is that the figures stay flat from 64 to 1024 ranks. Prints a table, with the most memory the
// process ever had; `--json FILE` also appends it. `--until simulate` leaves out planning.
//
//   planning_benchmark [--json FILE] [--ranks P[,P...]] [--repeat N] [--schedule NAME]
//                      [--until simulate|verify]
#include <malloc.h>
#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

#include "tests/benchmarks/benchmark_report.hpp"

namespace sluice {
namespace {

struct Options {
  std::string json;
  std::vector<int> ranks = {64, 256, 1024};
  int repeat = 3;
  std::string schedule = "1f1b";
  bool plan = true;
};

struct StepTime {
  std::string name;
  double ns_per_action = 0;
};

struct Row {
  int ranks = 0;
  int micro_batches = 0;
  std::int64_t actions = 0;
  std::vector<StepTime> steps;
  double megabytes = 0;  // most memory of the process so far
};

double cpu_seconds_of(const std::function<void()>& body) {
  const std::clock_t start = std::clock();
  body();
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

// All steps once, in order; each result is dropped as soon as no later step needs it.
Row measure_once(const Options& options, int ranks) {
  Row row;
  row.ranks = ranks;
  row.micro_batches = 4 * ranks;
  Schedule schedule = generate(options.schedule, {ranks, row.micro_batches, 1});
  for (const std::vector<Step>& steps : schedule.ranks) {
    for (const Step& step : steps) row.actions += step.overlapped ? 2 : 1;
  }
  schedule = Schedule();
  const auto time = [&](std::string name, const std::function<void()>& body) {
    row.steps.push_back(
        {std::move(name), cpu_seconds_of(body) * 1e9 / static_cast<double>(row.actions)});
  };

  Schedule lowered;
  Plan plan;
  time("generate", [&] { schedule = generate(options.schedule, {ranks, row.micro_batches, 1}); });
  time("check", [&] {
    if (check(schedule)) throw std::logic_error("check refused a generated schedule");
  });
  time("lower", [&] { lowered = lower(schedule, {}); });
  time("simulate", [&] {
    const Simulation simulation = simulate(schedule, {{StageTimes{}}, 0.1}, {.timeline = false});
    if (!(simulation.makespan > 0)) throw std::logic_error("the simulation took no time");
  });
  schedule = Schedule();
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  row.megabytes = static_cast<double>(usage.ru_maxrss) / 1024;
  if (!options.plan) return row;
  time("make_plan", [&] { plan = make_plan(lowered, {}); });
  lowered = Schedule();
  time("verify", [&] {
    if (!verify(plan).ok()) throw std::logic_error("verify refused a generated plan");
  });
  getrusage(RUSAGE_SELF, &usage);
  row.megabytes = static_cast<double>(usage.ru_maxrss) / 1024;
  return row;
}

// The fastest of `repeat` runs, step by step.
Row measure(const Options& options, int ranks) {
  Row best = measure_once(options, ranks);
  for (int i = 1; i < options.repeat; ++i) {
    const Row again = measure_once(options, ranks);
    for (std::size_t step = 0; step < best.steps.size(); ++step) {
      best.steps[step].ns_per_action =
          std::min(best.steps[step].ns_per_action, again.steps[step].ns_per_action);
    }
  }
  return best;
}

int parse_positive(std::string_view option, std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1) {
    throw std::invalid_argument(std::string(option) + " got '" + std::string(text) +
                                "'; legal are whole numbers from 1");
  }
  return value;
}

Options parse_options(const std::vector<std::string_view>& arguments) {
  Options options;
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    const std::string_view option = arguments[i];
    if (option != "--json" && option != "--ranks" && option != "--repeat" &&
        option != "--schedule" && option != "--until") {
      throw std::invalid_argument("unknown option '" + std::string(option) +
                                  "'; legal are --json FILE, --ranks P[,P...], --repeat N, "
                                  "--schedule NAME, --until simulate|verify");
    }
    if (i + 1 == arguments.size()) {
      throw std::invalid_argument(std::string(option) + " needs a value");
    }
    std::string_view value = arguments[i + 1];
    if (option == "--json") options.json = value;
    if (option == "--schedule") options.schedule = value;
    if (option == "--until") {
      if (value != "simulate" && value != "verify") {
        throw std::invalid_argument("--until got '" + std::string(value) +
                                    "'; legal are simulate and verify");
      }
      options.plan = value == "verify";
    }
    if (option == "--repeat") options.repeat = parse_positive(option, value);
    if (option != "--ranks") continue;
    options.ranks.clear();
    for (;;) {
      const std::size_t comma = value.find(',');
      options.ranks.push_back(parse_positive(option, value.substr(0, comma)));
      if (comma == std::string_view::npos) break;
      value.remove_prefix(comma + 1);
    }
  }
  return options;
}

// `rows` are of the same steps, and at least one.
benchmarks::Report report_of(const Options& options, const std::vector<Row>& rows) {
  std::vector<std::string> columns = {"ranks", "micro-batches", "actions"};
  for (const StepTime& step : rows.front().steps) columns.push_back(step.name);
  columns.emplace_back("MiB");
  benchmarks::Report report("Planning, CPU ns per action", std::move(columns));
  report.fact("schedule", options.schedule);
  for (const Row& row : rows) {
    std::vector<nlohmann::ordered_json> values = {row.ranks, row.micro_batches, row.actions};
    for (const StepTime& step : row.steps) values.emplace_back(step.ns_per_action);
    values.emplace_back(row.megabytes);
    report.row(values);
  }
  return report;
}

void run(const Options& options) {
  std::vector<Row> rows;
  for (const int ranks : options.ranks) rows.push_back(measure(options, ranks));
  const benchmarks::Report report = report_of(options, rows);
  report.print();
  report.save(options.json);
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) {
  // Freed memory stays with the process, so that the fastest run is one without the system's work
  // on fresh pages, which at p = 1024 is most of what generate and lower take the first time.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  try {
    sluice::run(sluice::parse_options({argv + 1, argv + argc}));
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "planning_benchmark: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "planning_benchmark: %s\n", error.what());
    return 1;
  }
}
