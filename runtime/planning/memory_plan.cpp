#include "runtime/planning/memory_plan.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <map>
#include <ranges>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <sluice/error.hpp>
#include <sluice/options.hpp>

#include "comm/base/byte_sums.hpp"
#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/group/host_sums.hpp"
#include "runtime/engine/planned_collectives.hpp"
#include "runtime/engine/recorded_calls.hpp"
#include "runtime/engine/slots.hpp"
#include "runtime/engine/state_store.hpp"
#include "runtime/gradients/gradient_folds.hpp"
#include "runtime/gradients/gradient_sums.hpp"
#include "runtime/gradients/offloaded_state.hpp"
#include "runtime/group/group_collective.hpp"
#include "runtime/group/nccl_routes.hpp"
#include "runtime/layout/parameter_cut.hpp"
#include "runtime/layout/save_shares.hpp"
#include "runtime/layout/sharded_memory.hpp"
#include "schedules/plan/collectives.hpp"
#include "stages/operators/context.hpp"
#include "stages/operators/optimizer.hpp"

namespace sluice {
namespace {

std::size_t padded(std::size_t bytes) { return round_up(bytes, kBufferAlignment); }

// Adds up the memory of one rank, part by part.
class MemorySum {
 public:
  MemorySum(const JobLayout& layout, const PipelineOptions& options, int rank)
      : layout_(layout),
        options_(options),
        rank_(rank),
        device_(layout.place.devices[at(rank)].device.kind) {}

  [[nodiscard]] const RankMemory& memory() const { return memory_; }
  [[nodiscard]] std::size_t operator_bytes() const { return operator_bytes_; }

  // Plans share the memory of messages, by stage and kind: they never run at the same time.
  void add_messages() {
    std::map<std::pair<int, BufferKind>, std::size_t> largest;
    layout_.plans.for_each_plan([&](const Plan& plan) {
      for (const BufferPool& pool : plan.ranks[at(rank_)].pools) {
        std::size_t& bytes = largest[{pool.stage, pool.kind}];
        bytes = std::max(bytes, SlotPool::bytes(pool, layout_.wires.edges));
      }
    });
    for (const auto& [pool, bytes] : largest) add_bytes(memory_.buffers, bytes);
  }

  // A GPU has a copy of every micro-batch's inputs and targets.
  void add_batches(const DataSource& source) {
    if (device_ == DeviceKind::kCpu) return;
    std::size_t micro_batch = 0;
    if (rank_ == layout_.plans.first_rank()) {
      for (const EdgeTensor& input : layout_.wires.edges.inputs(layout_.wires.edges.largest(), 0)) {
        add_bytes(micro_batch, padded(input.spec.bytes()));
      }
    }
    if (rank_ == layout_.plans.last_rank() && !options_.training.inference) {
      for (const TensorSpec& target : source.target_specs(layout_.wires.edges.largest().samples)) {
        add_bytes(micro_batch, padded(target.bytes()));
      }
    }
    int most = 0;
    layout_.plans.for_each_plan(
        [&](const Plan& plan) { most = std::max(most, plan.micro_batches); });
    add_bytes(memory_.buffers, multiply_bytes(micro_batch, at(most)));
  }

  void add_graphs() {
    if (!layout_.plans.cuda_graphs || device_ == DeviceKind::kCpu) return;
    add_bytes(memory_.buffers, padded(RecordedCalls::kDeviceBytes));
    // The driver keeps a graph's kernels on the device: some hundreds, of about a kilobyte each.
    constexpr std::size_t kGraph = std::size_t{256} << 10;
    for (const PlanOp& op : layout_.plans.train.ranks[at(rank_)].ops) {
      if (op.kind == OpKind::kCompute) add_libraries(kGraph);
    }
  }

