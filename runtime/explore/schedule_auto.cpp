#include "runtime/explore/schedule_auto.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include <sluice/error.hpp>

#include "runtime/explore/schedule_compare.hpp"

namespace sluice {
namespace {

constexpr std::size_t kMostListed = 16;

std::string name_of(Objective objective) {
  return objective == Objective::kSpan ? "span" : "makespan";
}

double value_of(const SearchCandidate& candidate, Objective objective) {
  return objective == Objective::kSpan ? candidate.span : candidate.makespan;
}

std::string chunks_text(int chunks) {
  return chunks == 1 ? "1 chunk" : fmt::format("{} chunks", chunks);
}

// "0-2" per stage; a stage has one layer at least.
std::string layers_text(const std::vector<int>& first) {
  std::vector<std::string> ranges;
  for (std::size_t s = 0; s + 1 < first.size(); ++s) {
    const int last = first[s + 1] - 1;
    ranges.push_back(first[s] == last ? fmt::format("{}", last)
                                      : fmt::format("{}-{}", first[s], last));
  }
  return fmt::format("layers by stage: {}", fmt::join(ranges, ", "));
}

std::string row_text(const SearchCandidate& row) {
  return fmt::format("{:<9}{:>7}{:>12.6g}{:>12.6g}{:>13.4f}{:>15.6g}  {}\n", row.placement,
                     row.chunks, row.makespan, row.span, std::max(row.bubble_span, 0.0),
                     row.peak_in_flight, row.origin);
}

nlohmann::ordered_json to_json(const SearchCandidate& row) {
  return {{"origin", row.origin},
          {"placement", row.placement},
          {"chunks", row.chunks},
          {"makespan", row.makespan},
          {"span", row.span},
          {"bubble_span", row.bubble_span},
          {"peak_in_flight", row.peak_in_flight}};
}

SimulationTimes times_of_layers(const Costs& costs, int ranks, int layers) {
  SimulationTimes times = costs.times(ranks, layers);
  if (times.stages.size() == 1) {
    times.stages.assign(static_cast<std::size_t>(layers), times.stages.front());
  }
  return times;
}

// Of one chunk per rank, where both were candidates.
std::string remark_of(const std::vector<SearchCandidate>& candidates) {
  const auto find = [&](const char* name) {
    return std::find_if(candidates.begin(), candidates.end(),
                        [&](const SearchCandidate& each) { return each.origin == name; });
  };
  const auto h1 = find("zb-h1"), h2 = find("zb-h2");
  if (h1 == candidates.end() || h2 == candidates.end()) return "";
  return remark_on_barrier({h1->makespan, h1->span}, {h2->makespan, h2->span});
}

}  // namespace

AutoSchedule find_schedule(SearchRequest request, const Costs& costs, int layers,
                           const SimulationDetail& detail) {
  try {
    request.whole_layers = layers > 0;
    request.model = layers > 0 ? times_of_layers(costs, request.ranks, layers)
                               : costs.times(request.ranks, request.ranks);
    if (const auto limit = costs.memory_limit()) request.byte_limit = {*limit};
    if (const auto limit = costs.in_flight_limit()) request.in_flight_limit = {*limit};
    AutoSchedule found;
    found.result = search_schedule(request);
    const SearchResult& result = found.result;
    const std::string source = fmt::format(
        "found by a heuristic search: {}, {} placement, {}; {} {:.6g} is {:.4f} times the lower "
        "bound {:.6g}",
        result.chosen.origin, result.chosen.placement, chunks_text(result.chosen.chunks),
        name_of(request.objective), value_of(result.chosen, request.objective), result.ratio,
        result.lower_bound);
    found.report = report_schedule({result.schedule, source}, result.times, {.detail = detail});
    found.report.costs_source = costs.source();
    return found;
  } catch (const std::invalid_argument& error) {
    throw Error(ErrorCode::kUsage, error.what());
  }
}

std::string to_table_text(const AutoSchedule& found, Objective objective) {
  const SearchResult& result = found.result;
  std::string text = fmt::format("{:<9}{:>7}{:>12}{:>12}{:>13}{:>15}  {}\n", "placement", "chunks",
                                 "makespan", "span", "bubble_span", "micro-batches", "origin");
  const std::size_t listed = std::min(kMostListed, result.candidates.size());
  for (std::size_t i = 0; i < listed; ++i) text += row_text(result.candidates[i]);
  if (listed < result.candidates.size()) {
    text += fmt::format("... and {} more\n", result.candidates.size() - listed);
  }
  for (const std::string& each : result.left_out) text += fmt::format("left out: {}\n", each);
  text += fmt::format("\nSorted by {}, the best of each kind before it was improved. Chosen:\n\n",
                      name_of(objective)) +
          row_text(result.chosen) + "\n";
  text += fmt::format(
      "Its {} is {:.4f} times {:.6g}, which no order of these stages on these ranks undercuts. The "
      "search is\na heuristic: a better schedule may exist.\n",
      name_of(objective), result.ratio, result.lower_bound);
  const std::string remark = objective == Objective::kMakespan ? remark_of(result.candidates) : "";
  if (!remark.empty()) text += remark + "\n";
  if (!result.first_layer.empty()) text += layers_text(result.first_layer) + "\n";
  return text + "\n";
}

std::string to_json_text(const AutoSchedule& found, Objective objective) {
  const SearchResult& result = found.result;
  auto json = nlohmann::ordered_json::parse(to_json_text(found.report));
  json["origin"] = result.chosen.origin;
  json["placement"] = result.chosen.placement;
  json["objective"] = name_of(objective);
  json["lower_bound"] = result.lower_bound;
  json["ratio"] = result.ratio;
  json["first_layer"] = result.first_layer;
  json["candidates"] = nlohmann::ordered_json::array();
  for (const SearchCandidate& each : result.candidates) json["candidates"].push_back(to_json(each));
  json["left_out"] = result.left_out;
  return json.dump() + "\n";
}

}  // namespace sluice
