#include "runtime/program/train/schedule_choice.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include <sluice/error.hpp>
#include <sluice/schedule_file.hpp>
#include <sluice/search.hpp>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/layout/division.hpp"
#include "runtime/program/explore/schedule_costs.hpp"
#include "runtime/program/options/option_table.hpp"

namespace sluice {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kSearchEffort = 5'000'000;  // of annealing, a quarter of the default

std::vector<double> layer_work(const TransformerConfig& model) {
  std::vector<double> work;
  for (const StageTimes& times : layer_times(model)) {
    work.push_back(times.forward + times.backward_input + times.backward_weight);
  }
  return work;
}

// Of a replica, in a step.
int micro_batches_of(const PipelineOptions::Shape& shape) {
  return shape.micro_batches * shares_of(shape.virtual_replicas, shape.replicas, kVirtualReplicas);
}

// What one tensor rank hands on for a micro-batch.
std::int64_t message_bytes(const TrainOptions& options) {
  const TransformerConfig& model = options.model;
  const PipelineOptions::Shape& shape = options.pipeline.shape;
  const std::int64_t bytes = static_cast<std::int64_t>(size_of(model.stream_precision)) *
                             shape.micro_batch_size * model.context * model.width;
  const bool dealt = shape.sequence_parallel && model.context % shape.tensor_shards == 0;
  return dealt ? bytes / shape.tensor : bytes;
}

// The files' costs, as `sluice schedule auto` counts them. Requires: some are given.
void resolve_costs(const TrainOptions& options, Costs& costs) {
  OptionTable table("", "");
  costs.add_options(table, CostsOf::kRankShare);
  std::vector<std::string> words = {"--profile", options.profile, "--tensor",
                                    std::to_string(options.pipeline.shape.tensor)};
  if (!options.cluster.empty()) {
    words.insert(words.end(), {"--cluster", options.cluster, "--message-bytes",
                               std::to_string(message_bytes(options))});
  }
  table.parse(words);
  costs.resolve(table, CostsOf::kRankShare);
  const int layers = options.model.layers + 2;
  if (costs.measured_layers() == layers) return;
  throw_usage(
      "option --profile: '{}' has {} layers, embedding and head included, this model has {}; legal "
      "is what a training of this model wrote for --trace",
      options.profile, costs.measured_layers(), layers);
}

DeviceKind likely_kind(const TrainOptions& options) {
  using Kind = DeviceChoice::Kind;
  const std::vector<DeviceChoice>& choices = options.pipeline.devices.choices;
  const Kind first = choices.empty() ? Kind::kCpu : choices.front().kind;
  const bool gpu = first == Kind::kAuto ? device_count(DeviceKind::kCuda) > 0 : first != Kind::kCpu;
  return gpu ? DeviceKind::kCuda : DeviceKind::kCpu;
}

// [layer] What one rank keeps of a micro-batch between forward and backward.
std::vector<StageBytes> kept_by_layers(const TrainOptions& options) {
  const TransformerConfig& model = options.model;
  ComputeContext compute(Device{}, 1);
  Partition alone;  // a stage of each layer
  for (int layer = 0; layer <= model.layers + 2; ++layer) alone.first.push_back(layer);
  const Transformer layers(model);
  std::vector<TensorSpec> inputs = {
      {DType::kI32, Shape{options.pipeline.shape.micro_batch_size, model.context}}};
  std::vector<StageBytes> all;
  for (int layer = 0; layer < alone.stages(); ++layer) {
    StageDescription description = layers.stage_of(alone, layer)->describe(inputs, compute);
    all.push_back(
        {.until_input = static_cast<std::int64_t>(description.state_bytes_until_input),
         .until_weight = static_cast<std::int64_t>(description.state_bytes_until_weight)});
    inputs = std::move(description.outputs);
  }
  return all;
}

// Moves in the units of the request: milliseconds, of the part of the layers that a rank has; or
// operations of a whole layer for a sample.
void add_moves(const TrainOptions& options, bool milliseconds, SearchRequest& request) {
  const Rates rates = estimated_rates(options.pipeline, likely_kind(options));
  const PipelineOptions::Shape& shape = options.pipeline.shape;
  const std::int64_t divisor = milliseconds ? shape.tensor : shape.micro_batch_size;
  request.offload = true;
  request.model.move_link.bandwidth = rates.bytes / (milliseconds ? 1000 : rates.operations);
  const std::vector<StageBytes> kept = kept_by_layers(options);
  const StageBytes message =
      request.model.bytes.empty() ? StageBytes{} : request.model.bytes.front();
  request.model.bytes.assign(kept.size(), message);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    request.model.bytes[i].until_input = kept[i].until_input / divisor;
    request.model.bytes[i].until_weight = kept[i].until_weight / divisor;
  }
}

