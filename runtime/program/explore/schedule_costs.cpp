#include "runtime/program/explore/schedule_costs.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include <sluice/search.hpp>

#include "comm/base/throw_error.hpp"
#include "runtime/process/process.hpp"
#include "runtime/program/explore/cluster_file.hpp"
#include "runtime/program/explore/measured_costs.hpp"

namespace sluice {
namespace {

constexpr double kMostBytes = 9007199254740992.0;  // 2^53: whole numbers a double counts exactly
constexpr auto kTensorAxis = static_cast<std::size_t>(CollectiveAxis::kTensor);
constexpr const char* kNumbers = "X[,X...]";

// Numbers from 0 up with commas between them; nothing where the text is anything else.
std::optional<std::vector<double>> numbers_of(const std::string& text) {
  std::vector<double> values;
  for (const std::string& part : parts_of(text)) {
    double& value = values.emplace_back();
    if (!parse_whole(part, value) || !std::isfinite(value) || value < 0) return std::nullopt;
  }
  return values.empty() ? std::nullopt : std::optional(values);
}

std::vector<double> times_of(const char* option, const std::string& text) {
  const auto values = numbers_of(text);
  if (values) return *values;
  throw_usage("option --{}: '{}' is not a list of numbers from 0 up, separated by commas", option,
              text);
}

std::vector<double> bytes_of(const char* option, const std::string& text) {
  const auto values = numbers_of(text);
  const auto countable = [](double value) {
    return value <= kMostBytes && std::floor(value) == value;
  };
  if (values && std::all_of(values->begin(), values->end(), countable)) return *values;
  throw_usage(
      "option --{}: '{}' is not a list of whole numbers of bytes from 0 to 2^53, separated by "
      "commas",
      option, text);
}

double work_of(const StageTimes& times) {
  return times.forward + times.backward_input + times.backward_weight;
}

// One of "FROM-TO:LATENCY[:BANDWIDTH]".
RankLink link_of(const std::string& text) {
  RankLink result;
  LinkCost& link = result.link;
  const std::vector<std::string> ends_and_costs = parts_of(text, ':');
  const std::vector<std::string> ends =
      parts_of(ends_and_costs.empty() ? "" : ends_and_costs[0], '-');
  const std::size_t costs = ends_and_costs.size();
  const bool legal =
      ends.size() == 2 && parse_whole(ends[0], result.from) && parse_whole(ends[1], result.to) &&
      (costs == 2 || costs == 3) && parse_whole(ends_and_costs[1], link.latency) &&
      (costs == 2 || parse_whole(ends_and_costs[2], link.bandwidth)) && link.latency >= 0 &&
      link.bandwidth >= 0 && std::isfinite(link.latency + link.bandwidth);
  if (legal) return result;
  throw_usage(
      "option --links: '{}' is not FROM-TO:LATENCY or FROM-TO:LATENCY:BANDWIDTH, e.g. "
      "3-4:0.5:1e9",
      text);
}

// Of a collective by its kind, from the cost of a link: values go in `ranks` parts. A sum is a
// reduce-scatter and an all-gather.
std::array<LinkCost, kCollectiveKinds> costs_over(const LinkCost& link, int ranks) {
  const double others = ranks - 1;
  const auto over = [&](double messages, double parts) {
    return LinkCost{messages * link.latency, link.bandwidth / parts};
  };
  std::array<LinkCost, kCollectiveKinds> costs;
  const auto set = [&](CollectiveKind kind, const LinkCost& cost) {
    costs[static_cast<std::size_t>(kind)] = cost;
  };
  set(CollectiveKind::kSum, over(2, 2 * others / ranks));
  set(CollectiveKind::kAllGather, over(1, others));
  set(CollectiveKind::kReduceScatter, over(1, others / ranks));
  set(CollectiveKind::kAllToAll, over(1, others / ranks));
  return costs;
}

constexpr RealRange kFromZero = {.low = 0, .high = std::numeric_limits<double>::infinity()};

}  // namespace

std::vector<std::string> parts_of(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (bool more = !text.empty(); more;) {
    const std::size_t end = text.find(separator);
    more = end != std::string_view::npos;
    parts.emplace_back(text.substr(0, end));
    if (more) text.remove_prefix(end + 1);
  }
  return parts;
}

void Costs::add_list(OptionTable& table, List list, const std::string& help) {
  table.add_text(kNames[list], texts_[list], kNumbers, help);
}

void Costs::add_memory(OptionTable& table, const std::string& of) {
  add_list(table, kUntilInput, "kept from F until I or B has ended, " + of);
  add_list(table, kUntilWeight, "kept from F until W or B has ended, " + of);
  add_list(table, kResident, "held all the time (parameters, gradients, optimizer) by one rank");
  table.add_flag(
      "offload", offload_,
      "what is kept of micro-batches that wait longest leaves between F and I or B: half "
      "of what a stage has in flight stays, as with 'sluice train --offload'");
  table.add_real("offload-bandwidth", common_.move_link.bandwidth, kFromZero,
                 "at which it leaves and comes back; 0: without limit");
  table.add_text("memory-limit", limit_, kNumbers,
                 "bytes that a rank may hold at most; without bytes, micro-batches in flight; one "
                 "number for all ranks, or one per rank");
}

void Costs::add_options(OptionTable& table, CostsOf scope) {
  const std::string of = "of one micro-batch on one rank";
  table.heading("Costs");
  add_list(table, kForward,
           of + (scope == CostsOf::kStage ? ", in equal parts on its stages; several: one a stage"
                                          : ""));
  add_list(table, kBackwardInput, "likewise");
  add_list(table, kBackwardWeight, "likewise");
  table.add_text(
      kNames[kOverlap], texts_[kOverlap], "sum|X[,X...]",
      "of a forward and a backward that overlap, " + of + "; sum: they run one after the other");
  table.add_text("profile", profile_, "FILE",
                 "times in milliseconds from what 'sluice train' wrote for --trace");
  table.add_real(
      "input-share", input_share_, {.low = 0, .high = 1},
      "of a whole backward in the profile that is its input half, recomputation included");
  table.add_real("message-time", common_.message, kFromZero, "latency of a message between ranks");
  table.add_real("bandwidth", common_.bandwidth, kFromZero,
                 "bytes per unit of time from one rank to another; 0: without limit");
  table.add_integer("ranks-per-node", common_.ranks_per_node, 0, std::numeric_limits<int>::max(),
                    "0: all ranks share a node");
  table.add_real("node-message-time", common_.between_nodes.latency, kFromZero,
                 "latency of a message between nodes; not given: message-time");
  table.add_real("node-bandwidth", common_.between_nodes.bandwidth, kFromZero,
                 "between two ranks of different nodes; not given: bandwidth");
  table.add_text("cluster", cluster_, "FILE",
                 "links from what 'sluice doctor' wrote for --output, in place of the options "
                 "above and --links; those that it lacks count as its slowest; times are "
                 "milliseconds then, and --ranks is the file's unless given");
  table.add_text("links", links_, "FROM-TO:LATENCY[:BANDWIDTH],...",
                 "links between ranks that differ from all that");
  table.add_choice("queues", common_.queues,
                   {{"none", MessageQueues::kNone},
                    {"nccl", MessageQueues::kPerRank},
                    {"nccl-edges", MessageQueues::kPerPair}},
                   "in-order queues of messages, as NCCL's: one per rank, or per pair of ranks");
  add_list(table, kOutput, "of a stage's output for one micro-batch");
  add_list(table, kOutputGradient, "of what comes back for it; not given: as much");
  add_memory(table, of);
  table.add_integer("tensor", tensor_, 1, kMaxInt,
                    "ranks that share each stage, with --profile: each computes its part of what "
                    "one rank was measured to compute, and makes collectives; auto: those of "
                    "the profile, else of --cluster",
                    "auto");
  table.add_real("tensor-time", tensor_link_.latency, kFromZero,
                 "latency between these ranks; not given: message-time");
  table.add_real("tensor-bandwidth", tensor_link_.bandwidth, kFromZero,
                 "between two of them; not given: bandwidth");
  add_list(table, kReduce, "sum of the gradients of one rank over replicas");
  add_list(table, kReduced, "that one replica moves for it; added to reduce-time");
  table.add_real("reduce-bandwidth", common_.reduce_link.bandwidth, kFromZero,
                 "for reduce-bytes; 0: without limit");
  table.add_choice("shard-gather", common_.gather,
                   {{"none", Gather::kNever}, {"use", Gather::kPerUse}, {"step", Gather::kPerStep}},
                   "when replicas gather the parameters of which they have parts, as with 'sluice "
                   "train --shard parameters'");
  add_list(table, kGathered,
           "that one replica gets then of one rank's parameters, at reduce-bandwidth");
  table.add_flag("reduce-overlap", common_.reduce_overlap,
                 "reduce a stage concurrently with compute, once its last W or B has ended");
}

void Costs::resolve(const OptionTable& table, CostsOf scope) {
  scope_ = scope;
  for (std::size_t list = 0; list < kLists; ++list) {
    const bool bytes = list >= kOutput;
    if (bytes && texts_[list].empty()) continue;
    if (list == kOverlap && texts_[list] == "sum") continue;
    values_[list] = (bytes ? bytes_of : times_of)(kNames[list], texts_[list]);
    has_bytes_ = has_bytes_ || bytes;
  }
  for (const std::string& link : parts_of(links_)) common_.links.push_back(link_of(link));
  if (!limit_.empty()) read_memory_limit();
  MeasuredCosts measured;
  if (!profile_.empty()) measured = read_profile(table);
  if (!cluster_.empty()) use_cluster(table);
  share_stages(table, measured);
  LinkCost& between = common_.between_nodes;
  if (!table.given("node-message-time")) between.latency = common_.message;
  if (!table.given("node-bandwidth")) between.bandwidth = common_.bandwidth;
  messages_free_ = common_.message == 0 && between.latency == 0 && common_.links.empty() &&
                   !table.given("message-time") && !(has_bytes_ && common_.bandwidth > 0);
}

MeasuredCosts Costs::read_profile(const OptionTable& table) {
  for (const List list : {kForward, kBackwardInput, kBackwardWeight}) {
    if (!table.given(kNames[list])) continue;
    throw_usage("option --{}: --profile determines it; give one of the two", kNames[list]);
  }
  MeasuredCosts measured = read_measured_costs(profile_, input_share_);
  measured_ = measured.stages;
  layers_ = measured.layers;
  source_ = measured.source;
  if (!table.given("message-time")) common_.message = measured.message;
  return measured;
}

void Costs::use_cluster(const OptionTable& table) {
  for (const char* name : {"message-time", "bandwidth", "ranks-per-node", "node-message-time",
                           "node-bandwidth", "links", "tensor-time", "tensor-bandwidth"}) {
    if (!table.given(name)) continue;
    throw_usage("option --{}: --cluster determines it; give one of the two", name);
  }
  const Cluster cluster = read_cluster(cluster_);
  PipelineLinks links = pipeline_links(cluster);
  cluster_ranks_ = cluster.pipeline;
  cluster_tensor_ = cluster.tensor;
  common_.collective_costs[kTensorAxis] = links.collectives;
  common_.message = links.slowest.latency;
  common_.bandwidth = links.slowest.bandwidth;
  common_.links = std::move(links.links);
  if (!table.given("reduce-bandwidth")) common_.reduce_link.bandwidth = links.replicas.bandwidth;
  if (!source_.empty()) source_ += "; ";
  source_ += fmt::format("{}: {} measured links of a pipeline of {}, in milliseconds", cluster_,
                         common_.links.size(), cluster.pipeline);
}

void Costs::require_tensor_ranks(const MeasuredCosts& measured) const {
  const int shards = measured.tensor_shards;
  if (profile_.empty()) {
    throw_usage(
        "option --tensor: {}{}: what ranks exchange that share a stage is known of a --profile "
        "alone; give one, or --tensor 1",
        tensor_, cluster_.empty() ? "" : fmt::format(", of '{}'", cluster_));
  }
  if (measured.collectives.empty()) {
    throw_usage(
        "option --tensor: {}: '{}' does not say what ranks exchange that share a stage; legal: 1, "
        "or what this version of 'sluice train' writes of a model that can have tensor shards",
        tensor_, profile_);
  }
  if (measured.tensor_ranks != 1 && measured.tensor_ranks != tensor_) {
    throw_usage(
        "option --tensor: {}: '{}' was measured with {} tensor ranks; legal: {}, or a "
        "profile of one",
        tensor_, profile_, measured.tensor_ranks, measured.tensor_ranks);
  }
  if (shards > 1 &&
      (shards % tensor_ != 0 || !std::has_single_bit(static_cast<unsigned>(shards / tensor_)))) {
    throw_usage(
        "option --tensor: {}: the model of '{}' has {} tensor shards; legal: 1, or {} divided by a "
        "power of two",
        tensor_, profile_, shards, shards);
  }
  if (!cluster_.empty() && cluster_tensor_ != tensor_) {
    throw_usage(
        "option --cluster: '{}' was written for {} tensor rank{}, the schedule has {}; start "
        "'sluice doctor --tensor {} --output FILE' on the cluster",
        cluster_, cluster_tensor_, cluster_tensor_ == 1 ? "" : "s", tensor_, tensor_);
  }
}

void Costs::share_stages(const OptionTable& table, const MeasuredCosts& measured) {
  if (tensor_ == 0) tensor_ = measured.tensor_ranks > 1 ? measured.tensor_ranks : cluster_tensor_;
  if (tensor_ == 1 && measured.tensor_ranks <= 1) {
    for (const char* name : {"tensor-time", "tensor-bandwidth"}) {
      if (table.given(name)) throw_usage("option --{}: without tensor ranks; legal: none", name);
    }
    return;
  }
  require_tensor_ranks(measured);
  if (cluster_.empty()) {
    LinkCost link = tensor_link_;
    if (!table.given("tensor-time")) link.latency = common_.message;
    if (!table.given("tensor-bandwidth")) link.bandwidth = common_.bandwidth;
    common_.collective_costs[kTensorAxis] = costs_over(link, tensor_);
  }
  SimulationTimes alone;
  alone.stages = measured.layers;
  alone.collective_costs = common_.collective_costs;
  tensor_costs_.ranks = tensor_;
  for (StageCollectives each : measured.collectives) {
    for (auto* list : {&each.forward, &each.backward_input, &each.backward_weight}) {
      for (PlannedCollective& call : *list) {
        if (call.kind == CollectiveKind::kAllGather) call.bytes /= static_cast<unsigned>(tensor_);
        tensor_costs_.calls += 1;
        tensor_costs_.bytes += static_cast<double>(call.bytes);
      }
    }
    alone.collectives.push_back(std::move(each));
  }
  for (StageTimes& each : alone.stages) {
    for (double* time : {&each.forward, &each.backward_input, &each.backward_weight}) {
      *time /= tensor_;
    }
  }
  const int layers = static_cast<int>(alone.stages.size());
  const SimulationTimes shared = recut(alone, layers, layers);  // with what collectives cost
  for (std::size_t i = 0; i < shared.stages.size(); ++i) {
    tensor_costs_.time += work_of(shared.stages[i]) - work_of(alone.stages[i]);
  }
  if (measured.tensor_ranks > 1) return;  // its times have them
  layers_ = shared.stages;
  measured_ = join_layers(shared, measured.first_layer).stages;
}

void Costs::read_memory_limit() {
  if (has_bytes_) {
    for (const double limit : bytes_of("memory-limit", limit_)) {
      byte_limit_.push_back(std::llround(limit));
    }
    return;
  }
  const auto limits = numbers_of(limit_);
  if (!limits || *std::min_element(limits->begin(), limits->end()) < 1) {
    throw_usage(
        "option --memory-limit: '{}' is not a number from 1 up, or several, separated by commas; "
        "without bytes of activations they count micro-batches in flight",
        limit_);
  }
  in_flight_limit_ = *limits;
}

void Costs::require_limits_of(int ranks) const {
  const std::size_t limits = std::max(byte_limit_.size(), in_flight_limit_.size());
  if (limits <= 1 || static_cast<std::int64_t>(limits) == ranks) return;
  throw_usage("option --memory-limit: {} numbers; legal is one number, or {} of them, one per rank",
              limits, ranks);
}

const std::vector<std::int64_t>& Costs::byte_limit(int ranks) const {
  require_limits_of(ranks);
  return byte_limit_;
}

const std::vector<double>& Costs::in_flight_limit(int ranks) const {
  require_limits_of(ranks);
  return in_flight_limit_;
}

SimulationTimes Costs::of_pieces(int pieces, double parts) const {
  std::size_t entries = 1;
  for (std::size_t list = 0; list < kLists; ++list) {
    const std::size_t size = values_[list].size();
    if (size > 1 && static_cast<std::int64_t>(size) != pieces) {
      throw_usage("option --{}: {} numbers; legal is one number, or {} of them, one per {}",
                  kNames[list], size, pieces,
                  scope_ == CostsOf::kStage ? "stage" : "rank's share of the model");
    }
    entries = std::max(entries, size);
  }
  SimulationTimes times = common_;
  for (std::size_t i = 0; i < entries; ++i) {
    const auto at = [&](List list) {
      const std::vector<double>& values = values_[list];
      if (values.size() != 1) return values.empty() ? 0 : values[i];
      return list == kOutput || list == kOutputGradient ? values[0] : values[0] / parts;
    };
    const auto bytes_at = [&](List list) { return std::int64_t{std::llround(at(list))}; };
    times.stages.push_back({.forward = at(kForward),
                            .backward_input = at(kBackwardInput),
                            .backward_weight = at(kBackwardWeight),
                            .reduce = at(kReduce),
                            .overlap = values_[kOverlap].empty() ? -1 : at(kOverlap)});
    if (!has_bytes_) continue;
    times.bytes.push_back(
        {.until_input = bytes_at(kUntilInput),
         .until_weight = bytes_at(kUntilWeight),
         .output = bytes_at(kOutput),
         .output_gradient = values_[kOutputGradient].empty() ? -1 : bytes_at(kOutputGradient),
         .resident = bytes_at(kResident),
         .reduced = bytes_at(kReduced),
         .gathered = bytes_at(kGathered)});
  }
  return times;
}

void Costs::require_cluster_of(int ranks) const {
  if (!cluster_ranks_ || *cluster_ranks_ == ranks) return;
  throw_usage(
      "option --cluster: '{}' has the links of a pipeline of {} ranks, the schedule has {}; start "
      "'sluice doctor --pipeline {} --output FILE' on the cluster",
      cluster_, *cluster_ranks_, ranks, ranks);
}

void Costs::resolve_ranks(const OptionTable& table, int& ranks) const {
  if (cluster_ranks_ && !table.given("ranks")) ranks = *cluster_ranks_;
  require_cluster_of(ranks);
}

SimulationTimes Costs::with(const std::vector<StageTimes>& measured, SimulationTimes times) {
  std::vector<StageTimes> stages = measured;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const StageTimes& given = times.stages[i % times.stages.size()];
    stages[i].reduce = given.reduce;
    stages[i].overlap = given.overlap;
  }
  times.stages = std::move(stages);
  return times;
}

