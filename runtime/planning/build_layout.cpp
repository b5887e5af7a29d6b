#include "runtime/planning/build_layout.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <span>
#include <sstream>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/schedule.hpp>
#include <sluice/simulate.hpp>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/group/topology.hpp"
#include "runtime/data/batch_shape.hpp"
#include "runtime/data/sample_specs.hpp"
#include "runtime/engine/state_store.hpp"
#include "runtime/group/guard.hpp"
#include "runtime/layout/parameter_cut.hpp"
#include "runtime/planning/memory_plan.hpp"
#include "runtime/planning/same_stages.hpp"
#include "runtime/planning/stage_report.hpp"
#include "runtime/planning/transport_plan.hpp"

namespace sluice {
namespace {

// A given order must fit what runs it; JobContext has compared the ranks.
void require_fitting(const Schedule& order, const ScheduleShape& shape) {
  if (order.micro_batches != shape.micro_batches) {
    throw_usage("schedule '{}' is for {} micro-batches, the step has {}", order.name,
                order.micro_batches, shape.micro_batches);
  }
  if (order.forward_only) {
    throw_usage("schedule '{}' has no backward actions, so it cannot train", order.name);
  }
}

Schedule order_of(const PipelineOptions& options, const ScheduleShape& shape) {
  if (options.order.given == nullptr) {
    const std::string name = options.training.inference ? "forward-only" : options.order.schedule;
    require_plannable(stages_of(name, shape), shape.micro_batches);
    return generate(name, shape);
  }
  require_plannable(options.order.given->placement.stages(), shape.micro_batches);
  if (options.training.inference) {
    return generate_forward_only(options.order.given->placement, shape.micro_batches);
  }
  require_fitting(*options.order.given, shape);
  return *options.order.given;
}

// Every parameter with several uses, by name; each use must be declared tied.
std::vector<TiedParameter> find_ties(const std::vector<StageEntry>& stages) {
  std::vector<TiedParameter> ties;  // of all parameters, in order of their first use
  std::map<std::string, std::size_t> index_of;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    for (std::size_t i = 0; i < stages[s].parameters.size(); ++i) {
      const ParameterEntry& entry = stages[s].parameters[i];
      const auto [found, is_new] = index_of.try_emplace(entry.name, ties.size());
      if (is_new) ties.push_back({.name = entry.name, .uses = {}, .routes = {}});
      TiedParameter& tie = ties[found->second];
      tie.uses.push_back({static_cast<int>(s), static_cast<int>(i)});
      const TiedUse& first = tie.uses.front();
      const ParameterEntry& owner = stages[at(first.stage)].parameters[at(first.index)];
      if (!is_new && !(entry.tied && owner.tied)) {
        throw_usage(
            "parameter '{}' is owned by stage {} and by stage {}; either one must own it or both "
            "must declare it tied",
            entry.name, first.stage, s);
      }
      if (!is_new &&
          (entry.use != owner.use || entry.slice != owner.slice || entry.parts != owner.parts)) {
        throw_usage(
            "tied parameter '{}' is {}{} on stage {} and {}{} on stage {}; all uses have one shape "
            "and the same initial values",
            entry.name, owner.use, cut_text(owner), first.stage, entry.use, cut_text(entry), s);
      }
    }
  }
  std::erase_if(ties, [](const TiedParameter& tie) { return tie.uses.size() < 2; });
  return ties;
}

// A save has buffers next to parameters, by name.
void require_own_buffer_names(const std::vector<StageEntry>& stages) {
  std::map<std::string, std::size_t> stage_of;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    for (const ParameterEntry& parameter : stages[s].parameters)
      stage_of.emplace(parameter.name, s);
  }
  for (std::size_t s = 0; s < stages.size(); ++s) {
    for (const ParameterEntry& buffer : stages[s].buffers) {
      const auto [other, is_new] = stage_of.emplace(buffer.name, s);
      if (is_new) continue;
      throw_usage("buffer '{}' of stage {} has a name that stage {} uses too", buffer.name, s,
                  other->second);
    }
  }
}

void require_groups(const PipelineOptions& options, const std::vector<StageEntry>& stages) {
  const std::vector<ParameterGroup>& groups = options.training.groups;
  std::set<const ParameterGroup*> used;
  for (const StageEntry& stage : stages) {
    for (const ParameterEntry& parameter : stage.parameters) {
      used.insert(group_of(groups, parameter.name));
    }
  }
  for (const ParameterGroup& group : groups) {
    if (used.contains(&group)) continue;
    throw_usage("the group of parameters '{}' has none that an earlier group does not have",
                group.names);
  }
}