  void add_stages() {
    const PipelineOptions::Training& training = options_.training;
    // Training keeps a copy of buffers until a step is done, and sums over virtual replicas.
    const std::size_t sums = at(TreeSum::levels(training.inference ? 1 : layout_.place.shares));
    std::size_t tables = 0;
    const bool sharded = layout_.parameters.gather != Gather::kNever;
    std::vector<std::size_t> optimizer(at(layout_.place.topology.size.replica));  // [replica]
    for (const int stage : layout_.plans.placement().stages_of(rank_)) {
      const StageEntry& entry = layout_.parameters.stages[at(stage)];
      std::set<std::string_view> names;
      for (std::size_t i = 0; i < entry.parameters.size(); ++i) {
        const std::int64_t elements = entry.parameters[i].elements;
        const bool is_new = names.insert(entry.parameters[i].name).second;
        if (training.inference && !is_new) continue;  // ParameterSet::allocate()
        if (!sharded) add_bytes(memory_.parameters, parameter_bytes(elements));
        if (training.inference) continue;
        add_bytes(memory_.gradients,
                  multiply_bytes(parameter_bytes(elements), sums + at(entry.parameters[i].shares)));
        if (!layout_.parameters.is_owner(stage, static_cast<int>(i))) continue;
        if (training.make_optimizer || !entry.parameters[i].updated) continue;
        for (std::size_t r = 0; r < optimizer.size(); ++r) {
          const ElementRange part = entry.parameters[i].part(static_cast<int>(r));
          add_bytes(optimizer[r], optimizer_bytes(training.optimizer, part.count));
        }
      }
      std::size_t buffers = 0;
      for (const ParameterEntry& buffer : entry.buffers)
        add_bytes(buffers, parameter_bytes(buffer.elements));
      add_bytes(memory_.parameters, multiply_bytes(buffers, training.inference ? 1 : 2 + sums));
      const bool splits = layout_.plans.splits_backward();
      const StepPlans::States states = layout_.plans.states_of(stage);
      const std::size_t activations = entry.state.in_plan(splits).memory(at(states.slots));
      const std::size_t workspace = sum_of_bytes(
          {padded(entry.workspace_bytes), splits ? 0 : padded(entry.shared_gradient_bytes)});
      std::size_t copies = padded(entry.copy_bytes);
      if (sharded) {  // but those of add_sharded()
        for (const ParameterEntry& each : entry.parameters) {
          copies -= std::min(copies, copy_bytes(each));
        }
      }
      add_bytes(memory_.parameters, copies);
      add_bytes(memory_.activations, activations);
      add_bytes(memory_.workspace, workspace);
      add_bytes(options_.offload.activations == PipelineOptions::Offload::To::kHost
                    ? memory_.offloaded_host
                    : memory_.offloaded_disk,
                multiply_bytes(entry.state.kept(), at(states.stored)));
      if (entry.own_memory)
        add_bytes(memory_.outside_arena, sum_of_bytes({copies, activations, workspace}));
      operator_bytes_ = std::max(operator_bytes_, entry.operator_bytes);
      tables = std::max(tables, entry.table_bytes);
    }
    if (!training.inference) add_gradients(optimizer);
    if (sharded) add_sharded();
    memory_.operators =
        sum_of_bytes({padded(operator_bytes_), padded(tables), library_bytes(device_)});
  }

  void add_saves(const std::vector<SavedParameter>& shares) {
    const auto saved = [&](std::size_t state) {
      return most_saved_bytes(shares, {.pipeline = rank_, .tensor = layout_.place.here.tensor},
                              layout_.place.topology.size.replica, state);
    };
    memory_.disk = saved(state_bytes_per_element(options_.training.optimizer));
    if (!options_.expert.save_copy) return;
    memory_.save_copy = offloads_optimizer() ? saved(0) + state_access_ : memory_.disk;
  }

  // The page-locked memory through which a GPU's states go to a file.
  void add_staging() {
    if (device_ == DeviceKind::kCpu || memory_.offloaded_disk == 0) return;
    add_bytes(memory_.offloaded_host, StateStore::kStagedBytes);
  }

