#include "runtime/explore/schedule_compare.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/generate.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/explore/schedule_output.hpp"
#include "runtime/explore/schedule_report.hpp"
#include "runtime/options/process.hpp"

namespace sluice {
namespace {

constexpr const char* kAboutCompare =
    "Proves and simulates every schedule on the same work and lists them by makespan. Times\n"
    "and bytes are of one micro-batch on one rank's whole share of the model; with v chunks per\n"
    "rank each action takes a v-th of them. Lists have one number per rank's share, in the\n"
    "model's order. Messages keep their bytes. What a rank can't hold is left out.\n"
    "\n"
    "  sluice schedule compare --ranks 8 --micro-batches 32\n"
    "  sluice schedule compare --schedules 1f1b,zb-v,auto --files mine.json,theirs.csv";

struct CompareOptions {
  ScheduleShape shape = {.ranks = 4, .micro_batches = 8};
  Costs costs;
  std::string format = "grid", schedules = "all", files;
  Objective objective = Objective::kMakespan;
};

struct Comparison {
  Objective objective = Objective::kMakespan;
  std::vector<ScheduleReport> rows;  // ascending objective, then peak, then name; without actions
  std::vector<std::string> remarks;  // a sentence each
  // Why the other schedules cannot serve the shape or exceed the memory limit, a sentence each.
  std::vector<std::string> left_out;
};

int most_in_flight(const ScheduleReport& report) {
  const std::vector<int>& peaks = report.simulation.peak_in_flight;
  return *std::max_element(peaks.begin(), peaks.end());
}

// Nothing where the shape does not suit `name`, with the refusal in `why`.
std::optional<ScheduleReport> report_one(const std::string& name, const ScheduleShape& shape,
                                         const Costs& costs, std::string& why) {
  try {
    return report_schedule(generate_schedule(name, shape), costs, {.timeline = false});
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUsage && error.code() != ErrorCode::kPlan) throw;
    why = error.what();
  }
  return std::nullopt;
}

double objective_of(const ScheduleReport& report, Objective objective) {
  return objective == Objective::kSpan ? report.simulation.span : report.simulation.makespan;
}

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  while (!text.empty()) {
    const std::size_t comma = std::min(text.find(','), text.size());
    words.emplace_back(text.substr(0, comma));
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return words;
}

// --schedules as names; "auto" is one of them. Without it, files alone are compared where there are
// any.
std::vector<std::string> names_of(const CompareOptions& options, bool given) {
  std::vector<std::string> all = schedule_names();
  std::erase(all, "forward-only");
  if (options.schedules == "all") {
    return given || options.files.empty() ? all : std::vector<std::string>{};
  }
  std::vector<std::string> known = all;
  known.emplace_back("auto");
  std::vector<std::string> names = words_of(options.schedules);
  for (const std::string& name : names) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    throw_usage("option --schedules: '{}' is no schedule{} legal: all, or of {}, with commas", name,
                suggestion(name, known, ";"), fmt::join(known, ", "));
  }
  return names;
}

std::vector<LoadedSchedule> files_of(CompareOptions& options, const OptionTable& table) {
  std::vector<LoadedSchedule> files;
  for (const std::string& path : words_of(options.files)) {
    LoadedSchedule& file = files.emplace_back(load_schedule(path));
    const auto same = [&](const char* name, int& value, int of_file) {
      if (files.size() == 1 && !table.given(name)) value = of_file;
      if (value == of_file) return;
      throw_usage("option --files: '{}' is for {} {}, the others are for {}", path, of_file, name,
                  value);
    };
    same("ranks", options.shape.ranks, file.schedule.placement.ranks());
    same("micro-batches", options.shape.micro_batches, file.schedule.micro_batches);
    if (file.schedule.forward_only) {
      throw_usage("option --files: '{}' has no backward actions, so it does not train", path);
    }
    file.schedule.name = std::filesystem::path(path).filename().string();
  }
  return files;
}

ScheduleReport report_auto(const CompareOptions& options) {
  SearchRequest request;
  request.ranks = options.shape.ranks;
  request.micro_batches = options.shape.micro_batches;
  request.objective = options.objective;
  if (options.shape.chunks > 0) request.chunks = {options.shape.chunks};
  const SearchResult found = usage_errors(
      [&] { return search_with(options.costs, request, options.costs.measured_layers()); });
  ScheduleReport report =
      report_schedule({found.schedule, describe_search(found, options.objective), std::nullopt},
                      found.times, {.timeline = false});
  report.costs_source = options.costs.source();
  report.remarks = options.costs.remarks(found.schedule.placement);
  return report;
}