// Micro-batches of a step of one replica; one that is too large to plan where it has no int.
int micro_batches_of_replica(const PipelineOptions& options, const RankPlace& place) {
  int product = 0;
  return __builtin_mul_overflow(options.shape.micro_batches, place.shares, &product)
             ? std::numeric_limits<int>::max()
             : product;
}

// Stages whose bits depend on how virtual replicas lie on ranks.
void require_divisible(const RankPlace& place, const std::vector<StageEntry>& stages,
                       const std::vector<std::unique_ptr<Stage>>& made) {
  if (place.shares == 1) return;
  const auto refuse = [&](const std::string& what) {
    throw_usage("{}, with {} virtual replicas on {} replica{}; legal: as many as replicas", what,
                place.virtual_replicas(), place.topology.size.replica,
                place.topology.size.replica == 1 ? "" : "s");
  };
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const StageCollectives& made_within = stages[s].collectives;
    for (const auto& list : {made_within.forward, made_within.loss, made_within.backward_input,
                             made_within.backward_weight, made_within.recompute}) {
      if (std::none_of(list.begin(), list.end(), [](const PlannedCollective& each) {
            return each.axis == CollectiveAxis::kReplica;
          })) {
        continue;
      }
      refuse(fmt::format("stage {} makes collectives over the replicas within its actions", s));
    }
  }
  for (const std::unique_ptr<Stage>& stage : made) {
    ParameterSet* const set = stage->parameters();
    for (const Parameter* buffer : set == nullptr ? std::vector<Parameter*>() : set->buffers()) {
      if (buffer->across == ReplicaRule::kMean) continue;
      refuse(fmt::format("buffer '{}' is not the mean over replicas (ReplicaRule)", buffer->name));
    }
  }
}

// What a step and the announced evaluations need: the distinct sizes of all replicas'
// micro-batches, the largest first, and the most micro-batches of an evaluation's round.
struct Division {
  std::vector<UnitShape> sizes;
  std::size_t round = 0;
};

// `plans` gets this replica's micro-batches of the largest step.
Division divide_samples(const PipelineOptions& options, const RankPlace& place, StepPlans& plans) {
  const int parts = place.virtual_replicas();
  const std::int64_t size = options.shape.micro_batch_size;
  const BatchShape batch{.batch_size = largest_batch(options, parts),
                         .micro_batch_size = size,
                         .micro_batches = options.shape.micro_batches,
                         .replicas = parts,
                         .name = place.shares == 1 ? "replicas" : "virtual replicas"};
  std::set<std::int64_t, std::greater<>> sizes;
  Division division;
  for (int part = 0; part < parts; ++part) {
    const std::vector<SampleRange> training = micro_batches_of(batch, part);
    for (const SampleRange& range : training) sizes.insert(range.count);
    if (part / place.shares == place.here.replica) {
      plans.micro_batches.insert(plans.micro_batches.end(), training.begin(), training.end());
    }
    for (const std::int64_t samples : options.expert.evaluations) {
      if (samples < 0)
        throw_usage("an evaluation of {} samples; legal are numbers from 0", samples);
      const std::int64_t share = share_of(samples, parts, part).count;
      if (share >= size) sizes.insert(size);
      if (share % size > 0) sizes.insert(share % size);
      division.round =
          std::max(division.round, static_cast<std::size_t>((share + size - 1) / size));
    }
  }
  division.round = std::min(division.round, StepPlans::kRoundMicroBatches);
  for (const std::int64_t samples : sizes) division.sizes.push_back({.samples = samples});
  return division;
}

// After the stages are described: their operators have chosen then.
std::map<std::string, std::vector<int>> gather_arithmetic(Collectives& world,
                                                          const ComputeContext& compute) {
  std::map<std::string, std::vector<int>> arithmetic;
  int rank = 0;
  for (const std::string& text : world.all_gather_strings(compute.arithmetic())) {
    if (!text.empty()) arithmetic[text].push_back(rank);
    ++rank;
  }
  return arithmetic;
}

// What the stages say of micro-batches of some sizes.
struct StageReports {
  std::vector<StageEntry> entries;                          // [stage]
  std::vector<std::vector<std::vector<EdgeTensor>>> edges;  // [size][edge]
  std::vector<std::vector<TensorSpec>> answers;             // [size] of the last stage
  std::string gradients, outputs;  // of all stages, of the last one: alike on ranks that share them
  std::string model;               // StageDescription::model
  std::string text;                // of the stages, a line each; where other ranks share them
};

