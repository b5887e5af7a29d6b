#include "runtime/pipeline/build_layout.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/generate.hpp>
#include <sluice/simulate.hpp>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/data/batch_shape.hpp"
#include "runtime/pipeline/memory_plan.hpp"
#include "runtime/pipeline/stage_report.hpp"
#include "runtime/pipeline/transport_plan.hpp"

namespace sluice {
namespace {

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
    throw_usage(
        "an evaluation of {} samples falls into more than {} micro-batches of {}; choose at most "
        "{} samples (--validation-samples)",
        samples, kMost, size, kMost * size * replicas);
  }
  for (; left > 0; left -= ranges.back().count) {
    ranges.push_back({first, std::min(size, left)});
    first += ranges.back().count;
  }
  return ranges;
}

// A given order must fit this pipeline; JobContext has compared the ranks.
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
      if (entry.elements != owner.elements) {
        throw_usage("tied parameter '{}' has {} elements on stage {} and {} on stage {}",
                    entry.name, owner.elements, first.stage, entry.elements, s);
      }
    }
  }
  std::erase_if(ties, [](const TiedParameter& tie) { return tie.uses.size() < 2; });
  return ties;
}

// Divides a step's and each evaluation's samples among the replicas and into micro-batches; `plans`
// gets this replica's. Returns the distinct sizes of all replicas' micro-batches, descending.
std::vector<std::int64_t> divide_samples(const PipelineOptions& options, const RankPlace& place,
                                         StepPlans& plans) {
  const int replicas = place.topology.replicas;
  BatchShape batch{.batch_size = options.shape.batch_size,
                   .micro_batch_size = options.shape.micro_batch_size,
                   .micro_batches = options.shape.micro_batches,
                   .replicas = replicas};
  if (batch.batch_size == 0 &&
      __builtin_mul_overflow(batch.micro_batch_size, std::int64_t{batch.micro_batches} * replicas,
                             &batch.batch_size)) {
    batch.batch_size = std::numeric_limits<std::int64_t>::max();  // micro_batches_of() refuses it
  }
  std::set<std::int64_t, std::greater<>> sizes;
  const auto collect = [&](std::vector<SampleRange> ranges) {
    for (const SampleRange& range : ranges) sizes.insert(range.count);
    return ranges;
  };
  for (int r = 0; r < replicas; ++r) {
    std::vector<SampleRange> training = collect(micro_batches_of(batch, r));
    if (r == place.replica) plans.micro_batches = std::move(training);
    for (const std::int64_t samples : options.training.evaluations) {
      std::vector<SampleRange> ranges =
          collect(evaluation_ranges(samples, replicas, r, options.shape.micro_batch_size));
      if (r != place.replica) continue;
      plans.evaluations.push_back(
          {.samples = samples, .micro_batches = std::move(ranges), .round = {}, .rest = {}});
    }
  }
  return {sizes.begin(), sizes.end()};
}

// Makes this rank's stages, and exchanges the reports of all stages, one after the other: the
// outputs of a stage are the inputs of the next.
void describe_stages(JobContext& job, ComputeContext& compute, const StageFactory& make_stage,
                     const DataSource& source, const std::vector<std::int64_t>& sizes,
                     BuiltLayout& built) {
  const Placement& placement = built.layout.plans.order.placement;
  const int stages = placement.stages();
  std::vector<std::vector<std::vector<EdgeTensor>>> edges(sizes.size());
  std::vector<std::vector<TensorSpec>> inputs;  // [size] of stage s
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    inputs.push_back(source.input_specs(sizes[i]));
    edges[i].resize(at(stages) + 1);
  }
  for (int s = 0; s < stages; ++s) {
    std::string text;
    if (placement.rank_of(s) == job.place.rank) {
      built.stages.push_back(make_stage(s, stages));
      if (built.stages.back() == nullptr) {
        throw_usage("the factory made nothing for stage {}", s);
      }
      text = to_text(report_of(*built.stages.back(), s, inputs, compute));
    }
    StageReport report =
        report_from(job.pipeline.collectives->broadcast_string(text, placement.rank_of(s)));
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      for (std::size_t t = 0; t < inputs[i].size(); ++t) {
        edges[i][at(s)].push_back({inputs[i][t], s > 0 && report.input_gradients[i][t]});
      }
    }
    inputs = std::move(report.outputs);
    built.layout.parameters.stages.push_back(std::move(report.entry));
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    for (const TensorSpec& spec : inputs[i]) edges[i][at(stages)].push_back({spec, true});
  }
  built.layout.wires.edges = EdgeTable(sizes, std::move(edges));
}

