#include "runtime/schedule_compare.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>

#include "comm/error.hpp"

namespace sluice {
namespace {

int most_in_flight(const ScheduleReport& report) {
  const std::vector<int>& peaks = report.simulation.peak_in_flight;
  return *std::max_element(peaks.begin(), peaks.end());
}

// The first number of chunks that `name` takes; the last refusal in `why` where it takes none.
std::optional<ScheduleReport> report_one(const std::string& name, const ScheduleShape& shape,
                                         const Costs& costs, std::string& why) {
  const std::vector<int> candidates =
      shape.chunks > 0 ? std::vector<int>{shape.chunks} : std::vector<int>{2, 1};
  for (const int chunks : candidates) {
    try {
      return report_schedule(name, {shape.ranks, shape.micro_batches, chunks}, costs);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUsage && error.code() != ErrorCode::kPlan) throw;
      why = error.what();
    }
  }
  return std::nullopt;
}

}  // namespace

Comparison compare_schedules(const ScheduleShape& shape, const Costs& costs) {
  Comparison comparison;
  for (const std::string& name : schedule_names()) {
    if (name == "forward-only") continue;
    std::string why;
    if (auto report = report_one(name, shape, costs, why)) {
      comparison.rows.push_back(std::move(*report));
    } else {
      comparison.left_out.push_back(why);
    }
  }
  if (comparison.rows.empty()) {
    throw Error(ErrorCode::kUsage, comparison.left_out.empty() ? "there is no schedule to compare"
                                                               : comparison.left_out.front());
  }
  std::stable_sort(comparison.rows.begin(), comparison.rows.end(),
                   [](const ScheduleReport& a, const ScheduleReport& b) {
                     const int peak_a = most_in_flight(a) * b.chunks;
                     const int peak_b = most_in_flight(b) * a.chunks;
                     return std::tie(a.simulation.makespan, peak_a) <
                            std::tie(b.simulation.makespan, peak_b);
                   });
  return comparison;
}

std::string to_table_text(const Comparison& comparison) {
  std::string text = fmt::format("{:<18}{:>7}{:>12}{:>17}{:>13}{:>12}{:>14}{:>10}  {}\n",
                                 "schedule", "chunks", "makespan", "bubble_makespan", "bubble_span",
                                 "peak chunks", "micro-batches", "messages", "ends under");
  for (const ScheduleReport& row : comparison.rows) {
    std::vector<std::string_view> transports;
    for (const TransportModel model : row.transports) transports.push_back(name_of(model));
    const int peak = most_in_flight(row);
    text += fmt::format("{:<18}{:>7}{:>12.6g}{:>17.4f}{:>13.4f}{:>12}{:>14.6g}{:>10}  {}\n",
                        row.schedule.name, row.chunks, row.simulation.makespan,
                        row.simulation.bubble_makespan, row.simulation.bubble_span, peak,
                        static_cast<double>(peak) / row.chunks, row.simulation.messages,
                        fmt::join(transports, ", "));
  }
  text +=
      "\nSorted by makespan. Times are of one micro-batch on a rank's whole share of the model; "
      "with v chunks\neach action takes a v-th. Peak in flight is that of the fullest rank, in "
      "chunks and in whole micro-batches.\n";
  for (const std::string& each : comparison.left_out) text += fmt::format("left out: {}\n", each);
  return text;
}

std::string to_json_text(const Comparison& comparison) {
  nlohmann::ordered_json json;
  json["rows"] = nlohmann::ordered_json::array();
  for (const ScheduleReport& row : comparison.rows) {
    json["rows"].push_back(nlohmann::ordered_json::parse(to_json_text(row, false)));
  }
  json["left_out"] = comparison.left_out;
  return json.dump() + "\n";
}

}  // namespace sluice