// A line per size; none where ranks that share the stage may have parts of the outputs.
std::string outputs_text(const std::vector<UnitShape>& sizes, const StageReport& last) {
  std::string text;
  if (!last.gives_answers) return text;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::vector<std::string> specs;
    for (const TensorSpec& spec : last.answers[i].empty() ? last.outputs[i] : last.answers[i]) {
      specs.push_back(to_string(spec));
    }
    text += fmt::format("outputs of the last stage for a micro-batch of {}: {}\n",
                        to_string(sizes[i]), joined(specs, ", "));
  }
  return text;
}

// Which gradients a stage wants, a line per size.
std::string gradients_text(std::size_t stage, const StageReport& report) {
  std::string text;
  for (const std::vector<bool>& wanted : report.input_gradients) {
    text += fmt::format("gradients that stage {} wants of its inputs: {}\n", stage,
                        joined(wanted, ", "));
  }
  return stage == 0 ? "" : text;
}

// Exchanges the reports of all stages, one after the other: the outputs of a stage are the inputs
// of the next. `stage_of` returns a stage of this rank. `takes_targets`: the last stage's loss has
// to take the targets of the data.
StageReports describe_stages(JobContext& job, ComputeContext& compute, const Placement& placement,
                             const DataSource& source, const std::vector<UnitShape>& sizes,
                             bool takes_targets, const std::function<Stage&(int stage)>& stage_of) {
  const int stages = placement.stages();
  // Inference makes no collectives over replicas.
  const AxisSizes& ranks = job.place.topology.size;
  const std::array sharing = {takes_targets ? ranks.replica : 1, ranks.tensor};
  StageReports all;
  all.edges.resize(sizes.size());
  std::vector<std::vector<TensorSpec>> inputs;  // [size] of stage s
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    all.edges[i].resize(at(stages) + 1);
    inputs.push_back(
        with_shape(source.input_specs(sizes[i].samples), sizes[i], source.position_dimension()));
  }
  for (int s = 0; s < stages; ++s) {
    std::string text;
    if (job.makes(s, placement)) {
      std::vector<std::vector<TensorSpec>> targets;
      for (const UnitShape size : sizes) {  // of whole samples, where there are targets
        if (takes_targets && s + 1 == stages) targets.push_back(source.target_specs(size.samples));
      }
      const StageReport mine = report_of(stage_of(s), s, inputs, targets,
                                         {.last = s + 1 == stages, .ranks = sharing}, compute);
      text = to_text(mine);
      if (!mine.model.empty()) all.model = mine.model;
    }
    const int maker = job.planned ? 0 : placement.rank_of(s);
    text = job.group(Axis::kPipeline).collectives->broadcast_string(text, maker);
    StageReport report = report_from(text);
    if (job.place.topology.size.tensor > 1) all.text += text + '\n';
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      for (std::size_t t = 0; t < inputs[i].size(); ++t) {
        all.edges[i][at(s)].push_back({inputs[i][t], s > 0 && report.input_gradients[i][t]});
      }
    }
    all.gradients += gradients_text(at(s), report);
    if (s + 1 == stages) all.outputs = outputs_text(sizes, report);
    inputs = std::move(report.outputs);
    all.answers = std::move(report.answers);
    all.entries.push_back(std::move(report.entry));
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    for (const TensorSpec& spec : inputs[i]) all.edges[i][at(stages)].push_back({spec, true});
  }
  return all;
}

// Collective over the ranks that share this rank's stages: what each of them says, by tensor
// coordinate. Edges and model are this rank's alone.
std::vector<StageReports> gather_reports(Collectives& tensor, StageReports mine,
                                         const std::vector<UnitShape>& sizes) {
  std::vector<StageReports> all;
  for (const std::string& text : tensor.all_gather_strings(mine.text)) {
    StageReports& other = all.emplace_back();
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      StageReport report = report_from(line);
      other.gradients += gradients_text(other.entries.size(), report);
      other.outputs = outputs_text(sizes, report);
      other.entries.push_back(std::move(report.entry));
    }
  }
  mine.text.clear();
  all[at(tensor.communicator().rank())] = std::move(mine);
  return all;
}