  // What sums over replicas, and collectives within actions, take beside their values.
  void add_collectives() {
    const bool trains = !options_.training.inference;
    const auto on_host = [&](const PlannedCollective& each, Axis axis) {
      return PlannedCollectives::axis_of(each) == axis &&
             PlannedCollectives::through_host(each, layout_, rank_);
    };
    for (const Axis axis : {Axis::kReplica, Axis::kTensor}) {
      const int ranks = layout_.place.topology.size[axis];
      if (ranks == 1 || (axis == Axis::kReplica && !trains)) continue;
      GroupCollective::Memory within;
      std::size_t summed = 0;  // bytes, of one sum of gradients, of shares or of a buffer's means
      for (const int stage : layout_.plans.placement().stages_of(rank_)) {
        const StageEntry& entry = layout_.parameters.stages[at(stage)];
        for (const ActionKind kind :
             {ActionKind::kForward, ActionKind::kBackward, ActionKind::kRecompute}) {
          if (kind != ActionKind::kForward && !trains) continue;
          for (const PlannedCollective& each : collectives_of(entry.collectives, kind, !trains)) {
            if (on_host(each, axis)) within.raise(each, at(ranks));
          }
        }
        for (const PlannedCollective& each : entry.collectives.answer) {
          if (!trains && on_host(each, axis)) within.raise(each, at(ranks));
        }
        if (trains) {
          summed = std::max(summed,
                            axis == Axis::kReplica ? summed_by_host(entry) : bytes_of_share(entry));
        }
      }
      if (device_ != DeviceKind::kCpu) add_bytes(memory_.collectives, summed);  // through a copy
      const std::size_t values = std::max(summed / sizeof(float), within.summed);
      add_bytes(memory_.collectives, sum_of_bytes({within.bytes(), bytes_of_sums(axis, values)}));
    }
    if (device_ == DeviceKind::kCpu) return;
    add_bytes(memory_.collectives, PlannedCollectives::staged_bytes(layout_, rank_, trains));
  }

  // The receive buffer for gradients of tied parameters, which arrive one at a time.
  void add_ties() {
    if (options_.training.inference) return;
    std::size_t largest = 0;
    const auto rank_of = [&](const TiedUse& use) {
      return layout_.plans.placement().rank_of(use.stage);
    };
    for (const TiedParameter& tie : layout_.parameters.tied) {
      const TiedUse& owner = tie.uses.front();
      if (rank_of(owner) != rank_) continue;
      for (const TiedUse& use : tie.uses) {
        if (rank_of(use) == rank_) continue;
        const StageEntry& entry = layout_.parameters.stages[at(owner.stage)];
        largest = std::max(largest, parameter_bytes(entry.parameters[at(owner.index)].elements));
      }
    }
    add_bytes(memory_.buffers, largest);
  }

  // What communicators of NCCL take: estimates, not measured. Those of messages have few blocks and
  // one peer; before NCCL 2.22 they take more, because it connects what no message needs.
  void add_nccl() {
    constexpr std::size_t kOfMessages = std::size_t{128} << 20, kOfSums = std::size_t{512} << 20;
    if (device_ == DeviceKind::kCpu) return;
    const bool sums = layout_.wires.sums_by_nccl(rank_);
    const bool tensor = layout_.wires.tensor_by_nccl(rank_);
    add_libraries(kOfMessages * at(NcclRoutes::message_communicators(layout_, rank_)) +
                  kOfSums * ((sums ? 1 : 0) + (tensor ? 1 : 0)));
    if (tensor) {
      add_bytes(memory_.buffers, padded(PlannedCollectives::nccl_floats(
                                            layout_, rank_, !options_.training.inference) *
                                        sizeof(float)));
    }
    if (!sums) return;
    const SumLoad load = GradientSums::load_of(layout_, rank_, options_.expert.bucket_bytes);
    add_bytes(memory_.buffers,
              padded(NcclRoutes::sum_bytes(load, layout_.place.topology.size.replica,
                                           layout_.wires.all_reduce)));
  }

