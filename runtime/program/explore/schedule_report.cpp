#include "runtime/program/explore/schedule_report.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/files/mapped_file.hpp"
#include "runtime/process/process.hpp"

namespace sluice {
namespace {

using OrderedJson = nlohmann::ordered_json;

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

// One entry of a list of the simulation's.
OrderedJson to_json(const SimulatedAction& each) {
  return {{"action", to_string(each.action)}, {"start", each.start}, {"end", each.end}};
}
OrderedJson to_json(const MemoryStep& each) { return {{"time", each.time}, {"bytes", each.bytes}}; }

template <typename Entry>
void add_lists(OrderedJson& json, const char* name, const std::vector<std::vector<Entry>>& ranks) {
  for (const std::vector<Entry>& rank : ranks) {
    OrderedJson row = OrderedJson::array();
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

// The names of the transports under which a plan ends: NCCL's models are asked of the plan made for
// in-order queues, the others of the one for transports with tags.
std::vector<std::string> prove(const Schedule& schedule, bool overlapped_grad_sums,
                               const std::vector<int>& resident) {
  const auto stages = static_cast<std::size_t>(schedule.placement.stages());
  const LowerOptions options = {
      .reduce_grad = !schedule.forward_only,
      .tied = {},
      .overlapped_grad_sums = std::vector<bool>(stages, overlapped_grad_sums),
      .resident = resident};
  const Schedule lowered = lower(schedule, options);
  const auto proven = [&](MessageOrder order) {
    Verification verification = verify(make_plan(lowered, options.tied, {.order = order}));
    if (!verification.ok()) throw_error(ErrorCode::kPlan, "{}", verification.violation->message);
    return verification;
  };
  const Verification tagged = proven(MessageOrder::kReceivesAhead);
  const Verification in_order = proven(MessageOrder::kGlobal);
  std::vector<std::string> names;
  for (int i = 0; i < kTransportModels; ++i) {
    const auto model = static_cast<TransportModel>(i);
    const bool queues = model == TransportModel::kNccl || model == TransportModel::kNcclEdges;
    if ((queues ? in_order : tagged).progresses(model)) names.emplace_back(name_of(model));
  }
  return names;
}

OrderedJson to_json(const Schedule& schedule, const Simulation& simulation,
                    const std::string& source, bool overlapped_grad_sums,
                    const std::vector<int>& resident) {
  const Placement& placement = schedule.placement;
  std::size_t chunks = 1;
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    chunks = std::max(chunks, placement.stages_of(rank).size());
  }
  const bool planned =
      std::int64_t{placement.stages()} * schedule.micro_batches <= kMaxPlannedPairs;
  OrderedJson json = {{"schedule", schedule.name},
                      {"ranks", placement.ranks()},
                      {"stages", placement.stages()},
                      {"micro_batches", schedule.micro_batches},
                      {"chunks", chunks}};
  if (!source.empty()) json["source"] = source;
  json.update(OrderedJson{{"makespan", simulation.makespan},
                          {"span", simulation.span},
                          {"busy", simulation.busy},
                          {"waiting", simulation.waiting},
                          {"bubble_makespan", simulation.bubble_makespan},
                          {"bubble_span", simulation.bubble_span},
                          {"peak_in_flight", simulation.peak_in_flight}});
  if (!simulation.peak_bytes.empty()) json["peak_bytes"] = simulation.peak_bytes;
  json["messages"] = simulation.messages;
  json["transports"] =
      planned ? OrderedJson(prove(schedule, overlapped_grad_sums, resident)) : OrderedJson();
  json["exact"] = is_exact(schedule);
  return json;
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
  } catch (const Error& error) {
    throw_error(ErrorCode::kPlan, "{}: {}", path.string(), error.what());
  }
}

LoadedSchedule generate_schedule(std::string_view name, const ScheduleShape& shape) {
  require_small_enough(std::int64_t{shape.ranks} * std::max(shape.chunks, 1), shape.micro_batches);
  return LoadedSchedule{generate(name, shape), ""};
}

ScheduleReport report_schedule(LoadedSchedule loaded, const Costs& costs,
                               const SimulationDetail& detail, const SimulationTimes* known) {
  require_small_enough(loaded.schedule.placement.stages(), loaded.schedule.micro_batches);
  ScheduleReport report;
  report.schedule = std::move(loaded.schedule);
  const Placement& placement = report.schedule.placement;
  const SimulationTimes times =
      known != nullptr ? *known
                       : costs.times(placement, loaded.made_for ? loaded.made_for->first_layer
                                                                : std::vector<int>{});
  if (const auto violation = check(report.schedule)) {
    throw_error(ErrorCode::kPlan, "{}", describe(report.schedule, *violation));
  }
  require_plan_for_queues(placement, report.schedule.micro_batches, times);
  const bool offloads = costs.offloads() && !report.schedule.forward_only;
  const std::vector<int> resident = offloads ? half_resident(report.schedule) : std::vector<int>();
  report.simulation = simulate(
      offloads ? lower(report.schedule, {.tied = {}, .resident = resident, .keep_pairs = true})
               : report.schedule,
      times, detail);
  report.json =
      to_json(report.schedule, report.simulation, loaded.source, times.reduce_overlap, resident);
  if (!costs.source().empty()) report.json["times"] = costs.source();
  if (const TensorCosts& tensor = costs.tensor(); tensor.ranks > 1) {
    const double each = static_cast<double>(report.schedule.micro_batches) / placement.ranks();
    report.json["tensor"] = {{"ranks", tensor.ranks},
                             {"calls", tensor.calls * each},
                             {"bytes", tensor.bytes * each},
                             {"time", tensor.time * each}};
  }
  const std::vector<std::string> remarks = costs.remarks(placement);
  if (!remarks.empty()) report.json["remarks"] = remarks;
  add_lists(report.json, "timeline", report.simulation.timeline);
  add_lists(report.json, "reductions", report.simulation.reductions);
  add_lists(report.json, "memory", report.simulation.memory);
  if (known == nullptr) require_memory(report, costs);
  return report;
}

}  // namespace sluice