// What the ranks that share a pipeline's stages say of them, by tensor coordinate. Makes this
// rank's stages; of a planned job those of all.
std::vector<StageReports> describe_parts(JobContext& job, const PipelineOptions& options,
                                         ComputeContext& compute, const StageFactory& make_stage,
                                         const DataSource& source, const Placement& placement,
                                         const std::vector<UnitShape>& sizes,
                                         std::vector<std::unique_ptr<Stage>>& made) {
  const int tensors = job.place.topology.size.tensor, shards = job.place.shards;
  if (std::max(tensors, shards) > 1 && !make_stage.takes_place()) {
    throw_usage(
        "options.shape.{} is {}, but the StageFactory makes stages that ranks cannot share; "
        "legal: 1, or a factory of a StagePlace, whose stages have slices of their parameters",
        tensors > 1 ? "tensor" : "tensor_shards", tensors > 1 ? tensors : shards);
  }
  // One plan serves micro-batches of all numbers of positions, which infer() may get. Shards
  // may not divide these numbers.
  const bool counted = source.position_dimension() > 0;
  const bool deals_positions =
      options.shape.sequence_parallel &&
      !(counted && (options.training.inference || positions_of(source) % shards != 0));
  const auto describe = [&](int tensor) {
    const auto make = [&](int stage) -> Stage& {
      try {
        made.push_back(
            make_stage({stage, placement.stages(), tensor, tensors, shards, deals_positions}));
      } catch (...) {
        rethrow_from(fmt::format("making stage {}", stage));
      }
      if (made.back() != nullptr) return *made.back();
      throw_usage("the factory made nothing for stage {}", stage);
    };
    return describe_stages(job, compute, placement, source, sizes, !options.training.inference,
                           make);
  };
  if (!job.planned && tensors > 1) {
    return gather_reports(*job.group(Axis::kTensor).collectives, describe(job.place.here.tensor),
                          sizes);
  }
  std::vector<StageReports> all;
  for (int tensor = 0; tensor < tensors; ++tensor) all.push_back(describe(tensor));
  return all;
}

// Programs' optimizers that take parameters may compute with all of one, such as its norm.
void require_whole_parameters(const ParameterTable& table) {
  for (std::size_t s = 0; s < table.stages.size(); ++s) {
    for (const ParameterEntry& each : table.stages[s].parameters) {
      if (each.slice.all() || !each.updated) continue;
      throw_usage(
          "make_optimizer takes parameters, but a rank has a part of '{}' of stage {} alone; "
          "legal: "
          "a function of std::span<const ParameterSlice>",
          each.name, s);
    }
  }
}

// ParameterTable::gradients_in_parts. Refuses devices that cannot.
bool gradients_in_parts(const PipelineOptions& options, const RankPlace& place) {
  if (options.shape.shard < ShardLevel::kGradients) return false;
  const bool each = options.training.gradient_order == GradientOrder::kMicroBatch;
  for (const RankDevice& rank : place.devices) {
    if (rank.device.kind == DeviceKind::kCpu) continue;
    if (each || options.shape.shard == ShardLevel::kParameters) return false;
    throw_usage(
        "shards of the gradients on {} of {}; legal on GPUs: shards of the optimizer, of the "
        "parameters or none, or with gradients in the order micro-batch (--gradient-order)",
        to_string(rank.device), rank.host);
  }
  return place.topology.size.replica > 1;
}

// Refuses what GradientOrder::kMicroBatch cannot add.
void require_addable(const ParameterTable& table) {
  for (std::size_t s = 0; s < table.stages.size(); ++s) {
    for (const ParameterEntry& each : table.stages[s].parameters) {
      const char* const why = each.shares > 0     ? "has shares, one of each tensor shard"
                              : each.by_loss      ? "is written by the loss"
                              : !each.overwritten ? "is added to zeros, and not overwritten"
                                                  : nullptr;
      if (why == nullptr) continue;
      throw_usage(
          "gradients in the order micro-batch (--gradient-order), but that of '{}' of stage {} {}; "
          "legal: the order step",
          each.name, s, why);
    }
  }
}

// Ties, what is updated, by which replica, and how its gradients are added.
void finish(ParameterTable& table, const PipelineOptions& options, const RankPlace& place) {
  table.tied = find_ties(table.stages);
  require_own_buffer_names(table.stages);
  require_groups(options, table.stages);
  for (StageEntry& stage : table.stages) {
    for (ParameterEntry& each : stage.parameters) {
      const ParameterGroup* group = group_of(options.training.groups, each.name);
      each.updated = group == nullptr || !group->frozen;
    }
    for (ParameterEntry& each : stage.buffers) each.updated = false;
  }
  const OptimizerFactory& make_optimizer = options.training.make_optimizer;
  if (make_optimizer && !make_optimizer.takes_slices()) require_whole_parameters(table);
  if (options.shape.shard == ShardLevel::kNone || options.training.inference) return;
  cut_parameters(table, place.shard_groups);
  table.gradients_in_parts = gradients_in_parts(options, place);
  table.sums_each_micro_batch = options.training.gradient_order == GradientOrder::kMicroBatch;
  if (table.sums_each_micro_batch) require_addable(table);
}

