#include "runtime/explore/schedule_report.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

#include <sluice/draw.hpp>
#include <sluice/error.hpp>
#include <sluice/generate.hpp>
#include <sluice/verify.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/files/mapped_file.hpp"
#include "runtime/files/trace.hpp"
#include "runtime/options/process.hpp"

namespace sluice {
namespace {

// Above this many pairs of stage and micro-batch one machine simulates nothing: 1024 ranks with two
// chunks each and 4096 micro-batches.
constexpr std::int64_t kMaxPairs = 8'388'608;

std::string count(std::int64_t number, const char* what, const char* plural = "s") {
  return fmt::format("{} {}{}", number, what, number == 1 ? "" : plural);
}

void require_small_enough(std::int64_t stages, std::int64_t micro_batches) {
  if (micro_batches <= kMaxPairs / stages) return;
  throw_usage(
      "{} with {} are too many to simulate here: at most {} pairs of stage and micro-batch are "
      "legal{}",
      count(stages, "stage"), count(micro_batches, "micro-batch", "es"), kMaxPairs,
      stages > kMaxPairs ? ""
                         : fmt::format("; nearest legal: --micro-batches {}", kMaxPairs / stages));
}

// In-order queues are simulated by a plan.
void require_plan_for_queues(const Placement& placement, int micro_batches,
                             const SimulationTimes& times) {
  const std::int64_t pairs = std::int64_t{placement.stages()} * micro_batches;
  if (times.queues == MessageQueues::kNone || pairs <= kMaxPlannedPairs) return;
  throw_usage(
      "option --queues: {} pairs of stage and micro-batch are too many to plan; at most {} are "
      "legal "
      "with it, or --queues none",
      pairs, kMaxPlannedPairs);
}

// The grid has at least one cell per action of a rank.
std::size_t most_actions(const Schedule& schedule) {
  std::size_t longest = 0;
  for (const std::vector<Step>& steps : schedule.ranks) {
    longest = std::max(longest, steps.size());
  }
  return longest;
}

// In chunks.
std::string peak_text(const std::vector<int>& peaks) {
  constexpr std::size_t kMostListed = 32;
  if (peaks.size() <= kMostListed) {
    return fmt::format("{} (micro-batches x chunks, rank 0 first)", fmt::join(peaks, " "));
  }
  const auto [least, most] = std::minmax_element(peaks.begin(), peaks.end());
  return fmt::format("{} to {} (micro-batches x chunks of a rank)", *least, *most);
}

template <class Number>
std::string range_text(const std::vector<Number>& values) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  constexpr const char* kFormat = std::is_integral_v<Number> ? "{}" : "{:.6g}";
  const std::string text = fmt::format(fmt::runtime(kFormat), *most);
  return *least == *most ? text : fmt::format(fmt::runtime(kFormat), *least) + " to " + text;
}

std::string transports_text(const ScheduleReport& report) {
  if (report.planned) {
    return transport_names(report) + " (transport models; for nccl planned in one global order)";
  }
  return fmt::format(
      "not proven: no plan is made of more than {} pairs of stage and micro-batch, and no training "
      "runs them",
      kMaxPlannedPairs);
}

// One entry of a list of the simulation's.
nlohmann::ordered_json to_json(const SimulatedAction& each) {
  return {{"action", to_string(each.action)}, {"start", each.start}, {"end", each.end}};
}
nlohmann::ordered_json to_json(const MemoryStep& each) {
  return {{"time", each.time}, {"bytes", each.bytes}};
}

template <typename Entry>
void add_lists(nlohmann::ordered_json& json, const char* name,
               const std::vector<std::vector<Entry>>& ranks) {
  for (const std::vector<Entry>& rank : ranks) {
    auto row = nlohmann::ordered_json::array();
    for (const Entry& each : rank) row.push_back(to_json(each));
    json[name].push_back(std::move(row));
  }
}

template <typename T>
const T& of_rank(const std::vector<T>& limits, int rank) {
  return limits[limits.size() == 1 ? 0 : static_cast<std::size_t>(rank)];
}

void require_memory(const ScheduleReport& report, const Costs& costs) {
  const std::string& name = report.schedule.name;
  const Placement& placement = report.schedule.placement;
  const std::vector<std::int64_t>& bytes = costs.byte_limit(placement.ranks());
  const std::vector<double>& in_flight = costs.in_flight_limit(placement.ranks());
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    if (!bytes.empty() && report.simulation.peak_bytes[r] > of_rank(bytes, rank)) {
      throw_error(ErrorCode::kPlan,
                  "schedule '{}' holds up to {} bytes on rank {}; --memory-limit allows {}", name,
                  report.simulation.peak_bytes[r], rank, of_rank(bytes, rank));
    }
    const double chunks = static_cast<double>(placement.stages_of(rank).size());
    const double held = report.simulation.peak_in_flight[r] / chunks;
    if (in_flight.empty() || held <= of_rank(in_flight, rank)) continue;
    throw_error(ErrorCode::kPlan,
                "schedule '{}' holds up to {} micro-batches on rank {}; --memory-limit allows {}",
                name, held, rank, of_rank(in_flight, rank));
  }
}