// Schedules that train, on the same work: the costs are of CostsOf::kRankShare. shape.chunks of 0:
// as many as are best for auto. Throws Error(kUsage) where no schedule serves the shape.
Comparison compare_schedules(const CompareOptions& options, const std::vector<std::string>& names,
                             std::vector<LoadedSchedule> files) {
  const Objective objective = options.objective;
  Comparison comparison;
  comparison.objective = objective;
  const auto add = [&](ScheduleReport report) {
    report.schedule.ranks.clear();
    comparison.rows.push_back(std::move(report));
  };
  for (LoadedSchedule& file : files) {
    add(report_schedule(std::move(file), options.costs, {.timeline = false}));
  }
  for (const std::string& name : names) {
    std::string why;
    if (name == "auto") {
      add(report_auto(options));
    } else if (auto report = report_one(name, options.shape, options.costs, why)) {
      add(std::move(*report));
    } else {
      comparison.left_out.push_back(why);
    }
  }
  if (comparison.rows.empty()) {
    throw Error(ErrorCode::kUsage, comparison.left_out.empty() ? "there is no schedule to compare"
                                                               : comparison.left_out.front());
  }
  std::stable_sort(
      comparison.rows.begin(), comparison.rows.end(),
      [objective](const ScheduleReport& a, const ScheduleReport& b) {
        return std::tuple(objective_of(a, objective), std::int64_t{most_in_flight(a)} * b.chunks) <
               std::tuple(objective_of(b, objective), std::int64_t{most_in_flight(b)} * a.chunks);
      });
  std::map<std::string, StepTimes> times;
  for (const ScheduleReport& row : comparison.rows) {
    times[row.schedule.name] = {row.simulation.makespan, row.simulation.span};
  }
  const std::string remark = remark_on_barrier(times);
  if (!remark.empty()) comparison.remarks.push_back(remark);
  for (const ScheduleReport& row : comparison.rows) {
    for (const std::string& each : row.remarks) {
      const auto known = std::find(comparison.remarks.begin(), comparison.remarks.end(), each);
      if (known == comparison.remarks.end()) comparison.remarks.push_back(each);
    }
  }
  return comparison;
}

std::string to_table_text(const Comparison& comparison) {
  const bool bytes = !comparison.rows.front().simulation.peak_bytes.empty();
  std::string text = fmt::format(
      "{:<18}{:>7}{:>12}{:>12}{:>17}{:>13}{:>12}{:>14}{}{:>10}  {}\n", "schedule", "chunks",
      "makespan", "span", "bubble_makespan", "bubble_span", "peak chunks", "micro-batches",
      bytes ? fmt::format("{:>18}", "peak bytes") : "", "messages", "ends under");
  for (const ScheduleReport& row : comparison.rows) {
    const Simulation& simulation = row.simulation;
    const int peak = most_in_flight(row);
    const auto most = std::max_element(simulation.peak_bytes.begin(), simulation.peak_bytes.end());
    text += fmt::format(
        "{:<18}{:>7}{:>12.6g}{:>12.6g}{:>17.4f}{:>13.4f}{:>12}{:>14.6g}{}{:>10}  {}\n",
        row.schedule.name, row.chunks, simulation.makespan, simulation.span,
        simulation.bubble_makespan, simulation.bubble_span, peak,
        static_cast<double>(peak) / row.chunks, bytes ? fmt::format("{:>18}", *most) : "",
        simulation.messages, transport_names(row));
  }
  text += fmt::format(
      "\nSorted by {}. Times and bytes given are of one micro-batch on a rank's whole share of the "
      "model; with v chunks\neach action takes a v-th. Peaks are those of the fullest rank, in "
      "chunks"
      "{} and in whole micro-batches.\n",
      comparison.objective == Objective::kSpan
          ? "the longest own span of a rank, which a step without a barrier would take"
          : "makespan, the step with its barrier",
      bytes ? ", in bytes" : "");
  const std::string& source = comparison.rows.front().costs_source;
  if (!source.empty()) text += fmt::format("Times from {}.\n", source);
  const bool unequal =
      std::any_of(comparison.rows.begin(), comparison.rows.end(), [](const ScheduleReport& row) {
        return row.simulation.bubble_span > row.simulation.bubble_makespan * (1 + 1e-9);
      });
  if (unequal) {
    text +=
        "bubble_makespan is the mean over ranks, bubble_span of the one rank with the longest "
        "span: "
        "where ranks differ, that one may idle more.\n";
  }
  for (const std::string& each : comparison.remarks) text += fmt::format("{}.\n", each);
  for (const std::string& each : comparison.left_out) text += fmt::format("left out: {}\n", each);
  return text;
}

