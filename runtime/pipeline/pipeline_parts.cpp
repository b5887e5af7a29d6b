#include "runtime/pipeline/pipeline_parts.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string_view>
#include <utility>

#include "comm/base/index.hpp"
#include "comm/base/sum_tree.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/device/host_pages.hpp"
#include "comm/group/edge_probe.hpp"
#include "runtime/engine/planned_collectives.hpp"
#include "runtime/gradients/gradient_sums.hpp"
#include "runtime/group/group_collective.hpp"
#include "runtime/group/guard.hpp"
#include "runtime/layout/sharded_memory.hpp"
#include "runtime/planning/build_layout.hpp"
#include "runtime/planning/stage_report.hpp"
#include "runtime/planning/transport_plan.hpp"
#include "stages/compute/context_access.hpp"
#include "stages/compute/thread_team.hpp"
#include "stages/tensor/value_access.hpp"

namespace sluice {
namespace {

// Null for a group of one rank.
std::unique_ptr<GroupCollective> collective_over(const RankGroup& group, std::string_view member) {
  if (group.ranks->size() == 1) return nullptr;
  return std::make_unique<GroupCollective>(*group.collectives, member);
}

// Those whose messages MPI takes from a GPU's memory, each way, with the size of the largest tensor
// between two ranks, but at most `most` bytes.
std::vector<ProbedEdge> direct_edges(const JobLayout& layout, std::size_t most) {
  std::map<std::pair<int, int>, std::size_t> bytes;
  for (int s = 1; s < layout.plans.num_stages(); ++s) {
    if (layout.wires.routes[at(s)].kind != RouteKind::kDirect) continue;
    const int from = layout.plans.placement().rank_of(s - 1);
    const int to = layout.plans.placement().rank_of(s);
    for (const EdgeTensor& tensor : layout.wires.edges.inputs(layout.wires.edges.largest(), s)) {
      std::size_t& forward = bytes[{from, to}];
      forward = std::max(forward, std::min(most, tensor.spec.bytes()));
      if (!tensor.wants_gradient) continue;
      std::size_t& backward = bytes[{to, from}];
      backward = std::max(backward, std::min(most, tensor.spec.bytes()));
    }
  }
  std::vector<ProbedEdge> edges;
  for (const auto& [ends, size] : bytes) edges.push_back({ends.first, ends.second, size});
  return edges;
}

// Collective over the pipeline, before its first message: a test message over each of these edges.
// What MPI sends a rank to itself says nothing of another process, of a network, or of large
// messages. Throws Error(kDevice) on the rank that gets other bytes than were sent: one line with
// both ends and a remedy. A library that takes a GPU's memory for the host's may end the process
// here, before training.
void probe_direct_edges(JobContext& job, const JobLayout& layout, ComputeContext& compute) {
  const std::vector<ProbedEdge> edges = direct_edges(layout, job.piece_bytes());
  if (edges.empty() || job.planned) return;
  const auto comm = job.group(Axis::kPipeline).ranks->duplicate();
  const auto broken =
      probe_edges(*comm, compute.memory(), edges, job.group(Axis::kPipeline).watch.get());
  if (!broken) return;
  const auto name = [&](int rank) {
    const RankDevice& end = job.place.devices[at(rank)];
    Place place = job.place.here;
    place.pipeline = rank;
    return fmt::format("rank {} on {} ({})", job.place.topology.rank_of(place), end.host,
                       to_string(end.device));
  };
  throw_error(ErrorCode::kDevice,
              "MPI delivers other bytes than were sent from {} to {}, in a message of {} bytes "
              "between the memories of GPUs; with OMPI_MCA_opal_cuda_support=0 in the environment "
              "messages go through host memory",
              name(broken->from), name(broken->to), broken->bytes);
}

}  // namespace

PipelineParts::PipelineParts(Communicator& world, const PipelineOptions& options_in,
                             const StageFactory& make_stage, Batches batches_in)
    : options(options_in), job(world, options), batches(std::move(batches_in)) {
  const ActivityScope setting_up(*job.activity, Doing::kSettingUp);
  job.guarded([&] { start_watchdog(); });
  job.guarded([&] {
    rethrow_device_error_with_plan("the libraries", [&] {
      compute = std::make_unique<ComputeContext>(job.place.device(), options.devices.threads);
    });
    const ThreadTeam team(*compute);
    ContextAccess::set_device_wait(*compute, &device_wait);
    compute->set_tf32(options.devices.tf32);
    BuiltLayout built;
    // Libraries may take memory when they plan what the stages will ask of them.
    rethrow_oom_with_plan("the layout", [&] {
      built = build_layout(job, options, *compute, make_stage, *batches.source,
                           /*any_size=*/batches.own != nullptr);
      require_memory(job, options, built.layout);
    });
    layout = std::move(built.layout);
    stages = std::move(built.stages);
    take_memory();
    mirror = std::make_unique<HostMirror>(*compute);
    over_replicas = collective_over(job.group(Axis::kReplica), "replica");
    over_tensor_ranks = collective_over(job.group(Axis::kTensor), "tensor rank");
    if (layout.parameters.gather != Gather::kNever) {
      rethrow_oom_with_plan("the parameters", [&] {
        sharded = std::make_unique<ShardedValues>(job.sharers().collectives->gathers(),
                                                  job.activity.get(), *compute, *mirror, layout);
      });
    }
    place_gradients();
    prepare_stages();
    // All ranks make new communicators, or those that do wait for ever: no rank may have failed.
    job.world.collectives->barrier();
    rethrow_device_error_with_plan("NCCL's communicators", [&] { make_nccl(); });
    if (sharded != nullptr) {
      sharded->gather_over(nccl != nullptr && nccl->sums() ? nccl.get() : nullptr);
    }
    rethrow_oom_with_plan("test messages", [&] { probe_direct_edges(job, layout, *compute); });
    rethrow_oom_with_plan("tied parameters", [&] {
      tied = std::make_unique<TiedUses>(job, layout.plans, layout.parameters, *compute, nccl.get(),
                                        *mirror, bindings);
    });
    rethrow_oom_with_plan("offloaded activations", [&] { make_store(); });
    rethrow_oom_with_plan("messages", [&] {
      device_batch = std::make_unique<DeviceBatch>(*compute, batch_capacity());
      if (!options.training.inference) engine = &training.add(layout.plans.train);
      if (options.training.inference) forward.add(layout.plans.train);
      if (!layout.plans.forward.ranks.empty()) forward.add(layout.plans.forward);
    });
    if (nccl != nullptr) {
      for (const std::span<std::byte> memory : slots->message_memory()) {
        nccl->register_messages(memory);
      }
    }
    job.set_progress_engine(engine);
    feed = std::make_unique<BatchFeed>(job, layout, *batches.source, batches.feed);
  });
}

void PipelineParts::end() noexcept {
  watchdog.reset();  // its thread looks at what goes now
  job.set_progress_engine(nullptr);
  nccl.reset();
}

void PipelineParts::start_watchdog() {
  if (!options.watch.on) return;
  WatchedJob watched{.activity = job.activity.get(), .abort = {}, .ranks = {}};
  for (int rank = 0; rank < job.world.ranks->size(); ++rank) {
    const Topology& topology = job.place.topology;
    const Place place = topology.place_of(rank);
    watched.ranks.push_back({.host = job.hosts[at(rank)],
                             .stages = job.stage_places.stages_of(place.pipeline),
                             .replica = place.replica,
                             .shard_group = job.place.shard_groups.group_of(place.replica),
                             .tensor = topology.size.tensor > 1 ? place.tensor : -1});
  }
  // On this thread, within a wait.
  watched.abort = [this](int code) {
    if (nccl != nullptr) nccl->abort();
    job.world.ranks->abort(code);
  };
  watchdog = std::make_unique<Watchdog>(*job.world.collectives, std::move(watched), options.watch);
}

DeviceBatch::Capacity PipelineParts::batch_capacity() const {
  DeviceBatch::Capacity capacity;
  const std::int64_t largest = layout.wires.edges.largest().samples;
  for (const TensorSpec& spec : batches.source->input_specs(largest)) {
    capacity.inputs.push_back(spec.bytes());
  }
  for (const TensorSpec& spec : batches.source->target_specs(largest)) {
    capacity.targets.push_back(spec.bytes());
  }
  return capacity;
}

void PipelineParts::throw_with_plan(const std::string& who, const Error& error) const {
  std::string plan = "not made yet";
  if (!layout.memory.ranks.empty()) plan = to_string(layout.memory.of(layout.place.here));
  throw_error(ErrorCode::kDevice, "{} on {} of {}: {}; the plan of this rank: {}", who,
              to_string(job.place.device()), job.devices.ranks[at(job.world.ranks->rank())].host,
              error.what(), plan);
}

void PipelineParts::take_memory() {
  rethrow_oom_with_plan("the plan", [&] {
    compute->memory().reserve(layout.memory.of(layout.place.here).arena());
    ContextAccess::reserve_workspace(*compute, layout.memory.operator_bytes);
    ContextAccess::free_outgrown(*compute);
  });
}

// A communicator takes hundreds of megabytes of a GPU: training and evaluations share one set.
void PipelineParts::make_nccl() {
  if (!NcclRoutes::wanted(layout)) return;
  std::size_t open = 8 + TiedUses::most_open(layout.parameters);
  layout.plans.for_each_plan([&](const Plan& plan) {
    for (const BufferPool& pool : plan.ranks[at(layout.place.here.pipeline)].pools) {
      const EdgeTable& edges = layout.wires.edges;
      open += at(pool.count) * edges.inputs(edges.largest(), SlotPool::edge_of(pool)).size();
    }
  });
  const int mine = layout.place.here.pipeline;
  SumLoad sums;
  if (layout.wires.sums_by_nccl(mine)) {
    sums = GradientSums::load_of(layout, mine, options.expert.bucket_bytes);
  }
  sums.tensor = PlannedCollectives::nccl_floats(layout, mine, !options.training.inference);
  if (sharded != nullptr) sums.count += sharded->most_open();
  nccl = NcclRoutes::make(job, layout, *compute, sums, open, options.devices.all_reduce);
}

StageBinding PipelineParts::bind(Stage& stage, int index) {
  StageBinding binding{.index = index,
                       .stage = &stage,
                       .split = dynamic_cast<SplitBackward*>(&stage),
                       .loss = nullptr,
                       .parameters = nullptr};
  if (layout.plans.splits_backward() && binding.split == nullptr) {
    throw_usage("schedule '{}' splits the backward pass, but stage {} is not a SplitBackward",
                options.order.schedule, index);
  }
  if (index + 1 < layout.plans.num_stages()) return binding;
  binding.loss = dynamic_cast<LossStage*>(&stage);
  lacks_loss = binding.loss == nullptr;
  if (lacks_loss && !options.training.inference) {
    throw_usage(
        "stage {} is the last one, but is not a LossStage; legal for infer() alone, with "
        "options.training.inference",
        index);
  }
  return binding;
}

bool PipelineParts::gives_gradients_back() const {
  return compute->device().kind == DeviceKind::kCpu &&
         (layout.parameters.gradients_in_parts || layout.parameters.sums_each_micro_batch);
}

void PipelineParts::place_gradients() {
  if (!layout.parameters.sums_each_micro_batch || options.training.inference ||
      compute->device().kind == DeviceKind::kCpu) {
    return;
  }
  GradientMemory places(layout, layout.place.here.pipeline, layout.place.here.replica);
  rethrow_oom_with_plan("the gradients", [&] {
    gradients =
        std::make_shared<PartialMemory>(compute->device(), places.bytes, std::move(places.ranges));
  });
}

void PipelineParts::prepare_stages() {
  const std::vector<int>& mine = layout.plans.placement().stages_of(layout.place.here.pipeline);
  const bool splits = layout.plans.splits_backward();
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const int index = mine[i];
    StageBinding binding = bind(*stages[i], index);
    StageSetup setup{.compute = compute.get(),
                     .slots = layout.plans.states_of(index).slots,
                     .split_backward = splits,
                     .trains = !options.training.inference,
                     .seed = options.training.seed,
                     .input_sizes = {}};
    for (const UnitShape size : layout.wires.edges.sizes()) {
      std::vector<TensorSpec>& specs = setup.input_sizes.emplace_back();
      for (const EdgeTensor& tensor : layout.wires.edges.inputs(size, index))
        specs.push_back(tensor.spec);
    }
    const auto parameters = [&] {
      return calling(fmt::format("stage {}, parameters()", index),
                     [&] { return stages[i]->parameters(); });
    };
    binding.parameters = parameters();
    const StageEntry& entry = layout.parameters.stages[at(index)];
    if (!entry.own_memory) binding.state = entry.state.in_plan(splits);
    rethrow_device_error_with_plan("the stages", [&] {
      if (binding.parameters != nullptr) {
        calling(fmt::format("stage {}, its parameters", index),
                [&] { allocate(*binding.parameters, setup, index); });
      }
      // As many slots as any plan has. Touches every page before the first step.
      const std::size_t bytes = binding.state.memory(at(setup.slots));
      const Buffer& states =
          slots->take({index, BufferKind::kState, setup.slots}, compute->memory(), bytes, 0, {})
              .device;
      fill_zero_async(states.data(), states.size(), compute->stream());
      setup.state = binding.state.cut(states.data(), 0);
      calling(fmt::format("stage {}, prepare()", index), [&] { stages[i]->prepare(setup); });
    });
    if (parameters() != binding.parameters) {
      throw_usage("stage {} has another ParameterSet after prepare() than before", index);
    }
    require_prepared(binding, entry);
    if (sharded != nullptr) sharded->add(binding);
    if (gives_gradients_back() && binding.parameters != nullptr) {
      give_back_pages(std::as_writable_bytes(binding.parameters->flat_grads()));  // zeros
    }
    bindings.push_back(binding);
  }
}