void choose_all_routes(const JobContext& job, const PipelineOptions& options, JobLayout& layout) {
  const RouteQuestion question{.wanted = options.devices.transport,
                               .no_device_messages = job.devices.no_device_messages,
                               .nccl_refusal = job.devices.no_nccl,
                               .devices = job.place.devices,
                               .tensor_ranks = job.place.topology.size.tensor};
  const Placement& placement = layout.plans.order.placement;
  RouteChoice choice(question);
  layout.wires.routes = choice.edges(placement);
  for (TiedParameter& tie : layout.parameters.tied) {
    const int owner = placement.rank_of(tie.uses.front().stage);
    for (const TiedUse& use : tie.uses) {
      tie.routes.push_back(choice.between(owner, placement.rank_of(use.stage)));
    }
  }
  const int replicas = options.training.inference ? 1 : job.place.topology.size.replica;
  for (int rank = 0; rank < job.place.topology.size.pipeline; ++rank) {
    layout.wires.sums.push_back(choose_sum_route(rank, replicas, question));
    layout.wires.tensor.push_back(choose_tensor_route(rank, question));
  }
  layout.wires.all_reduce = options.devices.all_reduce;
}

// Of all places: each pipeline plans its own ranks; in a planned job one process plans all.
// `reports`: [tensor coordinate].
MemoryTable memory_of_places(const JobContext& job, const PipelineOptions& options,
                             const DataSource& source, const std::vector<StageReports>& reports,
                             const JobLayout& layout) {
  MemoryTable table = plan_memory(layout, options, source);
  const std::size_t tensors = at(job.place.topology.size.tensor), depth = table.ranks.size();
  if (tensors == 1) return table;
  std::vector<RankMemory> all(tensors * depth);  // [tensor coordinate][pipeline rank]
  if (!job.planned) {
    job.group(Axis::kTensor)
        .collectives->all_gather(std::as_bytes(std::span(table.ranks)),
                                 std::as_writable_bytes(std::span(all)));
  } else {
    std::copy(table.ranks.begin(), table.ranks.end(), all.begin());
    JobLayout other = layout;
    for (std::size_t t = 1; t < tensors; ++t) {
      other.place.here.tensor = static_cast<int>(t);
      other.parameters = layout.tensor_parameters[t];
      other.wires.edges =
          EdgeTable(layout.wires.edges.sizes(), reports[t].edges, reports[t].answers);
      const std::vector<RankMemory> ranks = plan_memory(other, options, source).ranks;
      std::copy(ranks.begin(), ranks.end(), all.begin() + std::ptrdiff_t(t * depth));
    }
  }
  table.tensors = static_cast<int>(tensors);
  table.ranks.resize(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    table.ranks[i % depth * tensors + i / depth] = all[i];
  }
  return table;
}

// LowerOptions::gathers.
std::vector<Gather> gathers_of(const JobLayout& layout) {
  std::vector<Gather> gathers;
  if (layout.parameters.gather == Gather::kNever) return gathers;
  for (const StageEntry& stage : layout.parameters.stages) {
    gathers.push_back(sharded_units(stage).empty() ? Gather::kNever : layout.parameters.gather);
  }
  return gathers;
}

// What lower() needs to know of the training step.
LowerOptions lowering_of(const JobLayout& layout, bool inference) {
  const Placement& placement = layout.plans.order.placement;
  LowerOptions lowering{.reduce_grad = !inference, .tied = {}, .resident = layout.plans.resident};
  for (int s = 0; s < placement.stages(); ++s) {
    lowering.overlapped_grad_sums.push_back(layout.wires.sums_overlap(placement.rank_of(s)) &&
                                            !layout.parameters.stages[at(s)].has_shares());
  }
  if (inference) return lowering;
  lowering.gathers = gathers_of(layout);
  for (const StageEntry& stage : layout.parameters.stages) {
    lowering.recomputes.push_back(stage.recomputes);
  }
  for (const TiedParameter& tie : layout.parameters.tied) {
    std::vector<int>& stages = lowering.tied.emplace_back().stages;
    for (const TiedUse& use : tie.uses) {
      if (stages.empty() || stages.back() != use.stage) stages.push_back(use.stage);
    }
  }
  return lowering;
}

