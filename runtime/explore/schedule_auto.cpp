#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include <sluice/search.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/explore/schedule_compare.hpp"
#include "runtime/explore/schedule_output.hpp"
#include "runtime/options/process.hpp"

namespace sluice {
namespace {

constexpr std::size_t kMostCandidates = 16;
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

struct AutoSchedule {
  SearchResult result;
  ScheduleReport report;  // of result.schedule; `source` names the search
};

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

// Of one chunk per rank, where both were candidates.
std::string remark_of(const std::vector<SearchCandidate>& candidates) {
  std::map<std::string, StepTimes> times;
  for (const SearchCandidate& each : candidates) {
    times.emplace(each.origin, StepTimes{each.makespan, each.span});  // the first counts
  }
  return remark_on_barrier(times);
}

// Empty for "auto".
std::vector<int> chunks_of(const std::string& text) {
  if (text == "auto") return {};
  std::vector<int> counts;
  const char* at = text.data();
  const char* const end = at + text.size();
  for (;;) {
    int count = 0;
    const auto [next, problem] = std::from_chars(at, end, count);
    if (problem != std::errc() || count < 1 || count > kMaxSearchedChunks) break;
    counts.push_back(count);
    if (next == end) return counts;
    if (*next != ',') break;
    at = next + 1;
  }
  throw_usage("option --chunks: '{}' is neither 'auto' nor integers from 1 to {} with commas", text,
              kMaxSearchedChunks);
}

AutoSchedule find_schedule(const AutoOptions& options) {
  const Costs& costs = options.costs;
  SearchRequest request = options.request;
  request.split_backward = !options.whole_backward;
  request.chunks = chunks_of(options.chunks);
  AutoSchedule found;
  found.result = search_with(costs, request, options.layers);
  const SearchResult& result = found.result;
  found.report =
      report_schedule({result.schedule, describe_search(result, request.objective), std::nullopt},
                      result.times, detail_of(options.output));
  found.report.costs_source = costs.source();
  found.report.remarks = costs.remarks(result.schedule.placement);
  found.report.made_for = MadeFor{.first_layer = result.first_layer,
                                  .makespan = result.simulation.makespan,
                                  .bubble = result.simulation.bubble_makespan,
                                  .milliseconds = costs.milliseconds()};
  return found;
}

std::string to_table_text(const AutoSchedule& found, Objective objective) {
  const SearchResult& result = found.result;
  std::string text = fmt::format("{:<9}{:>7}{:>12}{:>12}{:>13}{:>15}  {}\n", "placement", "chunks",
                                 "makespan", "span", "bubble_span", "micro-batches", "origin");
  const std::size_t listed = std::min(kMostCandidates, result.candidates.size());
  for (std::size_t i = 0; i < listed; ++i) text += row_text(result.candidates[i]);
  if (listed < result.candidates.size()) {
    text += fmt::format("... and {} more\n", result.candidates.size() - listed);
  }
  for (const std::string& each : result.left_out) text += fmt::format("left out: {}\n", each);
  text += fmt::format("\nSorted by {}, the best of each kind before it was improved. Chosen:\n\n",
                      name_of(objective)) +
          row_text(result.chosen) + "\n";
  text += fmt::format(
      "Its {} is {:.4f} times {:.6g}, which no order of these stages on these ranks undercuts: it "
      "counts\ntimes, messages without queues, and memory. The search is a heuristic: a better "
      "schedule may exist.\n",
      name_of(objective), result.ratio, result.lower_bound);
  const std::string remark = objective == Objective::kMakespan ? remark_of(result.candidates) : "";
  if (!remark.empty()) text += remark + "\n";
  if (!result.first_layer.empty()) text += layers_text(result.first_layer) + "\n";
  return text + "\n";
}

std::string to_json_text(const AutoSchedule& found, Objective objective) {
  const SearchResult& result = found.result;
  nlohmann::ordered_json json = to_json(found.report);
  json["origin"] = result.chosen.origin;
  json["placement"] = result.chosen.placement;
  json["objective"] = name_of(objective);
  json["lower_bound"] = result.lower_bound;
  json["ratio"] = result.ratio;
  json["first_layer"] = result.first_layer;
  json["candidates"] = nlohmann::ordered_json::array();
  for (const SearchCandidate& each : result.candidates) json["candidates"].push_back(to_json(each));
  json["left_out"] = result.left_out;
  return to_json_line(json);
}

OptionTable make_table(AutoOptions& options) {
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

void run(AutoOptions& options, const OptionTable& table) {
  if (table.given("overlap-time")) {
    throw_usage(
        "option --overlap-time: auto plans for training, which runs a pair's actions one after the "
        "other; 'sluice schedule compare' counts overlaps");
  }
  options.costs.resolve(table, options.layers > 0 ? CostsOf::kStage : CostsOf::kRankShare);
  options.costs.resolve_ranks(table, options.request.ranks);
  if (!table.given("layers")) options.layers = options.costs.measured_layers();
  const AutoSchedule found = usage_errors([&] { return find_schedule(options); });
  const Objective objective = options.request.objective;
  write_output(options.output, [&](const PutText& put) {
    if (options.output.format == "json") {
      put(to_json_text(found, objective));
      return;
    }
    if (options.output.format == "grid") put(to_table_text(found, objective));
    put_schedule(found.report, options.output, put);
  });
}

}  // namespace

SearchResult search_with(const Costs& costs, SearchRequest request, int layers) {
  request.whole_layers = layers > 0;
  request.model =
      layers > 0 ? costs.of_layers(request.ranks, layers) : costs.of_shares(request.ranks);
  request.byte_limit = costs.byte_limit(request.ranks);
  request.in_flight_limit = costs.in_flight_limit(request.ranks);
  return search_schedule(request);
}

std::string describe_search(const SearchResult& result, Objective objective) {
  return fmt::format(
      "found by a heuristic search: {}, {} placement, {}; {} {:.6g} is {:.4f} times the lower "
      "bound {:.6g}",
      result.chosen.origin, result.chosen.placement, chunks_text(result.chosen.chunks),
      name_of(objective), value_of(result.chosen, objective), result.ratio, result.lower_bound);
}

int schedule_auto_command(const std::vector<std::string>& arguments) {
  AutoOptions options;
  OptionTable table = make_table(options);
  return run_guarded(table, arguments, [&] { run(options, table); });
}

}  // namespace sluice