// Under which transports a plan ends: NCCL's models are asked of the plan made for in-order queues,
// the others of the one for transports with tags.
std::vector<TransportModel> prove(const Schedule& schedule, bool overlapped_grad_sums) {
  const auto stages = static_cast<std::size_t>(schedule.placement.stages());
  const LowerOptions options = {
      .reduce_grad = !schedule.forward_only,
      .tied = {},
      .overlapped_grad_sums = std::vector<bool>(stages, overlapped_grad_sums)};
  const Schedule lowered = lower(schedule, options);
  const auto proven = [&](MessageOrder order) {
    Verification verification = verify(make_plan(lowered, options.tied, {.order = order}));
    if (!verification.ok()) throw_error(ErrorCode::kPlan, "{}", verification.violation->message);
    return verification;
  };
  const Verification tagged = proven(MessageOrder::kReceivesAhead);
  const Verification in_order = proven(MessageOrder::kGlobal);
  std::vector<TransportModel> models;
  for (const TransportModel model :
       {TransportModel::kEager, TransportModel::kRendezvous, TransportModel::kBounded,
        TransportModel::kNccl, TransportModel::kNcclEdges}) {
    const bool queues = model == TransportModel::kNccl || model == TransportModel::kNcclEdges;
    if ((queues ? in_order : tagged).progresses(model)) models.push_back(model);
  }
  return models;
}

// Blue, green, cyan, magenta for F, B, I, W; yellow for an overlapped pair.
const char* colour_of(std::string_view cell) {
  if (cell.find('+') != std::string_view::npos) return "33";
  switch (cell[std::min(cell.find_first_not_of("0123456789["), cell.size() - 1)]) {
    case 'F':
      return "34";
    case 'B':
      return "32";
    case 'I':
      return "36";
    case 'W':
      return "35";
    default:
      return "0";
  }
}

// The grid with its cells coloured, which are the words after each row's bar.
std::string coloured(std::string_view grid) {
  std::string text;
  while (!grid.empty()) {
    const std::size_t end = grid.find('\n');
    const std::string_view row = grid.substr(0, end);
    std::size_t at = std::min(row.find('|') + 1, row.size());
    text += row.substr(0, at);
    while (at < row.size()) {
      const std::size_t word = std::min(row.find_first_not_of(' ', at), row.size());
      const std::size_t blank = std::min(row.find(' ', word), row.size());
      text += row.substr(at, word - at);
      if (word < blank) {
        const std::string_view cell = row.substr(word, blank - word);
        text += fmt::format("\x1b[{}m{}\x1b[0m", colour_of(cell), cell);
      }
      at = blank;
    }
    text += '\n';
    grid.remove_prefix(std::min(end, grid.size() - 1) + 1);
  }
  return text;
}

LoadedSchedule load_json(std::string_view text) {
  ScheduleFile file = parse_schedule_json(text);
  return {std::move(file.schedule), "Sluice's JSON", std::move(file.made_for)};
}