void choose_all_routes(const JobContext& job, const PipelineOptions& options, JobLayout& layout) {
  const RouteQuestion question{.wanted = options.devices.transport,
                               .no_device_messages = job.devices.no_device_messages,
                               .nccl_refusal = job.devices.no_nccl,
                               .devices = job.place.devices};
  const Placement& placement = layout.plans.order.placement;
  layout.wires.routes = choose_routes(placement, question);
  for (TiedParameter& tie : layout.parameters.tied) {
    const int owner = placement.rank_of(tie.uses.front().stage);
    for (const TiedUse& use : tie.uses) {
      tie.routes.push_back(choose_route(owner, placement.rank_of(use.stage), question));
    }
  }
  const int replicas = options.training.inference ? 1 : job.place.topology.replicas;
  for (int rank = 0; rank < job.place.topology.pipeline; ++rank) {
    layout.wires.sums.push_back(choose_sum_route(rank, replicas, question));
  }
  layout.wires.all_reduce = options.devices.all_reduce;
}

// What lower() needs to know of the training step.
LowerOptions lowering_of(const JobLayout& layout, bool inference) {
  const Placement& placement = layout.plans.order.placement;
  LowerOptions lowering{.reduce_grad = !inference, .tied = {}};
  for (int s = 0; s < placement.stages(); ++s) {
    lowering.overlapped_grad_sums.push_back(layout.wires.sums_by_nccl(placement.rank_of(s)));
  }
  if (inference) return lowering;
  for (const TiedParameter& tie : layout.parameters.tied) {
    std::vector<int>& stages = lowering.tied.emplace_back().stages;
    for (const TiedUse& use : tie.uses) {
      if (stages.empty() || stages.back() != use.stage) stages.push_back(use.stage);
    }
  }
  return lowering;
}

void make_plans(StepPlans& plans, const LowerOptions& lowering, const TransportNeeds& transport) {
  plans.train = plan_for(plans.order, lowering, transport);
  for (EvaluationPlan& evaluation : plans.evaluations) {
    const std::size_t count = evaluation.micro_batches.size();
    const std::size_t round = std::min(count, EvaluationPlan::kRoundMicroBatches);
    if (round == 0) continue;
    const auto plan_of = [&](std::size_t micro_batches) {
      return plan_for(generate_forward_only(plans.order.placement, static_cast<int>(micro_batches)),
                      {.reduce_grad = false, .tied = {}}, transport);
    };
    evaluation.round = plan_of(round);
    if (count % round > 0) evaluation.rest = plan_of(count % round);
  }
  plans.bubble_ideal =
      simulate(plans.order, {.stages = {StageTimes{}}, .message = 0}).bubble_makespan;
}

}  // namespace

BuiltLayout build_layout(JobContext& job, const PipelineOptions& options, ComputeContext& compute,
                         const StageFactory& make_stage, const DataSource& source) {
  if (options.devices.bucket_bytes == 0) {
    throw_usage("buckets of 0 bytes cannot hold a gradient; the nearest legal value is 1");
  }
  BuiltLayout built;
  JobLayout& layout = built.layout;
  layout.place = job.place;
  const std::vector<std::int64_t> sizes = divide_samples(options, layout.place, layout.plans);
  layout.plans.order = order_of(
      options, {layout.place.topology.pipeline, options.shape.micro_batches, options.order.chunks});
  describe_stages(job, compute, make_stage, source, sizes, built);
  layout.parameters.tied = find_ties(layout.parameters.stages);
  choose_all_routes(job, options, layout);
  // The order that NCCL's queues need suits tagged messages too.
  const char* carrier = uses_nccl(layout.wires.routes) ? "nccl" : job.messages->name();
  make_plans(layout.plans, lowering_of(layout, options.training.inference), needs_of(carrier));
  layout.plans.cuda_graphs = options.devices.cuda_graphs;
  layout.memory = plan_memory(layout, options, source);
  require_memory(job.devices.ranks, layout.place.topology, layout.memory.ranks);
  return built;
}

}  // namespace sluice