 private:
  // `bytes`: of the state of the replica that has most.
  void add_optimizer(std::size_t bytes) {
    memory_.optimizer = bytes;
    if (!offloads_optimizer()) return;
    const auto sizes =
        OffloadedState::Sizes::of(options_.training.optimizer, bytes, options_.offload.pool);
    memory_.optimizer = sizes.memory();
    memory_.optimizer_disk = sizes.disk();
    state_access_ = sizes.access();
  }
  [[nodiscard]] bool offloads_optimizer() const {
    return !options_.training.inference &&
           options_.offload.optimizer != PipelineOptions::Offload::To::kNowhere;
  }

  // Parameters of which each replica has a part: of the one that needs most.
  void add_sharded() {
    std::size_t most = 0;
    for (int r = 0; r < layout_.place.topology.size.replica; ++r) {
      const ShardedMemory sharded(layout_, rank_, r);
      most = std::max(most, PartialMemory::bytes_for(device_, sharded.bytes, sharded.ranges));
    }
    if (device_ == DeviceKind::kCpu) {
      add_bytes(most, gathered_bytes());
    } else {
      add_bytes(memory_.outside_arena, most);
    }
    add_bytes(memory_.parameters, most);
  }

  // On a CPU, what is there of other replicas' parts, at most.
  [[nodiscard]] std::size_t gathered_bytes() const {
    std::map<int, std::size_t> stages;
    std::vector<std::size_t> units;
    std::size_t lent = 0;  // values of one parameter, between steps
    for (const int stage : layout_.plans.placement().stages_of(rank_)) {
      const StageEntry& entry = layout_.parameters.stages[at(stage)];
      for (const ShardedUnit& unit : sharded_units(entry)) {
        std::size_t least = unit.bytes();
        for (int r = 0; r < layout_.place.topology.size.replica; ++r) {
          least = std::min(least, unit.own_bytes(r));
        }
        units.push_back(unit.bytes() - least);
        add_bytes(stages[stage], units.back());
      }
      for (const ParameterEntry& each : entry.parameters) {
        if (!each.ends.empty()) lent = std::max(lent, parameter_bytes(each.elements));
      }
    }
    if (layout_.parameters.gather == Gather::kPerUse) {
      std::ranges::sort(units, std::greater<>());
      std::size_t both = 0;
      for (std::size_t i = 0; i < std::min<std::size_t>(units.size(), 2); ++i) {
        add_bytes(both, units[i]);
      }
      return std::max(lent, both);
    }
    std::size_t most = lent;
    layout_.plans.for_each_plan([&](const Plan& plan) {
      std::size_t now = 0;
      for (const PlanOp& op : plan.ranks[at(rank_)].ops) {
        if (op.kind == OpKind::kUnshard) add_bytes(now, stages[op.stage]);
        if (op.kind == OpKind::kReshard) now -= stages[op.stage];
        most = std::max(most, now);
      }
    });
    return most;
  }