const char* alphabet_text(const PytorchCsv& csv) {
  switch (csv.alphabet) {
    case CsvAlphabet::kOlder:
      return "older alphabet (B input half, BW whole backward)";
    case CsvAlphabet::kNoWaits:
      return "as of PyTorch 2.6 to 2.14 (I input half, B whole backward, no waits)";
    default:
      return "current alphabet (I input half, B whole backward)";
  }
}

LoadedSchedule load_csv(std::string_view text, const std::filesystem::path& path,
                        CsvAlphabet alphabet) {
  PytorchCsv csv = parse_pytorch_csv(text, path.stem().string(), alphabet);
  std::string source = fmt::format("PyTorch's CSV, {}", alphabet_text(csv));
  if (csv.messages > 0) source += fmt::format("; {} messages checked and dropped", csv.messages);
  if (csv.waits > 0) source += fmt::format("; {} waits too", csv.waits);
  if (csv.sharding > 0) {
    source += fmt::format("; {} UNSHARD, RESHARD and REDUCE_GRAD kept, and passed over here",
                          csv.sharding);
  }
  return {std::move(csv.schedule), std::move(source), std::nullopt};
}

}  // namespace

LoadedSchedule load_schedule(const std::filesystem::path& path, CsvAlphabet alphabet) {
  const MappedFile file(path, ErrorCode::kData);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                              file.bytes().size());
  try {
    LoadedSchedule loaded =
        looks_like_json(text) ? load_json(text) : load_csv(text, path, alphabet);
    loaded.source = fmt::format("{}: {}", path.string(), loaded.source);
    return loaded;
  } catch (const std::invalid_argument& error) {
    throw_error(ErrorCode::kPlan, "{}: {}", path.string(), error.what());
  }
}

LoadedSchedule generate_schedule(std::string_view name, const ScheduleShape& shape) {
  require_small_enough(std::int64_t{shape.ranks} * std::max(shape.chunks, 1), shape.micro_batches);
  return usage_errors([&] { return LoadedSchedule{generate(name, shape), ""}; });
}

ScheduleReport report_schedule(LoadedSchedule loaded, const SimulationTimes& times,
                               const SimulationDetail& detail) {
  ScheduleReport report;
  report.schedule = std::move(loaded.schedule);
  report.source = std::move(loaded.source);
  const Schedule& schedule = report.schedule;
  const Placement& placement = schedule.placement;
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    report.chunks = std::max(report.chunks, static_cast<int>(placement.stages_of(rank).size()));
  }
  if (const auto violation = check(schedule)) {
    throw_error(ErrorCode::kPlan, "{}", describe(schedule, *violation));
  }
  require_plan_for_queues(placement, schedule.micro_batches, times);
  report.planned = std::int64_t{placement.stages()} * schedule.micro_batches <= kMaxPlannedPairs;
  if (report.planned) report.transports = prove(schedule, times.reduce_overlap);
  report.simulation = simulate(schedule, times, detail);
  report.exact = is_exact(schedule);
  return report;
}

ScheduleReport report_schedule(LoadedSchedule loaded, const Costs& costs,
                               const SimulationDetail& detail) {
  const Placement& placement = loaded.schedule.placement;
  require_small_enough(placement.stages(), loaded.schedule.micro_batches);
  return usage_errors([&] {
    const std::vector<int> first_layer =
        loaded.made_for ? loaded.made_for->first_layer : std::vector<int>{};
    const SimulationTimes times = costs.times(placement, first_layer);
    std::vector<std::string> remarks = costs.remarks(placement);
    ScheduleReport report = report_schedule(std::move(loaded), times, detail);
    report.costs_source = costs.source();
    report.remarks = std::move(remarks);
    require_memory(report, costs);
    return report;
  });
}

std::string transport_names(const ScheduleReport& report) {
  if (!report.planned) return "not proven";
  std::vector<std::string_view> names;
  for (const TransportModel model : report.transports) names.push_back(name_of(model));
  return fmt::format("{}", fmt::join(names, ", "));
}

