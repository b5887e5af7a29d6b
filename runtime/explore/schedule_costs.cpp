#include "runtime/explore/schedule_costs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <stdexcept>

#include <sluice/error.hpp>

#include "runtime/explore/measured_costs.hpp"

namespace sluice {
namespace {

constexpr double kMostBytes = 9007199254740992.0;  // 2^53: whole numbers a double counts exactly
constexpr const char* kNumbers = "X[,X...]";

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorCode::kUsage, message); }

// Numbers from 0 up with commas between them; nothing where the text is anything else.
std::optional<std::vector<double>> numbers_of(std::string_view text) {
  std::vector<double> values;
  const char* at = text.data();
  const char* const end = at + text.size();
  for (;;) {
    double value = 0;
    const auto [next, problem] = std::from_chars(at, end, value);
    if (problem != std::errc() || !std::isfinite(value) || value < 0) return std::nullopt;
    values.push_back(value);
    if (next == end) return values;
    if (*next != ',') return std::nullopt;
    at = next + 1;
  }
}

std::vector<double> times_of(const char* option, const std::string& text) {
  const auto values = numbers_of(text);
  if (!values) {
    refuse(fmt::format("option --{}: '{}' is not a list of numbers from 0 up, separated by commas",
                       option, text));
  }
  return *values;
}

std::vector<double> bytes_of(const char* option, const std::string& text) {
  if (text.empty()) return {};
  const auto values = numbers_of(text);
  const auto countable = [](double value) {
    return value <= kMostBytes && std::floor(value) == value;
  };
  if (!values || !std::all_of(values->begin(), values->end(), countable)) {
    refuse(
        fmt::format("option --{}: '{}' is not a list of whole numbers of bytes from 0 to 2^53, "
                    "separated by commas",
                    option, text));
  }
  return *values;
}

double overlap_of(const std::string& text) {
  if (text == "sum") return -1;
  const auto values = numbers_of(text);
  if (!values || values->size() != 1) {
    refuse(
        fmt::format("option --overlap-time: '{}' is neither 'sum' nor a number from 0 up", text));
  }
  return values->front();
}

// One of "FROM-TO:LATENCY[:BANDWIDTH]".
RankLink link_of(std::string_view text) {
  RankLink result;
  const char* const end = text.data() + text.size();
  const auto number = [&](const char* at, char before, auto& value) {
    if (at == nullptr || (before != '\0' && (at == end || *at++ != before))) return at = nullptr;
    const auto [next, problem] = std::from_chars(at, end, value);
    return problem == std::errc() ? next : nullptr;
  };
  const char* at = number(text.data(), '\0', result.from);
  at = number(at, '-', result.to);
  at = number(at, ':', result.link.latency);
  if (at != nullptr && at != end) at = number(at, ':', result.link.bandwidth);
  const LinkCost& link = result.link;
  const bool legal = at == end && result.from >= 0 && result.to >= 0 && link.latency >= 0 &&
                     link.bandwidth >= 0 && std::isfinite(link.latency + link.bandwidth);
  if (!legal) {
    refuse(
        fmt::format("option --links: '{}' is not FROM-TO:LATENCY or FROM-TO:LATENCY:BANDWIDTH, "
                    "e.g. 3-4:0.5:1e9",
                    text));
  }
  return result;
}

std::vector<RankLink> links_of(std::string_view text) {
  std::vector<RankLink> links;
  while (!text.empty()) {
    const std::size_t comma = std::min(text.find(','), text.size());
    links.push_back(link_of(text.substr(0, comma)));
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return links;
}

}  // namespace