  // `optimizer`: [replica].
  void add_gradients(const std::vector<std::size_t>& optimizer) {
    const std::vector<std::size_t> sums = sums_on_gpu();
    std::size_t fullest = 0;
    for (std::size_t r = 1; r < sums.size(); ++r) {
      if (optimizer[r] + sums[r] > optimizer[fullest] + sums[fullest]) fullest = r;
    }
    add_optimizer(optimizer[fullest]);
    add_bytes(memory_.gradients, sums[fullest]);
    if (!layout_.parameters.sums_each_micro_batch || device_ == DeviceKind::kCpu) {
      return add_bytes(memory_.gradients, gradient_bytes());
    }
    std::size_t most = 0;
    for (int r = 0; r < layout_.place.topology.size.replica; ++r) {
      const GradientMemory of(layout_, rank_, r);
      most = std::max(most, PartialMemory::bytes_for(device_, of.bytes, of.ranges));
    }
    add_bytes(memory_.outside_arena, most);
    add_bytes(memory_.gradients, most);
  }
  // Of the stages' flat gradients: what is there at once, at most. Where replicas keep parts, a
  // stage has all from its first write to the end of its sum, for which the next stage's first
  // write waits.
  [[nodiscard]] std::size_t gradient_bytes() const {
    if (layout_.parameters.sums_each_micro_batch) return micro_batch_bytes();
    if (!layout_.parameters.gradients_in_parts) return gradient_bytes(0, {});
    std::vector<GradientEvent> events;
    std::set<int> written;
    for (const PlanOp& op : layout_.plans.train.ranks[at(rank_)].ops) {
      if (op.kind == OpKind::kReduceGrad) events.push_back({op.stage, /*sum=*/true});
      if (op.kind != OpKind::kCompute || !may_write_gradients(op)) continue;
      if (written.insert(op.stage).second) events.push_back({op.stage, /*sum=*/false});
    }
    std::size_t most = 0;
    for (int replica = 0; replica < layout_.place.topology.size.replica; ++replica) {
      most = std::max(most, gradient_bytes(replica, events));
    }
    return most;
  }
  // A stage's sum has started, or else its first write comes.
  struct GradientEvent {
    int stage = 0;
    bool sum = false;
  };
  [[nodiscard]] std::size_t gradient_bytes(int replica,
                                           const std::vector<GradientEvent>& events) const {
    std::size_t now = 0;
    std::map<int, std::size_t> others, away;  // parts of them, and what of these is not there
    for (const int stage : layout_.plans.placement().stages_of(rank_)) {
      for (const ParameterEntry& each : layout_.parameters.stages[at(stage)].parameters) {
        std::size_t own = parameter_bytes(each.elements);
        if (layout_.parameters.gradients_in_parts && !each.ends.empty()) {
          const auto count = static_cast<std::size_t>(each.part(replica).count);
          add_bytes(others[stage], own - count * sizeof(float));
          if (each.overwritten) add_bytes(away[stage], own - count * sizeof(float));
          if (each.overwritten) own = count * sizeof(float);
        }
        add_bytes(now, own);
      }
    }
    std::size_t most = now, summed = 0;
    for (const GradientEvent& event : events) {
      if (event.sum) {
        add_bytes(summed, others[event.stage]);
        continue;
      }
      now -= std::exchange(summed, 0);
      add_bytes(now, away[event.stage]);
      most = std::max(most, now);
    }
    return most;
  }
  // On a GPU, [replica] the sums of each micro-batch.
  [[nodiscard]] std::vector<std::size_t> sums_on_gpu() const {
    std::vector<std::size_t> sums(at(layout_.place.topology.size.replica));
    if (!layout_.parameters.sums_each_micro_batch || device_ == DeviceKind::kCpu) return sums;
    for (const int stage : layout_.plans.placement().stages_of(rank_)) {
      const auto units = unit_ranges_of(layout_.parameters.stages[at(stage)]);
      for (std::size_t r = 0; r < sums.size(); ++r) {
        std::size_t floats = 0;
        for (const std::vector<CutRange>& unit : units) {
          for (const CutRange& each : unit) floats += each.of(static_cast<int>(r)).size();
        }
        add_bytes(sums[r], padded(floats * sizeof(float)));
      }
    }
    return sums;
  }
  // Own parts of sums, and of a stage that computes the units that it writes and adds at a time.
  [[nodiscard]] std::size_t micro_batch_bytes() const {
    std::vector<std::size_t> own(at(layout_.place.topology.size.replica));
    std::size_t others = 0, most = 0;  // of those that are not updated; of a stage
    for (const int stage : layout_.plans.placement().stages_of(rank_)) {
      const StageEntry& entry = layout_.parameters.stages[at(stage)];
      std::map<int, std::size_t> units;
      for (const ParameterEntry& each : entry.parameters) {
        const std::size_t whole = parameter_bytes(each.elements);
        if (each.ends.empty()) add_bytes(others, whole);
        if (each.ends.empty()) continue;
        add_bytes(units[entry.uses_units ? each.unit : 0], whole);
        for (std::size_t r = 0; r < own.size(); ++r) {
          const auto count = static_cast<std::size_t>(each.part(static_cast<int>(r)).count);
          add_bytes(own[r], count * sizeof(float));
        }
      }
      std::size_t before = 0;
      for (const auto& [unit, bytes] : units) {
        most = std::max(most, sum_of_bytes({std::exchange(before, bytes), bytes}));
      }
    }
    return sum_of_bytes({*std::max_element(own.begin(), own.end()), others, most});
  }
  // A loss writes gradients in its F.
  [[nodiscard]] bool may_write_gradients(const PlanOp& op) const {
    return op.action == ActionKind::kBackward || op.action == ActionKind::kBackwardWeight ||
           (op.action == ActionKind::kForward && op.stage + 1 == layout_.plans.num_stages());
  }