SearchRequest request_of(const TrainOptions& options, int ranks, const Costs* costs) {
  SearchRequest request;
  request.ranks = ranks;
  request.micro_batches = micro_batches_of(options.pipeline.shape);
  if (costs != nullptr) {
    request.model = costs->of_layers(ranks, costs->measured_layers());
  } else {
    request.model.stages = layer_times(options.model);
  }
  request.whole_layers = true;
  if (options.pipeline.order.chunks > 0) request.chunks = {options.pipeline.order.chunks};
  request.in_flight_limit = {static_cast<double>(ranks)};
  request.effort = kSearchEffort;
  // With --recompute auto what leaves is chosen after the schedule.
  if (options.pipeline.offload.activations != PipelineOptions::Offload::To::kNowhere &&
      !options.recompute.automatic) {
    add_moves(options, costs != nullptr, request);
  }
  return request;
}

std::string searched(const TrainOptions& options, int ranks) {
  Costs costs;
  const bool measured = !options.profile.empty();
  if (measured) resolve_costs(options, costs);
  const SearchRequest request = request_of(options, ranks, measured ? &costs : nullptr);
  const SearchResult result = [&] {
    try {
      return search_schedule(request);
    } catch (const Error& error) {
      throw_usage("option --schedule: auto: {}", error.what());
    }
  }();
  std::string source =
      "the matmuls of layers alone; --profile and --cluster say what messages and collectives of "
      "tensor ranks take";
  if (measured) {
    source = costs.source();
    for (const std::string& each : costs.remarks(result.schedule.placement)) source += "; " + each;
  }
  if (request.offload) {
    source += fmt::format("; moves by an estimate of {:g} GB/s",
                          estimated_rates(options.pipeline, likely_kind(options)).bytes / 1e9);
  }
  const std::string remark = fmt::format(
      "schedule auto: {}, {} placement, {} stages a rank; simulated step {:.1f} % above the lower "
      "bound (a heuristic search, within the micro-batches in flight of 1f1b); by {}",
      result.chosen.origin, result.chosen.placement, result.chosen.chunks, 100 * (result.ratio - 1),
      source);
  return dump_json(Json{{"order", to_schedule_json(result.schedule)},
                        {"first", result.first_layer},
                        {"bubble", result.simulation.bubble_makespan},
                        {"milliseconds", measured ? result.simulation.makespan : 0},
                        {"source", measured ? "the profile" : "layer costs"},
                        {"remark", remark}});
}

// Simulated with the costs of layers: messages take no time.
StepPromise promise_of(const TrainOptions& options, const Schedule& order,
                       const Partition& partition) {
  const SimulationTimes times =
      join_layers({.stages = layer_times(options.model)}, partition.first);
  return {.bubble = simulate(order, times, {.timeline = false}).bubble_makespan,
          .source = "layer costs"};
}

ScheduleChoice search(const TrainOptions& options, int ranks, Collectives& world) {
  std::string text;
  if (world.communicator().rank() == 0) text = searched(options, ranks);
  const Json json = parse_json(world.broadcast_string(text, 0));
  ScheduleChoice choice{.order = std::make_shared<const Schedule>(
                            parse_schedule_json(json.at("order").get<std::string>()).schedule),
                        .partition = {json.at("first").get<std::vector<int>>()},
                        .remark = json.at("remark").get<std::string>()};
  choice.promise = {.bubble = json.at("bubble").get<double>(),
                    .milliseconds = json.at("milliseconds").get<double>(),
                    .source = json.at("source").get<std::string>()};
  return choice;
}

// Once every layer, embedding and head included, has its own stage, more chunks only add stages
// without layers. A schedule's own number of chunks is accepted.
void require_layers_for_chunks(const TrainOptions& options, int ranks) {
  const std::int64_t most =
      std::max(options.model.layers + 2, stages_of(options.pipeline.order.schedule, {ranks, 1}));
  if (std::int64_t{ranks} * options.pipeline.order.chunks <= most) return;
  throw_usage(
      "option --chunks: {} on {} rank{} make {} stages, but --layers {} with "
      "embedding and head fill at most {}; the nearest legal value is {}",
      options.pipeline.order.chunks, ranks, ranks == 1 ? "" : "s",
      std::int64_t{ranks} * options.pipeline.order.chunks, options.model.layers,
      options.model.layers + 2, most / ranks);
}