// One line per schedule, the fields of its JSON; texts without commas or quotes stay as they are.
std::string to_csv_text(const Comparison& comparison) {
  std::string text =
      "schedule,chunks,makespan,span,bubble_makespan,bubble_span,peak_in_flight,peak_bytes,"
      "messages,"
      "transports,exact\n";
  for (const ScheduleReport& row : comparison.rows) {
    const Simulation& simulation = row.simulation;
    const auto most = std::max_element(simulation.peak_bytes.begin(), simulation.peak_bytes.end());
    std::string name = row.schedule.name;
    if (name.find_first_of(",\"\n") != std::string::npos) {
      for (std::size_t i = 0; (i = name.find('"', i)) != std::string::npos; i += 2) {
        name.insert(i, 1, '"');
      }
      name.insert(0, 1, '"').push_back('"');
    }
    std::vector<std::string_view> transports;
    for (const TransportModel model : row.transports) transports.push_back(name_of(model));
    text += fmt::format("{},{},{},{},{},{},{},{},{},{},{}\n", name, row.chunks, simulation.makespan,
                        simulation.span, simulation.bubble_makespan, simulation.bubble_span,
                        most_in_flight(row),
                        simulation.peak_bytes.empty() ? "" : fmt::format("{}", *most),
                        simulation.messages, fmt::join(transports, " "), row.exact);
  }
  return text;
}

std::string to_json_text(const Comparison& comparison) {
  nlohmann::ordered_json json;
  json["objective"] = name_of(comparison.objective);
  json["rows"] = nlohmann::ordered_json::array();
  for (const ScheduleReport& row : comparison.rows) json["rows"].push_back(to_json(row));
  json["remarks"] = comparison.remarks;
  json["left_out"] = comparison.left_out;
  return to_json_line(json);
}

}  // namespace

void add_objective(OptionTable& table, Objective& objective, const std::string& help) {
  table.add_choice("objective", objective,
                   {{"makespan", Objective::kMakespan}, {"span", Objective::kSpan}}, help);
}

const char* name_of(Objective objective) {
  return objective == Objective::kSpan ? "span" : "makespan";
}

std::string remark_on_barrier(const std::map<std::string, StepTimes>& times) {
  constexpr double kRounding = 1e-9;
  if (!times.contains("zb-h1") || !times.contains("zb-h2")) return "";
  const StepTimes &zb_h1 = times.at("zb-h1"), &zb_h2 = times.at("zb-h2");
  const bool gains = zb_h2.makespan < zb_h1.makespan * (1 - kRounding);
  if (gains || !(zb_h2.span < zb_h1.span * (1 - kRounding))) return "";
  return fmt::format(
      "zb-h2 gains nothing over zb-h1: the step ends with a barrier, so its makespan counts "
      "({:.6g} against {:.6g}), not the shorter span of each rank ({:.6g} against {:.6g})",
      zb_h2.makespan, zb_h1.makespan, zb_h2.span, zb_h1.span);
}

int schedule_compare_command(const std::vector<std::string>& arguments) {
  CompareOptions options;
  OptionTable table("sluice schedule compare [options]", kAboutCompare);
  table.add_integer("ranks", options.shape.ranks, 1, kMaxInt, "pipeline depth");
  table.add_integer("micro-batches", options.shape.micro_batches, 1, kMaxInt, "per step");
  table.add_integer("chunks", options.shape.chunks, 1, kMaxChunks,
                    "stages per rank; auto: 2 for schedules that take them", "auto");
  table.add_text("schedules", options.schedules, "all|NAME[,NAME...]",
                 "which; auto, as 'sluice schedule auto', is a name here, and not one of all");
  table.add_text("files", options.files, "PATH[,PATH...]",
                 "schedule files beside them; alone unless --schedules is given");
  add_objective(table, options.objective,
                "to sort by: the step with its barrier, or a rank's longest own span");
  table.add_choice("format", options.format, {"grid", "json", "csv"}, "of the output");
  options.costs.add_options(table, CostsOf::kRankShare);
  return run_guarded(table, arguments, [&] {
    options.costs.resolve(table, CostsOf::kRankShare);
    options.costs.resolve_ranks(table, options.shape.ranks);
    std::vector<LoadedSchedule> files = files_of(options, table);
    const Comparison comparison =
        compare_schedules(options, names_of(options, table.given("schedules")), std::move(files));
    fmt::print("{}", options.format == "json"  ? to_json_text(comparison)
                     : options.format == "csv" ? to_csv_text(comparison)
                                               : to_table_text(comparison));
  });
}

}  // namespace sluice