void add_cost_options(OptionTable& table, CostOptions& options, CostsOf scope) {
  constexpr RealRange kFromZero = {.low = 0, .high = std::numeric_limits<double>::infinity()};
  const bool stage = scope == CostsOf::kStage;
  const std::string of =
      stage ? "of one micro-batch on one stage" : "of one micro-batch on one rank";
  table.heading("Costs");
  table.add_text("forward-time", options.forward, kNumbers, of);
  table.add_text("backward-input-time", options.backward_input, kNumbers, "likewise");
  table.add_text("backward-weight-time", options.backward_weight, kNumbers, "likewise");
  table.add_text("overlap-time", options.overlap, "sum|X",
                 "of an overlapped pair; sum: of what its two take");
  table.add_text("profile", options.profile, "FILE",
                 "times in milliseconds from what 'sluice train' wrote for --trace or --metrics");
  table.add_real(
      "input-share", options.input_share, {.low = 0, .high = 1},
      "of a whole backward in the profile that is its input half, recomputation included");
  table.add_real("message-time", options.message, kFromZero, "latency of a message between ranks");
  table.add_real("bandwidth", options.bandwidth, kFromZero,
                 "bytes per unit of time from one rank to another; 0: without limit");
  table.add_integer("ranks-per-node", options.ranks_per_node, 0, std::numeric_limits<int>::max(),
                    "0: all ranks share a node");
  table.add_real("node-message-time", options.node_message, kFromZero,
                 "latency of a message between nodes; not given: message-time");
  table.add_real("node-bandwidth", options.node_bandwidth, kFromZero,
                 "between two ranks of different nodes; not given: bandwidth");
  table.add_text("links", options.links, "FROM-TO:LATENCY[:BANDWIDTH],...",
                 "links between ranks that differ from all that");
  table.add_text("message-bytes", options.message_bytes, kNumbers,
                 std::string("of a stage's output for one micro-batch"));
  table.add_text("gradient-message-bytes", options.gradient_message_bytes, kNumbers,
                 "of what comes back for it; not given: as much");
  table.add_text("activation-bytes", options.activation_bytes, kNumbers,
                 "kept from F until I or B has ended, " + of);
  table.add_text("weight-activation-bytes", options.weight_activation_bytes, kNumbers,
                 "kept from F until W or B has ended, " + of);
  table.add_text("resident-bytes", options.resident_bytes, kNumbers,
                 std::string("held all the time (parameters, gradients, optimizer) by one ") +
                     (stage ? "stage" : "rank"));
  table.add_text("memory-limit", options.memory_limit, "X",
                 "bytes that a rank may hold at most; without bytes, micro-batches in flight");
  table.add_text(
      "reduce-time", options.reduce, kNumbers,
      std::string("sum of the gradients of one ") + (stage ? "stage" : "rank") + " over replicas");
  table.add_text("reduce-bytes", options.reduce_bytes, kNumbers,
                 "that one replica moves for it; added to reduce-time");
  table.add_real("reduce-bandwidth", options.reduce_bandwidth, kFromZero,
                 "for reduce-bytes; 0: without limit");
  table.add_flag("reduce-overlap", options.reduce_overlap,
                 "reduce a stage beside compute once its last W or B has ended");
}

Costs::Costs(const CostOptions& options, const OptionTable& table, CostsOf scope)
    : scope_(scope),
      forward_{"forward-time", times_of("forward-time", options.forward)},
      backward_input_{"backward-input-time",
                      times_of("backward-input-time", options.backward_input)},
      backward_weight_{"backward-weight-time",
                       times_of("backward-weight-time", options.backward_weight)},
      reduce_{"reduce-time", times_of("reduce-time", options.reduce)},
      output_{"message-bytes", bytes_of("message-bytes", options.message_bytes)},
      output_gradient_{"gradient-message-bytes",
                       bytes_of("gradient-message-bytes", options.gradient_message_bytes)},
      until_input_{"activation-bytes", bytes_of("activation-bytes", options.activation_bytes)},
      until_weight_{"weight-activation-bytes",
                    bytes_of("weight-activation-bytes", options.weight_activation_bytes)},
      resident_{"resident-bytes", bytes_of("resident-bytes", options.resident_bytes)},
      reduced_{"reduce-bytes", bytes_of("reduce-bytes", options.reduce_bytes)} {
  common_.message = options.message;
  common_.bandwidth = options.bandwidth;
  common_.overlap = overlap_of(options.overlap);
  common_.ranks_per_node = options.ranks_per_node;
  common_.links = links_of(options.links);
  common_.reduce_link = {0, options.reduce_bandwidth};
  common_.reduce_overlap = options.reduce_overlap;
  for (const List* list :
       {&output_, &output_gradient_, &until_input_, &until_weight_, &resident_, &reduced_}) {
    has_bytes_ = has_bytes_ || !list->values.empty();
  }
  if (!options.memory_limit.empty()) read_memory_limit(options.memory_limit);
  if (!options.profile.empty()) read_profile(options, table);
  common_.between_nodes = {
      table.given("node-message-time") ? options.node_message : common_.message,
      table.given("node-bandwidth") ? options.node_bandwidth : common_.bandwidth};
}

