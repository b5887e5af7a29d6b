#include "runtime/pipeline/build_layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/generate.hpp>
#include <sluice/simulate.hpp>

#include "comm/group/transport.hpp"
#include "runtime/data/batch_shape.hpp"
#include "runtime/job/job_groups.hpp"
#include "runtime/pipeline/memory_plan.hpp"
#include "runtime/pipeline/transport_plan.hpp"

namespace sluice {
namespace {

using Json = nlohmann::json;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

// What a stage tells every rank about itself.
struct StageReport {
  StageEntry entry;
  // [size] outputs, and which of the stage's inputs want gradients.
  std::vector<std::vector<TensorSpec>> outputs;
  std::vector<std::vector<bool>> input_gradients;
};

bool wants_gradient_by_default(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBf16;
}

Json to_json(const TensorSpec& spec) {
  Json dims = Json::array();
  for (int d = 0; d < spec.shape.rank(); ++d) dims.push_back(spec.shape[d]);
  return {{"dtype", static_cast<int>(spec.dtype)}, {"shape", dims}};
}

TensorSpec spec_from(const Json& json) {
  const auto dims = json.at("shape").get<std::vector<std::int64_t>>();
  return {static_cast<DType>(json.at("dtype").get<int>()), Shape(std::span(dims))};
}

std::string to_text(const StageReport& report) {
  Json json;
  for (const ParameterEntry& p : report.entry.parameters) {
    json["parameters"].push_back({{"name", p.name}, {"elements", p.elements}, {"tied", p.tied}});
  }
  json["state_bytes"] = report.entry.state_bytes;
  json["split_bytes"] = report.entry.split_bytes;
  json["shared_gradient_bytes"] = report.entry.shared_gradient_bytes;
  json["workspace_bytes"] = report.entry.workspace_bytes;
  json["copy_bytes"] = report.entry.copy_bytes;
  json["operator_bytes"] = report.entry.operator_bytes;
  json["table_bytes"] = report.entry.table_bytes;
  json["own_memory"] = report.entry.own_memory;
  json["note"] = report.entry.note;
  for (std::size_t i = 0; i < report.outputs.size(); ++i) {
    Json outputs = Json::array();
    for (const TensorSpec& spec : report.outputs[i]) outputs.push_back(to_json(spec));
    json["sizes"].push_back({{"outputs", outputs}, {"gradients", report.input_gradients[i]}});
  }
  return json.dump();
}

StageReport report_from(const std::string& text) {
  const Json json = Json::parse(text);
  StageReport report;
  if (json.contains("parameters")) {
    for (const Json& p : json["parameters"]) {
      report.entry.parameters.push_back({p.at("name").get<std::string>(),
                                         p.at("elements").get<std::int64_t>(),
                                         p.at("tied").get<bool>()});
    }
  }
  report.entry.state_bytes = json.at("state_bytes").get<std::size_t>();
  report.entry.split_bytes = json.at("split_bytes").get<std::size_t>();
  report.entry.shared_gradient_bytes = json.at("shared_gradient_bytes").get<std::size_t>();
  report.entry.workspace_bytes = json.at("workspace_bytes").get<std::size_t>();
  report.entry.copy_bytes = json.at("copy_bytes").get<std::size_t>();
  report.entry.operator_bytes = json.at("operator_bytes").get<std::size_t>();
  report.entry.table_bytes = json.at("table_bytes").get<std::size_t>();
  report.entry.own_memory = json.at("own_memory").get<bool>();
  report.entry.note = json.at("note").get<std::string>();
  for (const Json& size : json.at("sizes")) {
    std::vector<TensorSpec> outputs;
    for (const Json& spec : size.at("outputs")) outputs.push_back(spec_from(spec));
    report.outputs.push_back(std::move(outputs));
    report.input_gradients.push_back(size.at("gradients").get<std::vector<bool>>());
  }
  return report;
}

// Buffers are sized for the largest micro-batch, so smaller ones may not ask for more.
void require_like(const std::vector<TensorSpec>& largest, const std::vector<TensorSpec>& outputs,
                  int index) {
  bool fits = largest.size() == outputs.size();
  for (std::size_t i = 0; fits && i < outputs.size(); ++i) {
    fits = outputs[i].dtype == largest[i].dtype &&
           outputs[i].shape.rank() == largest[i].shape.rank() &&
           outputs[i].bytes() <= largest[i].bytes();
  }
  if (fits) return;
  throw Error(ErrorCode::kUsage,
              fmt::format("stage {} describes other outputs for a smaller micro-batch than for the "
                          "largest; their number, dtypes and ranks must agree and their bytes may "
                          "not grow",
                          index));
}

// Describes `stage` for every size, given its inputs.
StageReport report_of(Stage& stage, int index, const std::vector<std::vector<TensorSpec>>& inputs,
                      ComputeContext& compute) {
  StageReport report;
  for (const auto& specs : inputs) {
    const StageDescription description = stage.describe(specs, compute);
    if (description.outputs.empty() || description.outputs.size() > 65535) {
      throw Error(ErrorCode::kUsage, fmt::format("stage {} describes {} outputs; it needs at "
                                                 "least one",
                                                 index, description.outputs.size()));
    }
    for (const TensorSpec& spec : description.outputs) {
      bool legal = spec.shape.rank() <= kMaxDims;
      for (int d = 0; d < spec.shape.rank(); ++d) {
        legal = legal && spec.shape[d] >= 0 &&
                spec.shape[d] <= std::numeric_limits<std::int32_t>::max();
      }
      if (!legal) {
        throw Error(ErrorCode::kUsage,
                    fmt::format("stage {} describes an output of shape {}; at most {} dimensions, "
                                "each from 0 to 2147483647",
                                index, to_string(spec.shape), kMaxDims));
      }
    }
    if (!report.outputs.empty()) require_like(report.outputs.front(), description.outputs, index);
    std::vector<bool> gradients = description.input_gradients;
    if (gradients.empty()) {
      for (const TensorSpec& spec : specs)
        gradients.push_back(wants_gradient_by_default(spec.dtype));
    }
    if (gradients.size() != specs.size()) {
      throw Error(ErrorCode::kUsage, fmt::format("stage {} says for {} inputs whether they want "
                                                 "gradients, but has {}",
                                                 index, gradients.size(), specs.size()));
    }
    report.outputs.push_back(description.outputs);
    report.input_gradients.push_back(std::move(gradients));
    StageEntry& entry = report.entry;
    const auto raise = [](std::size_t& to, std::size_t bytes) { to = std::max(to, bytes); };
    raise(entry.state_bytes,
          description.state_bytes_until_input + description.state_bytes_until_weight);
    raise(entry.split_bytes, description.gradient_bytes_until_weight);
    raise(entry.shared_gradient_bytes, description.shared_gradient_bytes);
    raise(entry.workspace_bytes, description.workspace_bytes);
    raise(entry.copy_bytes, description.copy_bytes);
    raise(entry.operator_bytes, description.operator_bytes);
    raise(entry.table_bytes, description.table_bytes);
    entry.own_memory = entry.own_memory || description.own_memory;
    if (&specs == &inputs.front()) entry.note = description.note;
  }
  if (ParameterSet* parameters = stage.parameters()) {
    for (const Parameter* p : parameters->all()) {
      report.entry.parameters.push_back({p->name, p->shape.elements(), p->tied});
    }
  }
  return report;
}

std::vector<std::int64_t> distinct_sizes(const std::vector<std::vector<SampleRange>>& ranges) {
  std::set<std::int64_t, std::greater<>> sizes;
  for (const auto& list : ranges) {
    for (const SampleRange& range : list) sizes.insert(range.count);
  }
  return {sizes.begin(), sizes.end()};
}

// A replica's share of an evaluation: contiguous, in micro-batches of `size`, the last one smaller.
std::vector<SampleRange> evaluation_ranges(std::int64_t samples, int replicas, int replica,
                                           std::int64_t size) {
  const std::int64_t share = samples / replicas;
  const std::int64_t extra = samples % replicas;
  std::int64_t first = share * replica + std::min<std::int64_t>(replica, extra);
  std::int64_t left = share + (replica < extra ? 1 : 0);
  std::vector<SampleRange> ranges;
  constexpr std::int64_t kMost = 1'000'000;
  if (left / size > kMost) {
    throw Error(ErrorCode::kUsage,
                fmt::format("an evaluation of {} samples falls into more than {} micro-batches of "
                            "{}; choose at most {} samples (--validation-samples)",
                            samples, kMost, size, kMost * size * replicas));
  }
  for (; left > 0; left -= ranges.back().count) {
    ranges.push_back({first, std::min(size, left)});
    first += ranges.back().count;
  }
  return ranges;
}

// A given order must be one for this pipeline.
void require_fitting(const Schedule& order, const ScheduleShape& shape) {
  if (order.placement.ranks() != shape.ranks) {
    throw Error(ErrorCode::kUsage, fmt::format("schedule '{}' is for {} ranks, the pipeline has {}",
                                               order.name, order.placement.ranks(), shape.ranks));
  }
  if (order.micro_batches != shape.micro_batches) {
    throw Error(ErrorCode::kUsage,
                fmt::format("schedule '{}' is for {} micro-batches, the step has {}", order.name,
                            order.micro_batches, shape.micro_batches));
  }
  if (order.forward_only) {
    throw Error(ErrorCode::kUsage,
                fmt::format("schedule '{}' has no backward actions, so nothing can be trained "
                            "with it",
                            order.name));
  }
}

Schedule order_of(const PipelineOptions& options, const ScheduleShape& shape) {
  try {
    if (options.order.given == nullptr) {
      const std::string name = options.training.inference ? "forward-only" : options.order.schedule;
      require_plannable(stages_of(name, shape), shape.micro_batches);
      return generate(name, shape);
    }
    require_plannable(options.order.given->placement.stages(), shape.micro_batches);
    if (options.training.inference) {
      return generate_forward_only(options.order.given->placement, shape.micro_batches);
    }
  } catch (const std::invalid_argument& error) {
    throw Error(ErrorCode::kUsage, error.what());
  }
  require_fitting(*options.order.given, shape);
  return *options.order.given;
}

Plan evaluation_plan(const Placement& placement, std::size_t micro_batches,
                     const TransportNeeds& transport) {
  return plan_for(generate_forward_only(placement, static_cast<int>(micro_batches)),
                  {.reduce_grad = false, .tied = {}}, transport);
}

// Ties by name: every parameter with several uses, each of which must be declared tied.
std::vector<TiedParameter> find_ties(const std::vector<StageEntry>& stages) {
  std::map<std::string, TiedParameter> uses;
  std::vector<std::string> order;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    for (std::size_t i = 0; i < stages[s].parameters.size(); ++i) {
      const ParameterEntry& entry = stages[s].parameters[i];
      TiedParameter& tie = uses[entry.name];
      if (tie.uses.empty()) order.push_back(entry.name);
      tie.name = entry.name;
      tie.uses.push_back({static_cast<int>(s), static_cast<int>(i)});
      const TiedUse& first = tie.uses.front();
      const ParameterEntry& owner = stages[at(first.stage)].parameters[at(first.index)];
      if (tie.uses.size() > 1 && !(entry.tied && owner.tied)) {
        throw Error(ErrorCode::kUsage,
                    fmt::format("parameter '{}' is owned by stage {} and by stage {}; either one "
                                "must own it or both must declare it tied",
                                entry.name, first.stage, s));
      }
      if (entry.elements != owner.elements) {
        throw Error(
            ErrorCode::kUsage,
            fmt::format("tied parameter '{}' has {} elements on stage {} and {} on stage {}",
                        entry.name, owner.elements, first.stage, entry.elements, s));
      }
    }
  }
  std::vector<TiedParameter> ties;
  for (const std::string& name : order) {
    if (uses[name].uses.size() > 1) ties.push_back(uses[name]);
  }
  return ties;
}

}  // namespace