// Within the actions of a step.
std::vector<StageCollectives> collectives_of(const JobLayout& layout) {
  std::vector<StageCollectives> all;
  for (const StageEntry& stage : layout.parameters.stages) all.push_back(stage.collectives);
  return all;
}

// The most states per stage in steps of fewer micro-batches. Some schedules keep more than in a
// long step, where it has a few rounds over the stages at most.
std::vector<StepPlans::States> states_of_smaller_steps(const PipelineOptions& options,
                                                       const JobLayout& layout) {
  if (options.order.given != nullptr || options.training.inference) return {};
  std::vector<StepPlans::States> most;
  for (int n = 1; n < options.shape.micro_batches; ++n) {
    const int stages = static_cast<int>(most.size());
    if (stages > 0 && n > 4 * stages) break;
    const Schedule order = order_of(options, {layout.place.topology.size.pipeline,
                                              n * layout.place.shares, options.order.chunks});
    most.resize(at(order.placement.stages()));
    if (layout.plans.resident.empty()) {
      const std::vector<int> in_flight = most_in_flight(order);
      for (std::size_t s = 0; s < most.size(); ++s) most[s].raise({.slots = in_flight[s]});
      continue;
    }
    const LowerOptions lowering = lowering_of(layout, /*inference=*/false);
    const Plan plan = assemble_plan(lower(order, lowering), lowering.tied);
    for (std::size_t s = 0; s < most.size(); ++s) {
      most[s].raise(StepPlans::states_of(plan, static_cast<int>(s)));
    }
  }
  return most;
}

// On a GPU the update runs where the state is.
void require_offloadable_optimizer(const PipelineOptions& options, const JobLayout& layout) {
  if (options.offload.optimizer == PipelineOptions::Offload::To::kNowhere) return;
  for (const RankDevice& rank : layout.place.devices) {
    if (rank.device.kind == DeviceKind::kCpu) continue;
    throw_usage(
        "the optimizer's state of {} on {} cannot be offloaded; legal: ranks on CPUs alone, or "
        "less of it by --shard optimizer or --moment-precision bf16",
        to_string(rank.device), rank.host);
  }
}

// What stages keep on their device; refuses those whose states cannot leave it.
void plan_offload(const PipelineOptions& options, JobLayout& layout) {
  using To = PipelineOptions::Offload::To;
  if (options.offload.activations == To::kNowhere || options.training.inference) return;
  for (const RankDevice& rank : layout.place.devices) {
    if (options.offload.activations != To::kHost || rank.device.kind != DeviceKind::kCpu) continue;
    throw_usage(
        "activations that are offloaded to the host are there already on {}, a rank on a CPU; "
        "legal: a disk, or GPUs alone",
        rank.host);
  }
  const auto stages = at(layout.plans.order.placement.stages());
  layout.plans.resident = options.offload.resident;
  if (layout.plans.resident.empty()) layout.plans.resident = half_resident(layout.plans.order);
  if (layout.plans.resident.size() != stages) {
    throw_usage("options.offload.resident has {} entries; legal are 0 and {}, one per stage",
                layout.plans.resident.size(), stages);
  }
  for (std::size_t s = 0; s < layout.plans.resident.size(); ++s) {
    int& resident = layout.plans.resident[s];
    layout.parameters.stages[s].state.alignment = StateStore::alignment(options.offload);
    for (ParameterTable& table : layout.tensor_parameters) {
      table.stages[s].state.alignment = layout.parameters.stages[s].state.alignment;
    }
    const StageEntry& entry = layout.parameters.stages[s];
    if (!entry.own_memory && entry.state.kept() == 0) resident = 0;  // nothing to offload
    if (resident < 2 || entry.state_moves) continue;
    throw_usage(
        "stage {} keeps what it needs of a micro-batch where it cannot be offloaded; legal: stages "
        "that say it may move (StageDescription::state_moves), as those of Sluice's layers do",
        s);
  }
}

