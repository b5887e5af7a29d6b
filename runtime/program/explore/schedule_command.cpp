#include "runtime/program/explore/schedule_command.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/schedule.hpp>
#include <sluice/search.hpp>

#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/process/process.hpp"
#include "runtime/program/explore/schedule_output.hpp"

namespace sluice {
namespace {

using OrderedJson = nlohmann::ordered_json;

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

void add_shape(OptionTable& table, ScheduleShape& shape) {
  table.add_integer("ranks", shape.ranks, 1, kMaxInt, "pipeline depth");
  table.add_integer("micro-batches", shape.micro_batches, 1, kMaxInt, "per step");
  table.add_integer("chunks", shape.chunks, 1, kMaxChunks,
                    "stages per rank; auto: 2 for schedules that take them", "auto");
}

OptionTable schedule_table(ScheduleOptions& options) {
  OptionTable table("sluice schedule [options]", kAbout);
  std::vector<std::string> names = schedule_names();
  names.emplace_back("auto");
  table.add_choice("schedule", options.schedule, names,
                   "which; auto: as 'sluice schedule auto', which has options of its own");
  add_shape(table, options.shape);
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

void run_schedule(ScheduleOptions& options, const OptionTable& table) {
  options.costs.resolve(table, CostsOf::kStage);
  if (options.file.empty()) options.costs.resolve_ranks(table, options.shape.ranks);
  write_report(report_schedule(loaded(options, table), options.costs, detail_of(options.output)),
               options.output);
}

void add_objective(OptionTable& table, Objective& objective, const std::string& help) {
  table.add_choice("objective", objective,
                   {{"makespan", Objective::kMakespan}, {"span", Objective::kSpan}}, help);
}

const char* name_of(Objective objective) {
  return objective == Objective::kSpan ? "span" : "makespan";
}

// A sentence where the shorter spans of zb-h2, which papers count, do not shorten a step that ends
// with a barrier; else empty. `name`: the key of a row's schedule.
std::string remark_on_barrier(const OrderedJson& rows, const char* name) {
  const auto of = [&](const char* schedule) {
    return std::find_if(rows.begin(), rows.end(),
                        [&](const OrderedJson& row) { return row[name] == schedule; });
  };
  const auto zb_h1 = of("zb-h1"), zb_h2 = of("zb-h2");
  if (zb_h1 == rows.end() || zb_h2 == rows.end()) return "";
  const auto gains = [&](const char* key) {
    constexpr double kRounding = 1e-9;
    return (*zb_h2)[key].get<double>() < (*zb_h1)[key].get<double>() * (1 - kRounding);
  };
  if (gains("makespan") || !gains("span")) return "";
  return fmt::format(
      "zb-h2 gains nothing over zb-h1: the step ends with a barrier, so its makespan counts "
      "({:.6g} against {:.6g}), not the shorter span of each rank ({:.6g} against {:.6g})",
      (*zb_h1)["makespan"].get<double>(), (*zb_h2)["makespan"].get<double>(),
      (*zb_h2)["span"].get<double>(), (*zb_h1)["span"].get<double>());
}

// What search_schedule() finds with the costs, which are of CostsOf::kRankShare or of layers, and
// its report. `layers` of 0: the model can be cut anywhere.
struct Found {
  SearchResult result;
  ScheduleReport report;
};

Found find_schedule(const Costs& costs, SearchRequest request, int layers,
                    const SimulationDetail& detail) {
  request.whole_layers = layers > 0;
  request.offload = costs.offloads();
  request.model =
      layers > 0 ? costs.of_layers(request.ranks, layers) : costs.of_shares(request.ranks);
  request.byte_limit = costs.byte_limit(request.ranks);
  request.in_flight_limit = costs.in_flight_limit(request.ranks);
  Found found{search_schedule(request), {}};
  const SearchResult& result = found.result;
  const SearchCandidate& chosen = result.chosen;
  const std::string source = fmt::format(
      "found by a heuristic search: {}, {} placement, {} chunk{}; {} {:.6g} is {:.4f} times the "
      "lower bound {:.6g}",
      chosen.origin, chosen.placement, chosen.chunks, chosen.chunks == 1 ? "" : "s",
      name_of(request.objective),
      request.objective == Objective::kSpan ? chosen.span : chosen.makespan, result.ratio,
      result.lower_bound);
  found.report = report_schedule({result.schedule, source}, costs, detail, &result.times);
  found.report.made_for = MadeFor{.first_layer = result.first_layer,
                                  .makespan = result.simulation.makespan,
                                  .bubble = result.simulation.bubble_makespan,
                                  .milliseconds = costs.milliseconds()};
  return found;
}

constexpr const char* kAboutAuto =
    "Searches for the schedule, the number of chunks, the placement and the layers of each stage\n"
    "that make the step shortest for the costs given, within a memory limit. A heuristic: it "
    "prints\n"
    "how far it is from a lower bound. Times are of one micro-batch on one rank's whole share of\n"
    "the model, which can be cut anywhere; with --layers, of one layer, and stages are whole "
    "layers.\n"
    "\n"
    "  sluice schedule auto --ranks 8 --micro-batches 32 --memory-limit 16 --message-time 0.02\n"
    "  sluice schedule auto --ranks 4 --layers 6 --forward-time 4,1,1,1,1,2 --format file";

struct AutoOptions {
  SearchRequest request = {.ranks = 4, .micro_batches = 8};
  Costs costs;
  std::string chunks = "auto";
  int layers = 0;
  bool whole_backward = false;
  ScheduleOutput output;
};

OptionTable auto_table(AutoOptions& options) {
  OptionTable table("sluice schedule auto [options]", kAboutAuto);
  table.add_integer("ranks", options.request.ranks, 1, kMaxInt, "pipeline depth");
  table.add_integer("micro-batches", options.request.micro_batches, 1, kMaxInt, "per step");
  add_objective(table, options.request.objective,
                "makespan: the step with its barrier; span: as the papers rank");
  table.add_text("chunks", options.chunks, "auto|N[,N...]",
                 "stages per rank to try; auto: 1, 2, 4, 8 and what divides the layers of a rank");
  table.add_integer("layers", options.layers, 1, kMaxInt,
                    "of the model, embedding and head included, costs being of layers; any: it "
                    "can be cut anywhere; not given: those of the profile, if it says any",
                    "any");
  table.add_flag("whole-backward", options.whole_backward,
                 "only schedules that do not split the backward pass");
  table.add_integer("effort", options.request.effort, 0, std::numeric_limits<std::int64_t>::max(),
                    "actions that the last improvement plays");
  add_output_options(table, options.output);
  options.costs.add_options(table, CostsOf::kRankShare);
  return table;
}

// Empty for "auto".
std::vector<int> chunks_of(const std::string& text) {
  if (text == "auto") return {};
  std::vector<int> counts;
  bool legal = !text.empty();
  for (const std::string& part : parts_of(text)) {
    int& count = counts.emplace_back();
    legal = legal && parse_whole(part, count) && count >= 1 && count <= kMaxSearchedChunks;
  }
  if (legal) return counts;
  throw_usage("option --chunks: '{}' is neither 'auto' nor integers from 1 to {} with commas", text,
              kMaxSearchedChunks);
}

void add_search(OrderedJson& json, const SearchResult& result, Objective objective) {
  json["origin"] = result.chosen.origin;
  json["placement"] = result.chosen.placement;
  json["objective"] = name_of(objective);
  json["lower_bound"] = result.lower_bound;
  json["ratio"] = result.ratio;
  json["first_layer"] = result.first_layer;
  json["candidates"] = OrderedJson::array();
  for (const SearchCandidate& row : result.candidates) {
    json["candidates"].push_back({{"origin", row.origin},
                                  {"placement", row.placement},
                                  {"chunks", row.chunks},
                                  {"makespan", row.makespan},
                                  {"span", row.span},
                                  {"bubble_span", row.bubble_span},
                                  {"peak_in_flight", row.peak_in_flight}});
  }
  json["left_out"] = result.left_out;
  if (objective == Objective::kSpan) return;
  const std::string remark = remark_on_barrier(json["candidates"], "origin");
  if (!remark.empty()) json["remarks"].push_back(remark);
}

void run_auto(AutoOptions& options, const OptionTable& table) {
  if (table.given("overlap-time")) {
    throw_usage(
        "option --overlap-time: auto plans for training, which runs a pair's actions one after the "
        "other; 'sluice schedule compare' counts overlaps");
  }
  options.costs.resolve(table, options.layers > 0 ? CostsOf::kStage : CostsOf::kRankShare);
  options.costs.resolve_ranks(table, options.request.ranks);
  if (!table.given("layers")) options.layers = options.costs.measured_layers();
  options.request.split_backward = !options.whole_backward;
  options.request.chunks = chunks_of(options.chunks);
  Found found =
      find_schedule(options.costs, options.request, options.layers, detail_of(options.output));
  add_search(found.report.json, found.result, options.request.objective);
  write_report(found.report, options.output);
}

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

OptionTable compare_table(CompareOptions& options) {
  OptionTable table("sluice schedule compare [options]", kAboutCompare);
  add_shape(table, options.shape);
  table.add_text("schedules", options.schedules, "all|NAME[,NAME...]",
                 "which; auto, as 'sluice schedule auto', is a name here, and not one of all");
  table.add_text("files", options.files, "PATH[,PATH...]",
                 "schedule files beside them; alone unless --schedules is given");
  add_objective(table, options.objective,
                "to sort by: the step with its barrier, or a rank's longest own span");
  table.add_choice("format", options.format, {"grid", "json"}, "of the output");
  options.costs.add_options(table, CostsOf::kRankShare);
  return table;
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
  const std::vector<std::string> names = parts_of(options.schedules);
  for (const std::string& name : names) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    throw_usage("option --schedules: '{}' is no schedule{} legal: all, or of {}, with commas", name,
                suggestion(name, known, ";"), joined(known, ", "));
  }
  return names;
}

std::vector<LoadedSchedule> files_of(CompareOptions& options, const OptionTable& table) {
  std::vector<LoadedSchedule> files;
  for (const std::string& path : parts_of(options.files)) {
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

OrderedJson report_auto(const CompareOptions& options) {
  SearchRequest request = {.ranks = options.shape.ranks,
                           .micro_batches = options.shape.micro_batches,
                           .objective = options.objective};
  if (options.shape.chunks > 0) request.chunks = {options.shape.chunks};
  return find_schedule(options.costs, request, options.costs.measured_layers(), {.timeline = false})
      .report.json;
}

// Reports of schedules that train, on the same work, best first: ascending objective, then peak. A
// schedule that cannot serve the shape, or exceeds the memory limit, leaves a sentence in
// `left_out`.
OrderedJson rows_of(const CompareOptions& options, const std::vector<std::string>& names,
                    std::vector<LoadedSchedule> files, OrderedJson& left_out) {
  std::vector<OrderedJson> rows;
  const auto report = [&](LoadedSchedule loaded) {
    return report_schedule(std::move(loaded), options.costs, {.timeline = false}).json;
  };
  for (LoadedSchedule& file : files) rows.push_back(report(std::move(file)));
  for (const std::string& name : names) {
    if (name == "auto") {
      rows.push_back(report_auto(options));
      continue;
    }
    try {
      rows.push_back(report(generate_schedule(name, options.shape)));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUsage && error.code() != ErrorCode::kPlan) throw;
      left_out.push_back(error.what());
    }
  }
  if (rows.empty()) {
    throw Error(ErrorCode::kUsage, left_out.empty() ? "there is no schedule to compare"
                                                    : left_out.front().get<std::string>());
  }
  const auto key = [&](const OrderedJson& row) {
    const std::vector<double> peaks = row["peak_in_flight"];
    return std::pair(row[name_of(options.objective)].get<double>(),
                     *std::max_element(peaks.begin(), peaks.end()) / row["chunks"].get<int>());
  };
  std::stable_sort(rows.begin(), rows.end(),
                   [&](const OrderedJson& a, const OrderedJson& b) { return key(a) < key(b); });
  return rows;
}

void run_compare(CompareOptions& options, const OptionTable& table) {
  options.costs.resolve(table, CostsOf::kRankShare);
  options.costs.resolve_ranks(table, options.shape.ranks);
  std::vector<LoadedSchedule> files = files_of(options, table);
  OrderedJson left_out = OrderedJson::array(), remarks = OrderedJson::array();
  const std::vector<std::string> names = names_of(options, table.given("schedules"));
  if (table.given("overlap-time") && std::find(names.begin(), names.end(), "auto") != names.end()) {
    remarks.push_back("auto counts no --overlap-time: plans run a pair's actions one by one");
  }
  OrderedJson rows = rows_of(options, names, std::move(files), left_out);
  const std::string remark = remark_on_barrier(rows, "schedule");
  if (!remark.empty()) remarks.push_back(remark);
  for (const OrderedJson& row : rows) {
    for (const OrderedJson& each : row.value("remarks", OrderedJson::array())) {
      if (std::find(remarks.begin(), remarks.end(), each) == remarks.end()) remarks.push_back(each);
    }
  }
  const OrderedJson json = {{"objective", name_of(options.objective)},
                            {"rows", std::move(rows)},
                            {"remarks", std::move(remarks)},
                            {"left_out", std::move(left_out)}};
  fmt::print("{}", options.format == "json" ? to_json_line(json) : to_text(json, nullptr));
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

template <typename Options>
int run_command(OptionTable (*make_table)(Options&), void (*run)(Options&, const OptionTable&),
                const std::vector<std::string>& arguments) {
  Options options;
  OptionTable table = make_table(options);
  return run_guarded(table, arguments, [&] { run(options, table); });
}

}  // namespace

int schedule_command(const std::vector<std::string>& arguments) {
  const std::string word = arguments.empty() ? "" : arguments.front();
  const auto rest = [&] {
    return std::vector<std::string>(arguments.begin() + 1, arguments.end());
  };
  if (word == "compare") return run_command(compare_table, run_compare, rest());
  if (word == "auto") return run_command(auto_table, run_auto, rest());
  if (const auto others = arguments_of_auto(arguments)) {
    return run_command(auto_table, run_auto, *others);
  }
  return run_command(schedule_table, run_schedule, arguments);
}

}  // namespace sluice