void Costs::read_profile(const CostOptions& options, const OptionTable& table) {
  for (const char* name : {"forward-time", "backward-input-time", "backward-weight-time"}) {
    if (table.given(name)) {
      refuse(fmt::format("option --{}: --profile says it; give one of the two", name));
    }
  }
  const MeasuredCosts measured = read_measured_costs(options.profile, options.input_share);
  measured_ = measured.stages;
  source_ = measured.source;
  if (!table.given("message-time")) common_.message = measured.message;
}

void Costs::read_memory_limit(const std::string& text) {
  if (has_bytes_) {
    const std::vector<double> limit = bytes_of("memory-limit", text);
    if (limit.size() != 1) refuse("option --memory-limit: legal is one number of bytes");
    memory_limit_ = std::llround(limit.front());
    return;
  }
  const auto limit = numbers_of(text);
  if (!limit || limit->size() != 1 || limit->front() < 1) {
    refuse(
        fmt::format("option --memory-limit: '{}' is not a number from 1 up; without bytes of "
                    "activations it counts micro-batches in flight",
                    text));
  }
  in_flight_limit_ = limit->front();
}

SimulationTimes Costs::of_pieces(int pieces) const {
  const auto legal = [&](const List& list) {
    if (list.values.size() == 1 || static_cast<std::int64_t>(list.values.size()) == pieces) return;
    refuse(fmt::format("option --{}: {} numbers; legal is one number, or {} of them, one per {}",
                       list.option, list.values.size(), pieces,
                       scope_ == CostsOf::kStage ? "stage" : "rank's share of the model"));
  };
  std::size_t entries = 1;
  const auto at = [](const List& list, std::size_t i) {
    return list.values.empty() ? 0 : list.values[i % list.values.size()];
  };
  for (const List* list :
       {&forward_, &backward_input_, &backward_weight_, &reduce_, &output_, &output_gradient_,
        &until_input_, &until_weight_, &resident_, &reduced_}) {
    if (list->values.empty()) continue;
    legal(*list);
    entries = std::max(entries, list->values.size());
  }
  SimulationTimes times = common_;
  for (std::size_t i = 0; i < entries; ++i) {
    times.stages.push_back({.forward = at(forward_, i),
                            .backward_input = at(backward_input_, i),
                            .backward_weight = at(backward_weight_, i),
                            .reduce = at(reduce_, i)});
    if (!has_bytes_) continue;
    StageBytes bytes;
    bytes.until_input = std::llround(at(until_input_, i));
    bytes.until_weight = std::llround(at(until_weight_, i));
    bytes.output = std::llround(at(output_, i));
    if (!output_gradient_.values.empty()) {
      bytes.output_gradient = std::llround(at(output_gradient_, i));
    }
    bytes.resident = std::llround(at(resident_, i));
    bytes.reduced = std::llround(at(reduced_, i));
    times.bytes.push_back(bytes);
  }
  return times;
}

SimulationTimes Costs::times(int ranks, int stages) const {
  const bool shares = scope_ == CostsOf::kRankShare;
  SimulationTimes times = of_pieces(shares ? ranks : stages);
  try {
    if (shares) times = recut(times, ranks, stages);
    if (measured_.empty()) return times;
    SimulationTimes measured;
    measured.stages = measured_;
    measured = recut(measured, static_cast<int>(measured_.size()), stages);
    for (std::size_t i = 0; i < measured.stages.size(); ++i) {
      measured.stages[i].reduce = times.stages[i % times.stages.size()].reduce;
    }
    times.stages = std::move(measured.stages);
    return times;
  } catch (const std::invalid_argument& error) {
    refuse(error.what());
  }
}

}  // namespace sluice