SimulationTimes Costs::times(const Placement& placement,
                             const std::vector<int>& first_layer) const {
  const int ranks = placement.ranks(), stages = placement.stages();
  require_cluster_of(ranks);
  SimulationTimes times = scope_ == CostsOf::kRankShare
                              ? recut(of_pieces(ranks, 1), ranks, stages)
                              : of_pieces(stages, static_cast<double>(stages) / ranks);
  if (measured_.empty()) return times;
  SimulationTimes measured;
  measured.stages = measured_;
  if (!layers_.empty()) {
    measured.stages = layers_;
    const bool fits =
        !first_layer.empty() && first_layer.back() == static_cast<int>(layers_.size());
    if (fits) return with(join_layers(measured, first_layer).stages, std::move(times));
    if (static_cast<int>(measured_.size()) == stages) return with(measured_, std::move(times));
    return with(join_layers(measured, cut_layers(measured, placement)).stages, std::move(times));
  }
  measured = recut(measured, static_cast<int>(measured_.size()), stages);
  return with(measured.stages, std::move(times));
}

SimulationTimes Costs::of_shares(int ranks) const { return times(Placement::linear(ranks)); }

SimulationTimes Costs::of_layers(int ranks, int layers) const {
  require_cluster_of(ranks);
  SimulationTimes times = of_pieces(layers, 1);
  if (times.stages.size() == 1) {
    times.stages.assign(static_cast<std::size_t>(layers), times.stages.front());
  }
  if (measured_.empty()) return times;
  SimulationTimes measured;
  measured.stages = layers_.empty() ? measured_ : layers_;
  measured = recut(measured, static_cast<int>(measured.stages.size()), layers);
  return with(measured.stages, std::move(times));
}

std::vector<std::string> Costs::remarks(const Placement& placement) const {
  std::vector<std::string> remarks;
  const int layers = measured_layers(), stages = placement.stages();
  if (layers > 0 && stages > layers) {
    remarks.push_back(fmt::format(
        "the profile's model has {} layers, embedding and head included, so {} of {} stages are "
        "empty: they compute nothing and cost messages",
        layers, stages - layers, stages));
  }
  if (messages_free_ && placement.ranks() > 1) {
    remarks.emplace_back(
        "messages take no time here, which favours many chunks: --message-time, --bandwidth with "
        "--message-bytes, --cluster or a --profile that has messages says what they take");
  }
  if (tensor_costs_.ranks > 1 && tensor_costs_.time == 0) {
    remarks.emplace_back(
        "collectives of tensor ranks take no time here: --tensor-time and --tensor-bandwidth, or a "
        "--cluster of 'sluice doctor --tensor', say what they take");
  }
  return remarks;
}

}  // namespace sluice