void PipelineParts::allocate(ParameterSet& set, const StageSetup& setup, int stage) {
  std::function<void(const Parameter&)> drawn;
  if (sharded != nullptr) sharded->place(set, stage);
  if (gradients != nullptr) {
    const GradientMemory places(layout, layout.place.here.pipeline, layout.place.here.replica);
    const auto place = std::ranges::find(places.places, stage, &std::pair<int, std::size_t>::first);
    ValueAccess::place_gradients(set, gradients->data() + place->second, gradients);
  }
  const bool in_parts = gives_gradients_back();
  if (sharded != nullptr || in_parts) {
    drawn = [this, in_parts](const Parameter& parameter) {
      if (in_parts) give_back_pages(std::as_writable_bytes(parameter.grad.floats()));  // zeros
      if (sharded != nullptr) sharded->drop_others(parameter);
    };
  }
  set.allocate(compute->memory(), setup.seed, setup.trains, drawn);
  if (sharded == nullptr) return;
  // Until add(): trial calls in prepare() make no copies.
  for (Parameter* each : set.all()) each->bf16_copy_is_current = true;
}

void PipelineParts::make_store() {
  std::vector<StateStore::Shelf> shelves;
  for (const StageBinding& binding : bindings) {
    shelves.push_back({.stage = binding.index,
                       .places = layout.plans.states_of(binding.index).stored,
                       .bytes = binding.state.kept()});
  }
  store = StateStore::make(options.offload, shelves, *compute);
}