// Two elements of a copy in bf16 are gathered together.
void require_even_parts(const ParameterTable& table) {
  for (std::size_t s = 0; s < table.stages.size(); ++s) {
    for (const ParameterEntry& each : table.stages[s].parameters) {
      for (const std::int64_t end : each.ends) {
        if (!each.copied || end % 2 == 0 || end == each.elements) continue;
        throw_usage(
            "shards of the parameters cut '{}' of stage {}, which has a copy in bf16, at element "
            "{}; legal: even ones, so shards of the model with an even number of its elements, or "
            "shards of the optimizer",
            each.name, s, end);
      }
    }
  }
}

// Whether replicas have parts of the parameters at rest.
bool shards_parameters(const PipelineOptions& options, const JobLayout& layout) {
  if (options.shape.shard == ShardLevel::kParameters) require_even_parts(layout.parameters);
  return options.shape.shard == ShardLevel::kParameters && !options.training.inference &&
         layout.place.topology.size.replica > 1;
}

// Plans the largest steps, with the memory that they take. Where replicas have parts of the
// parameters, when these are gathered.
void plan_gathers(const JobContext& job, const PipelineOptions& options, const DataSource& source,
                  const std::vector<StageReports>& reports, int micro_batches, std::size_t round,
                  JobLayout& layout) {
  // Whether it is within the limit.
  const auto plan = [&](Gather gather) {
    layout.parameters.gather = gather;
    for (ParameterTable& table : layout.tensor_parameters) table.gather = gather;
    layout.plans.train = plan_step(layout, options, micro_batches);
    if (round > 0) layout.plans.forward = plan_forward(layout, static_cast<int>(round));
    layout.memory = memory_of_places(job, options, source, reports, layout);
    layout.memory.shared = shared_memory(job.devices.ranks, layout.place.topology, layout.memory);
    const std::size_t limit = options.devices.memory;
    return limit > 0 && std::ranges::all_of(layout.memory.ranks, [&](const RankMemory& each) {
             return each.total() <= limit;
           });
  };
  const ShardGather when = options.shape.shard_gather;
  if (!shards_parameters(options, layout)) {
    (void)plan(Gather::kNever);
  } else if (when != ShardGather::kAuto) {
    (void)plan(when == ShardGather::kStep ? Gather::kPerStep : Gather::kPerUse);
  } else if (options.devices.memory == 0 || !plan(Gather::kPerStep)) {
    (void)plan(Gather::kPerUse);
  }
}

// Whether the memory that `needed` describes is within what was planned.
bool fits(const StageEntry& needed, const StageEntry& planned) {
  return needed.state.until_input <= planned.state.until_input &&
         needed.state.until_weight <= planned.state.until_weight &&
         needed.state.gradients <= planned.state.gradients &&
         needed.shared_gradient_bytes <= planned.shared_gradient_bytes &&
         needed.workspace_bytes <= planned.workspace_bytes &&
         needed.copy_bytes <= planned.copy_bytes && needed.table_bytes <= planned.table_bytes;
}

}  // namespace

std::unique_ptr<Stage> StageFactory::operator()(const StagePlace& place) const {
  return make_(place);
}

std::int64_t largest_batch(const PipelineOptions& options, int virtual_replicas) {
  if (options.shape.batch_size != 0) return options.shape.batch_size;
  std::int64_t product = 0;
  if (__builtin_mul_overflow(options.shape.micro_batch_size,
                             std::int64_t{options.shape.micro_batches} * virtual_replicas,
                             &product)) {
    return std::numeric_limits<std::int64_t>::max();  // micro_batches_of() refuses it
  }
  return product;
}

Plan plan_step(const JobLayout& layout, const PipelineOptions& options, int micro_batches) {
  const ScheduleShape shape{layout.place.topology.size.pipeline, micro_batches,
                            options.order.chunks};
  const int shares = options.training.inference ? 1 : layout.place.shares;
  const int fold_every = shares == 1 ? 0 : micro_batches / shares;
  return plan_for(order_of(options, shape), lowering_of(layout, options.training.inference),
                  needs_of(layout.wires.carrier), collectives_of(layout), fold_every);
}

Plan plan_forward(const JobLayout& layout, int micro_batches) {
  return plan_for(generate_forward_only(layout.plans.placement(), micro_batches),
                  {.reduce_grad = false, .tied = {}, .gathers = gathers_of(layout)},
                  needs_of(layout.wires.carrier), collectives_of(layout));
}

