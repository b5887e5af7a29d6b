#include "runtime/program/explore/schedule_output.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <sluice/plan.hpp>
#include <sluice/simulate.hpp>

#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/files/atomic_file.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/files/trace.hpp"
#include "runtime/process/process.hpp"

namespace sluice {
namespace {

using OrderedJson = nlohmann::ordered_json;
using PutText = std::function<void(std::string_view)>;

std::string csv_of(const ScheduleOutput& output, const Schedule& schedule) {
  LowerOptions no_reductions;
  no_reductions.reduce_grad = false;
  no_reductions.keep_sharding = true;
  no_reductions.keep_pairs = true;
  return to_pytorch_csv(output.messages ? lower(schedule, no_reductions) : schedule,
                        output.alphabet);
}

constexpr double kTraceUnit = 1e-3;  // seconds of a trace per unit of time

void add_events(RankTrace& trace, const std::vector<SimulatedAction>& actions) {
  for (const SimulatedAction& each : actions) {
    trace.events.push_back({.start = each.start * kTraceUnit,
                            .end = each.end * kTraceUnit,
                            .action = static_cast<std::uint8_t>(each.action.kind),
                            .track = TraceTrack::kPlanned,
                            .stage = static_cast<std::int16_t>(each.action.stage),
                            .micro_batch = each.action.micro_batch});
  }
}

// From what made each message's tensor to what uses it.
std::vector<TraceArrow> arrows_of(const Simulation& simulation) {
  using Half = std::tuple<bool, int, int>;  // forward, stage, micro-batch
  std::map<Half, TraceEventPlace> places;
  for (std::size_t rank = 0; rank < simulation.timeline.size(); ++rank) {
    for (std::size_t i = 0; i < simulation.timeline[rank].size(); ++i) {
      const Action& action = simulation.timeline[rank][i].action;
      if (action.kind == ActionKind::kBackwardWeight) continue;
      const bool forward = action.kind == ActionKind::kForward;
      places[{forward, action.stage, action.micro_batch}] = {rank, i};
    }
  }
  std::vector<TraceArrow> arrows;
  for (const SimulatedMessage& each : simulation.transfers) {
    const bool forward = each.made_by.kind == ActionKind::kForward;
    const int user = each.made_by.stage + (forward ? 1 : -1);
    arrows.push_back({places.at({forward, each.made_by.stage, each.made_by.micro_batch}),
                      places.at({forward, user, each.made_by.micro_batch})});
  }
  return arrows;
}

std::vector<TraceCounter> counters_of(const Simulation& simulation) {
  std::vector<TraceCounter> counters;
  for (std::size_t rank = 0; rank < simulation.memory.size(); ++rank) {
    TraceCounter& counter = counters.emplace_back(TraceCounter{rank, "bytes held", {}});
    for (const MemoryStep& step : simulation.memory[rank]) {
      counter.values.emplace_back(step.time * kTraceUnit, step.bytes);
    }
  }
  return counters;
}

// The timeline as Chrome-trace JSON, one unit of time shown as a millisecond; reductions are slices
// of the same track, messages arrows, bytes held a counter.
void put_trace(const ScheduleReport& report, const PutText& put) {
  const int most_stages = std::numeric_limits<decltype(TraceEvent::stage)>::max();
  if (report.schedule.placement.stages() > most_stages || report.simulation.makespan > 1e11) {
    throw_usage("a trace holds at most {} stages and times up to 1e11", most_stages);
  }
  const Simulation& simulation = report.simulation;
  std::vector<RankTrace> ranks;
  for (std::size_t rank = 0; rank < simulation.timeline.size(); ++rank) {
    RankTrace& trace = ranks.emplace_back();
    trace.rank = static_cast<int>(rank);
    trace.label = fmt::format("rank {}", rank);
    add_events(trace, simulation.timeline[rank]);
    if (!simulation.reductions.empty()) add_events(trace, simulation.reductions[rank]);
  }
  write_trace(put, ranks, arrows_of(simulation), counters_of(simulation));
}

// A value of the JSON. Of several numbers all that are few, else the least and the most.
std::string text_of(const OrderedJson& value) {
  constexpr std::size_t kMostListed = 32;
  if (value.is_null()) return "not proven";
  if (value.is_number_float()) {
    const double number = value.get<double>();
    return fmt::format("{:.6g}", std::abs(number) < 1e-12 ? 0 : number);
  }
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return dump_json(value);
  const auto [least, most] = std::minmax_element(value.begin(), value.end());
  if (value.size() > 1 && *least == *most) return text_of(*least);
  if (value.size() > kMostListed) return text_of(*least) + " to " + text_of(*most);
  std::vector<std::string> words;
  for (const OrderedJson& each : value) words.push_back(text_of(each));
  return joined(words, value.front().is_string() ? ", " : " ");
}

// A line per row, columns as wide as their widest cell. Of several numbers a cell has the most.
std::string table_text(const OrderedJson& rows, std::initializer_list<const char*> keys) {
  std::vector<std::vector<std::string>> columns;
  for (const char* key : keys) {
    if (!rows.front().contains(key)) continue;
    std::vector<std::string>& cells = columns.emplace_back(1, key);
    for (const OrderedJson& row : rows) {
      const OrderedJson& value = row.at(key);
      const bool numbers = value.is_array() && !value.empty() && value.front().is_number();
      cells.push_back(text_of(numbers ? *std::max_element(value.begin(), value.end()) : value));
    }
    std::size_t width = 0;
    for (const std::string& cell : cells) width = std::max(width, cell.size());
    for (std::string& cell : cells) cell.resize(width + 2, ' ');
  }
  std::string text;
  for (std::size_t i = 0; i <= rows.size(); ++i) {
    for (const auto& cells : columns) text += cells[i];
    text.erase(text.find_last_not_of(' ') + 1);
    text += '\n';
  }
  return text;
}

// What a figure of a report means.
std::string note_on(const std::string& key, const OrderedJson& value) {
  static const std::map<std::string, const char*> notes = {
      {"makespan", "up to the last rank's end"},
      {"span", "longest own span of a rank"},
      {"busy", "of a rank"},
      {"waiting", "of a rank within its own span"},
      {"bubble_makespan", "idle share up to the last rank's end"},
      {"bubble_span", "idle share of the longest own span"},
      {"peak_in_flight", "micro-batches x chunks of a rank, rank 0 first"},
      {"peak_bytes", "of a rank"},
      {"transports", "transport models; for nccl planned in one global order"},
      {"exact", "the same bits as every other exact schedule"}};
  if (value.is_null()) {
    return fmt::format(
        "no plan is made of more than {} pairs of stage and micro-batch, and no training runs them",
        kMaxPlannedPairs);
  }
  if (value == false) return "repeats bit for bit, but sums gradients in another order";
  const auto found = notes.find(key);
  return found == notes.end() ? "" : found->second;
}

std::string count(const OrderedJson& number, const char* what, const char* plural = "s") {
  return fmt::format("{} {}{}", dump_json(number), what, number == 1 ? "" : plural);
}

std::string grid_of(const Schedule& schedule) {
  constexpr std::size_t kMostColumns = 200;
  std::size_t columns = 0;  // at least one cell per action of a rank
  for (const std::vector<Step>& steps : schedule.ranks) columns = std::max(columns, steps.size());
  if (std::max(columns, schedule.ranks.size()) <= kMostColumns) return draw_grid(schedule);
  return fmt::format(
      "(no grid: more than {} cells wide or high; --format json --timeline lists every action)\n",
      kMostColumns);
}

// Of a report or a row; empty where no ranks share stages.
std::string tensor_text(const OrderedJson& json) {
  if (!json.contains("tensor")) return "";
  const OrderedJson& tensor = json["tensor"];
  return fmt::format(
      "{} ranks share each stage: in a step one makes {:.6g} collectives of {:.1f} MiB in all, "
      "which take {:.6g} (the mean over the pipeline)\n",
      dump_json(tensor["ranks"]), tensor["calls"].get<double>(),
      tensor["bytes"].get<double>() / (1 << 20), tensor["time"].get<double>());
}

std::string report_text(const OrderedJson& json, const Schedule& drawn) {
  std::string text = fmt::format("{}: {}, {}, {}\n", text_of(json["schedule"]),
                                 count(json["ranks"], "rank"), count(json["stages"], "stage"),
                                 count(json["micro_batches"], "micro-batch", "es"));
  if (json.contains("source")) text += fmt::format("({})\n", text_of(json["source"]));
  text += fmt::format("\n{}\n", grid_of(drawn));
  for (const char* key :
       {"makespan", "span", "busy", "waiting", "bubble_makespan", "bubble_span", "peak_in_flight",
        "peak_bytes", "messages", "transports", "exact", "times"}) {
    if (!json.contains(key)) continue;
    const std::string note = note_on(key, json[key]);
    text += fmt::format("{:<17}{}{}\n", key, text_of(json[key]),
                        note.empty() ? "" : fmt::format(" ({})", note));
  }
  return text + tensor_text(json);
}

std::string comparison_text(const OrderedJson& json) {
  OrderedJson rows = json["rows"];
  for (OrderedJson& row : rows) {
    const std::vector<double> peaks = row["peak_in_flight"];
    row["micro-batches"] = *std::max_element(peaks.begin(), peaks.end()) / row["chunks"].get<int>();
  }
  std::string text =
      table_text(rows, {"schedule", "chunks", "makespan", "span", "bubble_makespan", "bubble_span",
                        "micro-batches", "peak_bytes", "messages", "transports"});
  text += fmt::format(
      "\nSorted by {}. Times and bytes given are of one micro-batch on a rank's whole share of the "
      "model; with v chunks\neach action takes a v-th. Micro-batches in flight and bytes are those "
      "of the fullest rank.\n",
      json["objective"] == "span"
          ? "the longest own span of a rank, which a step without a barrier would take"
          : "makespan, the step with its barrier");
  const OrderedJson& first = json["rows"].front();
  if (first.contains("times")) text += fmt::format("Times from {}.\n", text_of(first["times"]));
  return text + tensor_text(first);
}

// "0-2" per stage; a stage has one layer at least.
std::string layers_text(const std::vector<int>& first) {
  std::vector<std::string> ranges;
  for (std::size_t s = 0; s + 1 < first.size(); ++s) {
    const int last = first[s + 1] - 1;
    ranges.push_back(first[s] == last ? fmt::format("{}", last)
                                      : fmt::format("{}-{}", first[s], last));
  }
  return fmt::format("layers by stage: {}\n", joined(ranges, ", "));
}

std::string search_text(const OrderedJson& json) {
  constexpr std::size_t kMostCandidates = 16;
  OrderedJson candidates = json["candidates"];
  const std::size_t more = candidates.size() - std::min(candidates.size(), kMostCandidates);
  candidates.erase(candidates.end() - static_cast<std::ptrdiff_t>(more), candidates.end());
  const std::string objective = json["objective"];
  std::string text = table_text(candidates, {"placement", "chunks", "makespan", "span",
                                             "bubble_span", "peak_in_flight", "origin"});
  if (more > 0) text += fmt::format("... and {} more\n", more);
  text += fmt::format(
      "\nSorted by {}, the best of each kind before it was improved; of micro-batches in flight "
      "those of the fullest rank.\nThe {} of what was chosen is {:.4f} times {:.6g}, which no "
      "order "
      "of these stages on these ranks undercuts: it\ncounts times, messages without queues, and "
      "memory. The search is a heuristic: a better schedule may exist.\n",
      objective, objective, json["ratio"].get<double>(), json["lower_bound"].get<double>());
  if (!json["first_layer"].empty()) text += layers_text(json["first_layer"]);
  return text + "\n";
}

std::string footnotes(const OrderedJson& json) {
  const auto unequal = [](const OrderedJson& row) {
    return row["bubble_span"].get<double>() > row["bubble_makespan"].get<double>() * (1 + 1e-9);
  };
  const OrderedJson rows = json.contains("rows") ? json["rows"] : OrderedJson::array({json});
  std::string text;
  if (std::any_of(rows.begin(), rows.end(), unequal)) {
    text +=
        "bubble_makespan is the mean over ranks, bubble_span of the one rank with the longest "
        "span: "
        "where ranks differ, that one may idle more.\n";
  }
  for (const OrderedJson& each : json.value("remarks", OrderedJson::array())) {
    text += fmt::format("warning: {}\n", text_of(each));
  }
  for (const OrderedJson& each : json.value("left_out", OrderedJson::array())) {
    text += fmt::format("left out: {}\n", text_of(each));
  }
  return text;
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

void write_report(const ScheduleReport& report, const ScheduleOutput& output) {
  const auto body = [&](const PutText& put) {
    if (output.format == "grid") {
      put(to_text(report.json, &report.schedule));
    } else if (output.format == "json") {
      put(to_json_line(report.json));
    } else if (output.format == "csv") {
      put(csv_of(output, report.schedule));
    } else if (output.format == "svg") {
      put(draw_svg(report.schedule, report.simulation));
    } else if (output.format == "trace") {
      put_trace(report, put);
    } else {
      put(to_schedule_json(report.schedule, report.made_for));
    }
  };
  if (output.path.empty()) {
    body([](std::string_view text) { fmt::print("{}", text); });
    return;
  }
  AtomicFile file(output.path);
  body([&file](std::string_view text) { file.write(text); });
  file.commit();
}

std::string to_text(const OrderedJson& json, const Schedule* drawn) {
  std::string text;
  if (json.contains("rows")) text += comparison_text(json);
  if (json.contains("candidates")) text += search_text(json);
  if (drawn != nullptr) text += report_text(json, *drawn);
  return text + footnotes(json);
}

std::string to_json_line(const OrderedJson& json) {
  return dump_json(json, -1, InvalidUtf8::replace) + "\n";
}

}  // namespace sluice