std::unique_ptr<Engine> PipelineParts::make_engine(const Plan& plan, bool trains) {
  const RankPlan& mine = plan.ranks[at(layout.place.here.pipeline)];
  Collectives& replicas = *job.group(Axis::kReplica).collectives;
  const std::size_t bytes = PlannedCollectives::staged_bytes(layout, layout.place.here.pipeline,
                                                             !options.training.inference);
  if (compute->device().kind != DeviceKind::kCpu && staged.size() < bytes) {
    staged = HostBuffer(compute->device(), bytes);
  }
  return std::make_unique<Engine>(
      EngineConfig{.plan = &plan,
                   .rank = layout.place.here.pipeline,
                   .first_virtual_replica = layout.place.here.replica * layout.place.shares,
                   .edges = &layout.wires.edges,
                   .stages = bindings,
                   .compute = compute.get(),
                   .communicator = job.messages.get(),
                   .interrupt = job.engine_watch.get(),
                   .activity = job.activity.get(),
                   .piece_bytes = job.piece_bytes(),
                   .nccl = nccl != nullptr ? nccl->messages() : nullptr,
                   .routes = layout.wires.routes,
                   .collective = plan.forward_only ? nullptr : over_replicas.get(),
                   .tensor = over_tensor_ranks.get(),
                   .tensor_nccl = nccl != nullptr ? nccl->tensor() : nullptr,
                   .sums = plan.forward_only ? nullptr : &replicas.sums(),
                   .sharded = sharded.get(),
                   .gradients_in_parts = layout.parameters.gradients_in_parts,
                   .sums_each_micro_batch = layout.parameters.sums_each_micro_batch,
                   .progress_in_actions = options.expert.progress_in_actions,
                   .slots = slots,
                   .store = store.get(),
                   .staged = &staged,
                   .batch = device_batch.get(),
                   .cuda_graphs = trains && options.devices.cuda_graphs,
                   .trace_events = trains && options.checks.trace ? mine.ops.size() : 0});
}