  // The most values of a stage that HostSums adds at a time, in bytes.
  [[nodiscard]] std::size_t summed_by_host(const StageEntry& stage) const {
    std::size_t gradients = 0, most = 0;
    for (const ParameterEntry& each : stage.parameters) {
      add_bytes(gradients, parameter_bytes(each.elements));
    }
    for (const ParameterEntry& each : stage.buffers) {
      most = std::max(most, sizeof(float) * static_cast<std::size_t>(each.elements));
    }
    return layout_.wires.sums_by_nccl(rank_) ? most : std::max(most, gradients);
  }

  // What ShareSums adds over tensor ranks at a time.
  static std::size_t bytes_of_share(const StageEntry& stage) {
    std::size_t bytes = 0;
    for (const ParameterEntry& each : stage.parameters) {
      if (each.shares > 0) add_bytes(bytes, parameter_bytes(each.elements));
    }
    return bytes;
  }

  // Of HostSums of `values` along `axis`: of the replica that needs most.
  [[nodiscard]] std::size_t bytes_of_sums(Axis axis, std::size_t values) const {
    const Topology& topology = layout_.place.topology;
    std::size_t most = 0;
    for (int replica = 0; values > 0 && replica < topology.size.replica; ++replica) {
      const Place place = {
          .pipeline = rank_, .replica = replica, .tensor = layout_.place.here.tensor};
      const std::vector<int> hosts = layout_.place.hosts_of(topology.group(axis, place));
      most = std::max(most, HostSums::bytes_for(hosts, place[axis], values));
      if (axis == Axis::kReplica && on_one_host(hosts)) break;  // all replicas need the same
    }
    return most;
  }
  static bool on_one_host(const std::vector<int>& hosts) {
    return std::equal(hosts.begin() + 1, hosts.end(), hosts.begin());
  }

  // What libraries allocate themselves.
  void add_libraries(std::size_t bytes) {
    add_bytes(memory_.libraries, bytes);
    add_bytes(memory_.outside_arena, bytes);
  }