BuiltLayout build_layout(JobContext& job, const PipelineOptions& options, ComputeContext& compute,
                         const StageFactory& make_stage, const DataSource& source, bool any_size) {
  if (options.expert.bucket_bytes == 0) {
    throw_usage("buckets of 0 bytes cannot hold a gradient; the nearest legal value is 1");
  }
  if (!make_stage) throw_usage("the StageFactory is null; legal: a function that makes stages");
  (void)positions_of(source);
  BuiltLayout built;
  JobLayout& layout = built.layout;
  StepPlans& plans = layout.plans;
  layout.place = job.place;
  const int micro_batches = micro_batches_of_replica(options, layout.place);
  plans.order =
      order_of(options, {layout.place.topology.size.pipeline, micro_batches, options.order.chunks});
  const Division division = divide_samples(options, layout.place, plans);
  std::vector<StageReports> reports =
      describe_parts(job, options, compute, make_stage, source, plans.order.placement,
                     division.sizes, built.stages);
  StageReports& mine = reports[at(job.place.here.tensor)];
  require_same_texts(job.world.collectives->all_gather_strings(mine.model), "rank");
  require_same_replicas(*job.group(Axis::kReplica).collectives, mine.entries);
  if (!options.training.inference) {
    require_divisible(layout.place, mine.entries, built.stages);
  }
  std::vector<ParameterTable> tables;  // [tensor coordinate]
  std::vector<std::string> alike;
  for (StageReports& each : reports) {
    tables.push_back({.stages = std::move(each.entries), .tied = {}});
    alike.push_back(each.gradients + each.outputs);
  }
  require_parts_of_whole(tables);
  require_same_texts(alike, "tensor rank");
  layout.arithmetic = gather_arithmetic(*job.world.collectives, compute);
  layout.wires.edges = EdgeTable(division.sizes, std::move(mine.edges), std::move(mine.answers));
  for (ParameterTable& table : tables) finish(table, options, layout.place);
  layout.parameters = tables[at(job.place.here.tensor)];
  choose_all_routes(job, options, layout);
  for (ParameterTable& table : tables) table.tied = layout.parameters.tied;
  if (tables.size() > 1) layout.tensor_parameters = std::move(tables);
  // The order that NCCL's queues need suits tagged messages too.
  layout.wires.carrier = uses_nccl(layout.wires.routes) ? "nccl" : job.messages->name();
  plan_offload(options, layout);
  if (!options.training.inference) require_offloadable_optimizer(options, layout);
  if (any_size) plans.smaller = states_of_smaller_steps(options, layout);
  plans.bubble_ideal =
      simulate(plans.order, {.stages = {StageTimes{}}, .message = 0}).bubble_makespan;
  plans.cuda_graphs = options.devices.cuda_graphs;
  plan_gathers(job, options, source, reports, micro_batches, division.round, layout);
  return built;
}

void require_memory(const JobContext& job, const PipelineOptions& options,
                    const JobLayout& layout) {
  require_within(options.devices.memory, layout.memory,
                 "a smaller --micro-batch-size, --recompute auto, what --dry-run lists, more ranks "
                 "in the pipeline or another schedule need less");
  require_memory(job.devices.ranks, layout.place.topology, layout.memory);
}

void add_size(JobContext& job, ComputeContext& compute, const DataSource& source,
              std::span<const std::unique_ptr<Stage>> stages, UnitShape shape, JobLayout& layout) {
  const Placement& placement = layout.plans.placement();
  const std::vector<int>& mine = placement.stages_of(layout.place.here.pipeline);
  const auto stage_of = [&](int stage) -> Stage& {
    const auto place = std::find(mine.begin(), mine.end(), stage) - mine.begin();
    return *stages[static_cast<std::size_t>(place)];
  };
  StageReports reports = describe_stages(job, compute, placement, source,
                                         {layout.wires.edges.largest(), shape}, false, stage_of);
  for (std::size_t s = 0; s < reports.entries.size(); ++s) {
    if (fits(reports.entries[s], layout.parameters.stages[s])) continue;
    throw_usage("stage {} needs more memory for a micro-batch of {} than for the largest, of {}", s,
                to_string(shape), to_string(layout.wires.edges.largest()));
  }
  layout.wires.edges.add(shape, std::move(reports.edges[1]), std::move(reports.answers[1]));
  for (std::size_t i = 0; i < stages.size(); ++i) {
    std::vector<TensorSpec> inputs;
    for (const EdgeTensor& tensor : layout.wires.edges.inputs(shape, mine[i])) {
      inputs.push_back(tensor.spec);
    }
    try {
      stages[i]->prepare_size(compute, inputs);
    } catch (...) {
      rethrow_from(fmt::format("stage {}, prepare_size()", mine[i]));
    }
  }
}

}  // namespace sluice