// The layers of the file's stages where it says them for this model. Else `remark` says why not.
std::optional<Partition> partition_of_file(const TrainOptions& options, std::string& remark) {
  if (!options.made_for || options.made_for->first_layer.empty()) return std::nullopt;
  if (options.partition != "auto") return std::nullopt;
  const std::vector<int>& first = options.made_for->first_layer;
  const int layers = options.model.layers + 2;
  if (first.back() == layers) {
    if (first[1] > 0 && first[first.size() - 2] < layers) return Partition{first};
    throw_usage(
        "option --schedule-file: '{}' leaves its first or last stage without layers, but these "
        "have "
        "the embedding and the head; legal is a first_layer in which both have some",
        options.schedule_file);
  }
  remark = fmt::format(
      "warning: the schedule of '{}' was searched for a model of {} layers, embedding and head "
      "included; this one has {}, so its layers are placed by cost and its promise does not hold",
      options.schedule_file, first.back(), layers);
  return std::nullopt;
}

ScheduleChoice given_order(const TrainOptions& options) {
  ScheduleChoice choice{.order = options.pipeline.order.given};
  const auto partition = partition_of_file(options, choice.remark);
  choice.partition = partition ? *partition
                               : parse_partition(options.partition, layer_work(options.model),
                                                 choice.order->placement.stages());
  if (check(*choice.order)) return choice;  // making the pipeline refuses it
  if (partition && options.made_for->milliseconds) {
    choice.promise = {.bubble = options.made_for->bubble,
                      .milliseconds = options.made_for->makespan,
                      .source = "the schedule file"};
  } else {
    choice.promise = promise_of(options, *choice.order, choice.partition);
  }
  return choice;
}

}  // namespace

std::vector<StageTimes> layer_times(const TransformerConfig& model) {
  const std::vector<double> again = recompute_costs(model);
  std::vector<StageTimes> times;
  for (const double cost : layer_costs(model)) {
    const std::size_t layer = times.size();
    times.push_back(
        {.forward = cost, .backward_input = cost + again[layer], .backward_weight = cost});
    if (again[layer] == 0) continue;  // else a block, after the embedding
    const Recompute kind =
        model.recompute_blocks.empty() ? model.recompute : model.recompute_blocks[layer - 1];
    if (kind == Recompute::kBlock) times.back().recompute = again[layer];
  }
  return times;
}

std::vector<StageCollectives> layer_collectives(const TransformerConfig& model, int shards,
                                                bool deals_positions,
                                                std::vector<TensorSpec> inputs,
                                                ComputeContext& compute) try {
  std::vector<StageCollectives> all;
  // A rank of each shard: what is summed does not depend on their number.
  const int ranks = std::max(shards, 2);
  Partition alone;  // a stage of each layer
  for (int layer = 0; layer <= model.layers + 2; ++layer) alone.first.push_back(layer);
  const Transformer layers(model);
  for (int layer = 0; layer < alone.stages(); ++layer) {
    const auto stage = layers.stage_of(
        alone, layer, {.count = ranks, .first = 0, .local = 1, .deals_positions = deals_positions});
    StageDescription description = stage->describe(inputs, compute);
    StageCollectives& made = all.emplace_back(std::move(description.collectives));
    made.backward_input.insert(made.backward_input.begin(), made.recompute.begin(),
                               made.recompute.end());
    made.recompute.clear();
    for (auto* list : {&made.forward, &made.loss, &made.backward_input, &made.backward_weight}) {
      std::erase_if(*list, [](const PlannedCollective& each) {
        return each.axis != CollectiveAxis::kTensor;
      });
      for (PlannedCollective& each : *list) {
        if (each.kind == CollectiveKind::kAllGather) each.bytes *= static_cast<unsigned>(ranks);
      }
    }
    inputs = std::move(description.outputs);
  }
  return all;
} catch (const Error& error) {
  if (error.code() != ErrorCode::kUsage) throw;
  return {};
}

ScheduleChoice choose_schedule(const TrainOptions& options, int ranks, Collectives& world) {
  if (options.pipeline.order.given == nullptr && options.pipeline.order.schedule == "auto") {
    return search(options, ranks, world);
  }
  if (options.pipeline.order.given != nullptr) return given_order(options);
  const int stages = stages_of(options.pipeline.order.schedule,
                               {ranks, std::max(micro_batches_of(options.pipeline.shape), 1),
                                options.pipeline.order.chunks});
  require_layers_for_chunks(options, ranks);
  return {.partition = parse_partition(options.partition, layer_work(options.model), stages)};
}

}  // namespace sluice