  const JobLayout& layout_;
  const PipelineOptions& options_;
  int rank_;
  DeviceKind device_;
  RankMemory memory_;
  std::size_t operator_bytes_ = 0;  // MemoryTable::operator_bytes
  std::size_t state_access_ = 0;    // OffloadedState::Sizes::access()
};

double mebi(std::size_t bytes) { return static_cast<double>(bytes) / (1024 * 1024); }

}  // namespace

MemoryTable plan_memory(const JobLayout& layout, const PipelineOptions& options,
                        const DataSource& source) {
  MemoryTable table;
  const std::vector<SavedParameter> shares = share_saves(layout);
  const std::size_t state = state_bytes_per_element(options.training.optimizer);
  for (const SavedParameter& share : shares) {
    add_bytes(table.save_bytes, multiply_bytes(sizeof(float) + (share.has_state() ? state : 0),
                                               static_cast<std::size_t>(share.elements)));
  }
  for (int rank = 0; rank < layout.place.topology.size.pipeline; ++rank) {
    MemorySum sum(layout, options, rank);
    sum.add_messages();
    sum.add_batches(source);
    sum.add_stages();
    sum.add_staging();
    sum.add_saves(shares);
    sum.add_collectives();
    sum.add_ties();
    sum.add_nccl();
    sum.add_graphs();
    table.ranks.push_back(sum.memory());
    if (rank == layout.place.here.pipeline) table.operator_bytes = sum.operator_bytes();
  }
  return table;
}

std::vector<SharedMemory> shared_memory(const std::vector<RankDevice>& devices,
                                        const Topology& topology, const MemoryTable& memory) {
  using Of = SharedMemory::Of;
  // By kind, machine and which one there.
  std::map<std::tuple<Of, std::string, std::string>, SharedMemory> all;
  for (std::size_t rank = 0; rank < devices.size(); ++rank) {
    const RankDevice& device = devices[rank];
    const bool on_cpu = device.device.kind == DeviceKind::kCpu;
    const RankMemory& planned = memory.of(topology.place_of(static_cast<int>(rank)));
    const auto add = [&](Of of, const std::string& which, std::size_t needed,
                         std::size_t available) {
      SharedMemory& shared = all[{of, device.machine, which}];
      shared.of = of;
      shared.ranks.push_back(static_cast<int>(rank));
      add_bytes(shared.needed, needed);
      if (available > 0 || of == Of::kGpu) shared.available = std::min(shared.available, available);
    };
    const std::size_t of_host = sum_of_bytes({on_cpu ? planned.total() : 0, planned.host()});
    if (!on_cpu) add(Of::kGpu, device.identity, planned.total(), device.free_memory);
    if (!device.memory_group.empty()) {
      add(Of::kGroup, device.memory_group, of_host, device.allowed_memory);
    }
    add(Of::kHost, "", of_host, device.host_memory);
  }
  std::vector<SharedMemory> list;
  for (auto& [key, shared] : all) list.push_back(std::move(shared));
  return list;
}

void require_memory(const std::vector<RankDevice>& devices, const Topology& topology,
                    const MemoryTable& memory) {
  using Of = SharedMemory::Of;
  for (const SharedMemory& shared : memory.shared) {
    if (shared.is_enough()) continue;
    std::map<std::string, std::vector<int>> alike;
    for (const int rank : shared.ranks) {
      alike[to_string(memory.of(topology.place_of(rank)))].push_back(rank);
    }
    std::map<int, std::string> tables;  // by the first of their ranks
    for (const auto& [table, ranks] : alike) {
      tables[ranks[0]] = fmt::format("{} {}: {}", ranks.size() == 1 ? "rank" : "each of ranks",
                                     joined(ranks, ", "), table);
    }
    const int rank = shared.ranks.front();
    const RankDevice& first = devices[at(rank)];
    throw Error(ErrorCode::kDevice,
                fmt::format("rank {} on {}: {} has {:.1f} MiB{}, but the plan needs {:.1f} MiB of "
                            "it ({}); a smaller --micro-batch-size, more ranks in the pipeline{} "
                            "or another schedule need less; --dry-run lists what else does",
                            rank, first.host,
                            shared.of == Of::kGpu    ? to_string(first.device)
                            : shared.of == Of::kHost ? "the host"
                                                     : "its control group",
                            mebi(shared.available), shared.of == Of::kGpu ? " free" : "",
                            mebi(shared.needed), joined(std::views::values(tables), "; "),
                            shared.of == Of::kGpu ? "" : " on other hosts"),
                rank);
  }
}

void require_within(std::size_t limit, const MemoryTable& memory, std::string_view advice) {
  const auto most = std::ranges::max_element(memory.ranks, {}, &RankMemory::total);
  if (limit == 0 || most->total() <= limit) return;
  const auto rank = static_cast<int>(most - memory.ranks.begin());
  const std::pair<const char*, std::size_t> parts[] = {
      {"parameters", most->parameters}, {"gradients", most->gradients},
      {"optimizer", most->optimizer},   {"activations", most->activations},
      {"workspace", most->workspace},   {"operators", most->operators},
      {"messages", most->buffers},      {"libraries", most->libraries}};
  const auto& [part, bytes] =
      *std::ranges::max_element(parts, {}, &std::pair<const char*, std::size_t>::second);
  throw_usage(
      "option --memory: {:.1f} MiB a rank, but {:.1f} MiB are needed on pipeline rank {}{}, "
      "most of it for {} with {:.1f} MiB; {}",
      mebi(limit), mebi(most->total()), rank / memory.tensors,
      memory.tensors == 1 ? "" : fmt::format(", tensor rank {}", rank % memory.tensors), part,
      mebi(bytes), advice);
}

}  // namespace sluice