BuiltLayout build_layout(JobGroups& groups, const PipelineOptions& options, ComputeContext& compute,
                         const StageFactory& make_stage, const DataSource& source) {
  BuiltLayout built;
  PipelineLayout& layout = built.layout;
  layout.topology = groups.topology;
  layout.rank = groups.rank;
  layout.replica = groups.replica;
  const int replicas = layout.topology.replicas;

  BatchShape batch{.batch_size = options.shape.batch_size,
                   .micro_batch_size = options.shape.micro_batch_size,
                   .micro_batches = options.shape.micro_batches,
                   .replicas = replicas};
  if (batch.batch_size == 0) {
    // micro_batches_of() refuses what does not fit.
    if (__builtin_mul_overflow(batch.micro_batch_size, std::int64_t{batch.micro_batches} * replicas,
                               &batch.batch_size)) {
      batch.batch_size = std::numeric_limits<std::int64_t>::max();
    }
  }
  std::vector<std::vector<SampleRange>> ranges;
  for (int r = 0; r < replicas; ++r) {
    ranges.push_back(micro_batches_of(batch, r));
    if (r == layout.replica) layout.micro_batches = ranges.back();
    for (const std::int64_t samples : options.training.evaluations) {
      ranges.push_back(evaluation_ranges(samples, replicas, r, options.shape.micro_batch_size));
      if (r == layout.replica) {
        layout.evaluations.push_back(
            {.samples = samples, .micro_batches = ranges.back(), .round = {}, .rest = {}});
      }
    }
  }

  if (options.devices.bucket_bytes == 0) {
    throw Error(ErrorCode::kUsage,
                "buckets of 0 bytes cannot hold a gradient; the nearest legal value is 1");
  }
  const ScheduleShape shape{layout.topology.pipeline, options.shape.micro_batches,
                            options.order.chunks};
  layout.order = order_of(options, shape);
  const Placement& placement = layout.order.placement;
  layout.train.placement = placement;
  const int stages = placement.stages();

  const std::vector<std::int64_t> sizes = distinct_sizes(ranges);
  std::vector<std::vector<std::vector<EdgeTensor>>> edges(sizes.size());
  std::vector<std::vector<TensorSpec>> inputs;  // [size] of the stage at hand
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    inputs.push_back(source.input_specs(sizes[i]));
    edges[i].resize(at(stages) + 1);
  }
  for (int s = 0; s < stages; ++s) {
    std::string text;
    if (placement.rank_of(s) == layout.rank) {
      built.stages.push_back(make_stage(s, stages));
      if (built.stages.back() == nullptr) {
        throw Error(ErrorCode::kUsage, fmt::format("the factory made nothing for stage {}", s));
      }
      text = to_text(report_of(*built.stages.back(), s, inputs, compute));
    }
    const StageReport report =
        report_from(groups.in_pipeline->broadcast_string(text, placement.rank_of(s)));
    layout.stages.push_back(report.entry);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      for (std::size_t t = 0; t < inputs[i].size(); ++t) {
        edges[i][at(s)].push_back({inputs[i][t], s > 0 && report.input_gradients[i][t]});
      }
      inputs[i] = report.outputs[i];
      if (s + 1 == stages) {
        for (const TensorSpec& spec : inputs[i]) edges[i][at(stages)].push_back({spec, true});
      }
    }
  }
  layout.edges = EdgeTable(sizes, std::move(edges));
  layout.tied = find_ties(layout.stages);

  LowerOptions training{.reduce_grad = !options.training.inference, .tied = {}};
  if (!options.training.inference) {
    for (const TiedParameter& tie : layout.tied) {
      TiedStages group;
      for (const TiedUse& use : tie.uses) {
        if (group.stages.empty() || group.stages.back() != use.stage)
          group.stages.push_back(use.stage);
      }
      training.tied.push_back(std::move(group));
    }
  }
  layout.devices = groups.pipeline_devices();
  const LinkQuestion question{.wanted = options.devices.transport,
                              .no_device_messages = groups.no_device_messages,
                              .nccl_refusal = groups.no_nccl,
                              .devices = layout.devices};
  layout.links = choose_links(placement, question);
  for (TiedParameter& tie : layout.tied) {
    const int owner = placement.rank_of(tie.uses.front().stage);
    for (const TiedUse& use : tie.uses) {
      tie.links.push_back(choose_link(owner, placement.rank_of(use.stage), question));
    }
  }
  for (int rank = 0; rank < layout.topology.pipeline; ++rank) {
    layout.sums.push_back(choose_sum(rank, options.training.inference ? 1 : replicas, question));
  }
  layout.all_reduce = options.devices.all_reduce;
  layout.cuda_graphs = options.devices.cuda_graphs;
  for (int s = 0; s < stages; ++s) {
    training.overlapped_grad_sums.push_back(layout.sums_by_nccl(placement.rank_of(s)));
  }
  // The order that NCCL's queues need suits tagged messages too.
  const TransportNeeds& transport =
      needs_of(uses_nccl(layout.links) ? "nccl" : groups.messages->name());
  layout.train = plan_for(layout.order, training, transport);
  for (EvaluationPlan& evaluation : layout.evaluations) {
    const std::size_t count = evaluation.micro_batches.size();
    const std::size_t round = std::min(count, EvaluationPlan::kRoundMicroBatches);
    if (round > 0) evaluation.round = evaluation_plan(placement, round, transport);
    if (round > 0 && count % round > 0) {
      evaluation.rest = evaluation_plan(placement, count % round, transport);
    }
  }
  layout.bubble_ideal =
      simulate(layout.order, {.stages = {StageTimes{}}, .message = 0}).bubble_makespan;
  for (int rank = 0; rank < layout.topology.pipeline; ++rank) {
    const MemoryPlan planned = plan_memory(layout, options, source, rank);
    layout.memory.push_back(planned.memory);
    if (rank == layout.rank) layout.operator_bytes = planned.operator_bytes;
  }
  require_memory(groups.devices, layout);
  return built;
}

}  // namespace sluice