std::string to_grid_text(const ScheduleReport& report, bool colours) {
  constexpr std::size_t kMostColumns = 200;
  const Schedule& schedule = report.schedule;
  const Simulation& simulation = report.simulation;
  std::string text =
      fmt::format("{}: {}, {}, {}\n\n", schedule.name, count(schedule.placement.ranks(), "rank"),
                  count(schedule.placement.stages(), "stage"),
                  count(schedule.micro_batches, "micro-batch", "es"));
  if (!report.source.empty()) text.insert(text.size() - 1, fmt::format("({})\n", report.source));
  if (most_actions(schedule) <= kMostColumns && schedule.ranks.size() <= kMostColumns) {
    const std::string grid = draw_grid(schedule);
    text += colours ? coloured(grid) : grid;
  } else {
    text += fmt::format(
        "(no grid: more than {} cells wide or high; --format json --timeline lists "
        "every action)\n",
        kMostColumns);
  }
  const std::string bytes =
      simulation.peak_bytes.empty()
          ? ""
          : fmt::format("peak bytes       {} (of a rank)\n", range_text(simulation.peak_bytes));
  text += fmt::format(
      "\nmakespan         {}\n"
      "span             {} (longest own span of a rank)\n"
      "busy, waiting    {}, {} (of a rank within its own span)\n"
      "bubble_makespan  {:.4f} (idle share up to the last rank's end)\n"
      "bubble_span      {:.4f} (idle share of the longest own span{})\n"
      "peak in flight   {}\n"
      "{}"
      "messages         {}\n"
      "ends under       {}\n"
      "exact            {}\n",
      simulation.makespan, simulation.span, range_text(simulation.busy),
      range_text(simulation.waiting), simulation.bubble_makespan, simulation.bubble_span,
      simulation.bubble_span > simulation.bubble_makespan * (1 + 1e-9)
          ? "; that rank idles more than the mean of all, which bubble_makespan is"
          : "",
      peak_text(simulation.peak_in_flight), bytes, simulation.messages, transports_text(report),
      report.exact ? "yes: the same bits as every other exact schedule"
                   : "no: repeats bit for bit, but sums gradients in another order");
  if (!report.costs_source.empty())
    text += fmt::format("times            {}\n", report.costs_source);
  for (const std::string& each : report.remarks) text += fmt::format("warning: {}\n", each);
  return text;
}

nlohmann::ordered_json to_json(const ScheduleReport& report) {
  const Simulation& simulation = report.simulation;
  nlohmann::ordered_json json;
  json["schedule"] = report.schedule.name;
  json["ranks"] = report.schedule.placement.ranks();
  json["stages"] = report.schedule.placement.stages();
  json["micro_batches"] = report.schedule.micro_batches;
  json["chunks"] = report.chunks;
  if (!report.source.empty()) json["source"] = report.source;
  json["makespan"] = simulation.makespan;
  json["span"] = simulation.span;
  json["busy"] = simulation.busy;
  json["waiting"] = simulation.waiting;
  json["bubble_makespan"] = simulation.bubble_makespan;
  json["bubble_span"] = simulation.bubble_span;
  json["peak_in_flight"] = simulation.peak_in_flight;
  if (!simulation.peak_bytes.empty()) json["peak_bytes"] = simulation.peak_bytes;
  json["messages"] = simulation.messages;
  json["transports"] = nullptr;
  if (report.planned) json["transports"] = nlohmann::ordered_json::array();
  for (const TransportModel model : report.transports) {
    json["transports"].push_back(std::string(name_of(model)));
  }
  json["exact"] = report.exact;
  if (!report.costs_source.empty()) json["times"] = report.costs_source;
  if (!report.remarks.empty()) json["remarks"] = report.remarks;
  add_lists(json, "timeline", simulation.timeline);
  add_lists(json, "reductions", simulation.reductions);
  add_lists(json, "memory", simulation.memory);
  return json;
}

std::string to_json_line(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

namespace {

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

}  // namespace

void put_trace(const ScheduleReport& report, const std::function<void(std::string_view)>& put) {
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

}  // namespace sluice