Plan PipelineParts::plan_smaller(int micro_batches) const {
  Plan plan = plan_step(layout, options, micro_batches);
  for (int stage = 0; stage < layout.plans.num_stages(); ++stage) {
    const StepPlans::States needed = StepPlans::states_of(plan, stage);
    const StepPlans::States there = layout.plans.states_of(stage);
    if (there.has_room_for(needed)) continue;
    throw_usage(
        "schedule '{}' keeps {} micro-batches of stage {} in flight, and {} away from their "
        "device, "
        "for a step of {}, but {} and {} for the largest, of {}; take another number of "
        "micro-batches, or another schedule",
        plan.schedule_name, needed.slots, stage, needed.stored, micro_batches, there.slots,
        there.stored, layout.plans.train.micro_batches);
  }
  return plan;
}

void PipelineParts::need_size(UnitShape shape) {
  if (layout.wires.edges.has(shape)) return;
  add_size(job, *compute, *batches.source, stages, shape, layout);
}

double PipelineParts::check_batch(const BatchLoader::Batch& batch,
                                  std::span<const SampleRange> ranges, std::int64_t before,
                                  bool targets, int shares) {
  counted.assign(at(shares), 0);
  for (std::size_t m = 0; m < ranges.size(); ++m) {
    const SampleRange samples{ranges[m].first - before, ranges[m].count};
    if (layout.owns(0)) check_inputs(bindings.front(), batch.inputs[m], samples);
    if (targets && layout.owns(layout.plans.num_stages() - 1)) {
      counted[m * at(shares) / ranges.size()] +=
          check_targets(bindings.back(), batch.targets[m], samples);
    }
  }
  add_leaves(counted.size(),
             [&](std::size_t to, std::size_t from) { counted[to] += counted[from]; });
  return counted.front();
}

}  // namespace sluice
