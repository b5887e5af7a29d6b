// The layout of a job, which all ranks agree on before anything is allocated: the rank's place,
// plans, shapes and routes of every edge, owners of every parameter, bytes per rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <sluice/data.hpp>
#include <sluice/parameter.hpp>
#include <sluice/plan.hpp>
#include <sluice/stage.hpp>

#include "comm/base/byte_sums.hpp"
#include "comm/group/topology.hpp"
#include "runtime/layout/device_choice.hpp"
#include "runtime/layout/edge_route.hpp"
#include "runtime/layout/shard_groups.hpp"
#include "stages/network/state_bytes.hpp"
#include "stages/tensor/slice_runs.hpp"

namespace sluice {

// Consecutive elements of a parameter.
struct ElementRange {
  std::int64_t first = 0, count = 0;
  [[nodiscard]] std::int64_t end() const { return first + count; }
};
// What both have.
[[nodiscard]] ElementRange common_part(const ElementRange& a, const ElementRange& b);
// These elements, as a vector.
[[nodiscard]] Tensor elements_of(const Tensor& tensor, const ElementRange& range);

struct ParameterEntry {
  std::string name;
  std::int64_t elements = 0;  // of the slice
  bool tied = false;
  // What all its uses and all tensor ranks share: "[4, 2], initially normal 0.02", of the whole.
  std::string use = {};
  int unit = 0;                       // Parameter::unit
  Slice slice = {};                   // Parameter::slice
  std::vector<SlicePart> parts = {};  // Parameter::parts
  int shares = 0;                     // Parameter::shares
  bool copied = false;                // Parameter::bf16_copy on the stage's device
  bool overwritten = false;           // the first write of a step overwrites its gradient
  bool by_loss = false;               // Parameter::written_by_loss
  std::int64_t whole_elements = 0;
  bool updated = true;  // by an optimizer; not so what is frozen, and buffers
  // Where the parts that replicas update end, by ShardGroups::part_of(); each begins where the one
  // before it ends. Empty: all update the whole, or none does.
  std::vector<std::int64_t> ends = {};
  int copies = 1;  // ShardGroups::copies
  // What a replica updates, and what it has at rest where replicas have parts of the values.
  [[nodiscard]] ElementRange part(int replica) const;
  [[nodiscard]] ElementRange part_at_rest(int replica) const;
  [[nodiscard]] std::vector<PlacedPart> placed() const {
    return placed_parts(slice, parts, elements);
  }
  // [shard] Those that have elements here; one of all where shards do not divide it.
  [[nodiscard]] std::vector<ElementRange> shards() const;
};

// " cut into rows 0 to 3 of dimension 1"; empty of all.
[[nodiscard]] std::string cut_text(const ParameterEntry& entry);

struct StageEntry {
  std::vector<ParameterEntry> parameters;  // in the stage's order
  std::vector<ParameterEntry> buffers;     // likewise
  StateBytes state;                        // per slot, at the largest micro-batch
  std::size_t shared_gradient_bytes = 0;   // once where it is not
  std::size_t workspace_bytes = 0;
  std::size_t copy_bytes = 0;      // of parameters in another precision
  std::size_t operator_bytes = 0;  // of the scratch that a rank's operators share
  std::size_t table_bytes = 0;     // of operators' constants, also shared
  bool own_memory = false;         // StageDescription::own_memory
  bool state_moves = false;        // StageDescription::state_moves
  bool uses_units = false;         // StageDescription::uses_units
  bool weight_reads = true;        // StageDescription::weight_reads
  bool recomputes = false;         // StageDescription::recomputes
  std::string note;                // StageDescription::note
  StageCollectives collectives;    // of the largest micro-batch

  // Whether gradients are added up by shares, which are joined after the last backward.
  [[nodiscard]] bool has_shares() const;
};

// One use of a tied parameter.
struct TiedUse {
  int stage = 0;
  int index = 0;  // among the stage's parameters
};

// A parameter with several uses, in order; the first is the owner.
struct TiedParameter {
  std::string name;
  std::vector<TiedUse> uses;
  std::vector<EdgeRoute> routes;  // [use] to the owner's rank
};

// What one rank holds, in bytes; kTooManyBytes where a sum is larger. total() is on its device,
// every buffer rounded up to kBufferAlignment.
struct RankMemory {
  // Parameters with their copies in another precision.
  std::size_t parameters = 0, gradients = 0, optimizer = 0;
  std::size_t activations = 0;  // states of all slots
  // Messages, hand-overs, a GPU's copies of inputs and targets, and gradients that are received
  // from other ranks.
  std::size_t buffers = 0;
  std::size_t workspace = 0;      // the sum over stages
  std::size_t operators = 0;      // scratch and tables of operators and of the matmul library
  std::size_t libraries = 0;      // estimates of what NCCL and CUDA graphs allocate themselves
  std::size_t outside_arena = 0;  // of all these, what does not come from the rank's arena
  std::size_t save_copy = 0;      // in host memory: PipelineOptions' save_copy
  std::size_t collectives = 0;    // in host memory: of sums and collectives over ranks
  std::size_t disk = 0;           // of each save, at most: f32 values and optimizer state
  // Activations that are away from the device, in host memory and on the disk.
  std::size_t offloaded_host = 0, offloaded_disk = 0;
  std::size_t optimizer_disk = 0;  // the optimizer's state, of which `optimizer` is what passes
  [[nodiscard]] std::size_t total() const {
    return sum_of_bytes(
        {parameters, gradients, optimizer, activations, buffers, workspace, operators, libraries});
  }
  // In host memory, besides total() where that is the device's.
  [[nodiscard]] std::size_t host() const {
    return sum_of_bytes({save_copy, collectives, offloaded_host});
  }
  // What a GPU's rank takes in one piece before the first step (DeviceMemory).
  [[nodiscard]] std::size_t arena() const { return total() - outside_arena; }
};

// "parameters 1.5, ..., of these outside the rank's arena 0.5, in MiB".
[[nodiscard]] std::string to_string(const RankMemory& memory);

// Where this rank stands in the job.
struct RankPlace {
  Topology topology;
  std::string order_reason;  // RankArrangement::reason
  Place here;
  int shares = 1;  // virtual replicas that a replica computes: PipelineOptions::Shape
  int shards = 1;  // of the model: PipelineOptions::Shape::tensor_shards
  ShardGroups shard_groups;
  std::vector<RankDevice> devices;  // [pipeline rank], of this pipeline
  // [rank of the job] equal numbers for one host; in a planned job all are on one.
  std::vector<int> hosts;
  std::string driver_note;  // as describe_different_drivers(), of the job

  [[nodiscard]] int virtual_replicas() const { return topology.size.replica * shares; }
  // What has micro-batches of its own: "replica", or "virtual replica" where that is another thing.
  [[nodiscard]] const char* name_of_part() const {
    return shares == 1 ? "replica" : "virtual replica";
  }
  // Of the ranks of a group.
  [[nodiscard]] std::vector<int> hosts_of(const std::vector<int>& members) const {
    std::vector<int> of;
    for (const int rank : members) of.push_back(hosts[static_cast<std::size_t>(rank)]);
    return of;
  }
  [[nodiscard]] Device device() const {
    return devices[static_cast<std::size_t>(here.pipeline)].device;
  }
};

// What the largest training step, and the largest round of an evaluation, execute. Smaller ones are
// planned when they occur. Once a pipeline has their engines, plans have the list of its own rank
// alone.
struct StepPlans {
  // A longer evaluation runs in rounds.
  static constexpr std::size_t kRoundMicroBatches = 64;
  std::vector<SampleRange> micro_batches;  // of this replica, those of each share in turn
  Schedule order;                          // compute actions of `train`
  Plan train;                              // forward only in inference
  Plan forward;  // forward only; without ranks where the options announce no evaluation
  // States of micro-batches in flight, at once.
  struct States {
    int slots = 1;   // on the device
    int stored = 0;  // away from it
    void raise(const States& other) {
      slots = std::max(slots, other.slots);
      stored = std::max(stored, other.stored);
    }
    [[nodiscard]] bool has_room_for(const States& other) const {
      return other.slots <= slots && other.stored <= stored;
    }
  };
  // [stage] LowerOptions::resident; empty: nothing is offloaded.
  std::vector<int> resident;
  // [stage] Those of smaller steps, where a stage may have more of them then; empty: not known.
  std::vector<States> smaller;
  double bubble_ideal = 0;  // simulated share of a step in which ranks are idle
  bool cuda_graphs = false;

  [[nodiscard]] const Placement& placement() const { return train.placement; }
  [[nodiscard]] int num_stages() const { return placement().stages(); }
  [[nodiscard]] int first_rank() const { return placement().rank_of(0); }
  [[nodiscard]] int last_rank() const { return placement().rank_of(num_stages() - 1); }
  // Calls `visit(plan)` for `train` and `forward`.
  template <typename Visit>
  void for_each_plan(const Visit& visit) const {
    visit(train);
    if (!forward.ranks.empty()) visit(forward);
  }
  // The most of `stage`: in a plan, and over all of this.
  [[nodiscard]] static States states_of(const Plan& plan, int stage);
  [[nodiscard]] States states_of(int stage) const;
  // Whether the training plan splits backward into I and W.
  [[nodiscard]] bool splits_backward() const;
};

// The tensors between stages, and what carries them and the sums over replicas.
struct Wires {
  EdgeTable edges;
  std::vector<EdgeRoute> routes;  // [stage] to the stage before it
  std::vector<EdgeRoute> sums;    // [pipeline rank] over replicas; local where there are none
  // [pipeline rank] of collectives over tensor ranks; likewise.
  std::vector<EdgeRoute> tensor = {};
  bool all_reduce = false;  // NCCL's sums use its own order
  std::string carrier;      // of messages, as needs_of() takes it

  // Whether NCCL sums over the replicas of pipeline rank `rank`.
  [[nodiscard]] bool sums_by_nccl(int rank) const {
    return sums[static_cast<std::size_t>(rank)].kind == RouteKind::kNccl;
  }
  // Whether NCCL joins the tensor ranks of pipeline rank `rank`.
  [[nodiscard]] bool tensor_by_nccl(int rank) const {
    return tensor[static_cast<std::size_t>(rank)].kind == RouteKind::kNccl;
  }
  // Whether the sums over replicas go on beside computation: not where a GPU's pass through host
  // memory.
  [[nodiscard]] bool sums_overlap(int rank) const {
    return sums_by_nccl(rank) || sums[static_cast<std::size_t>(rank)].kind == RouteKind::kHost;
  }
};

struct ParameterTable {
  std::vector<StageEntry> stages;   // [global stage]
  std::vector<TiedParameter> tied;  // [group], the channel of REDUCE_TIED
  bool cut = false;                 // replicas update parts: cut_parameters()
  Gather gather = Gather::kNever;   // else replicas have parts of the values alone at rest
  // Replicas have what they update alone of gradients that a step has summed, before those of
  // another stage of the rank begin.
  bool gradients_in_parts = false;
  bool sums_each_micro_batch = false;  // GradientOrder::kMicroBatch

  // What a replica has of the values of parameter `index` of `stage` between steps.
  [[nodiscard]] ElementRange at_rest(int stage, int index, int replica) const {
    const ParameterEntry& entry =
        stages[static_cast<std::size_t>(stage)].parameters[static_cast<std::size_t>(index)];
    return gather == Gather::kNever ? ElementRange{0, entry.elements} : entry.part_at_rest(replica);
  }
  // Whether parameter `index` of `stage` is the first use of its name.
  [[nodiscard]] bool is_owner(int stage, int index) const;
};

// Memory of a GPU, of a control group or of a host, and the ranks that take it.
struct SharedMemory {
  enum class Of { kGpu, kGroup, kHost } of = Of::kHost;
  std::vector<int> ranks;  // of the job
  std::size_t needed = 0, available = kTooManyBytes;
  [[nodiscard]] bool is_enough() const { return needed <= available && needed < kTooManyBytes; }
};

struct MemoryTable {
  // [pipeline rank * tensors + tensor coordinate], of any replica.
  std::vector<RankMemory> ranks;
  int tensors = 1;
  std::size_t operator_bytes = 0;  // this rank's scratch for operators: ComputeContext::workspace()
  std::size_t save_bytes = 0;      // of a whole save: f32 values and optimizer state
  std::vector<SharedMemory> shared = {};  // in an order that the devices alone determine

  [[nodiscard]] const RankMemory& of(const Place& place) const {
    const int index = place.pipeline * tensors + place.tensor;
    return ranks[static_cast<std::size_t>(index)];
  }
};

struct JobLayout {
  RankPlace place;
  // As ComputeContext::arithmetic(), with the ranks of the job that compute so; of GPUs nothing.
  std::map<std::string, std::vector<int>> arithmetic;
  StepPlans plans;
  Wires wires;
  ParameterTable parameters;
  // [tensor coordinate] The tables of the ranks that share this pipeline's stages, its own too;
  // empty where there is one.
  std::vector<ParameterTable> tensor_parameters;
  MemoryTable memory;

  [[nodiscard]] const ParameterTable& parameters_at(int tensor) const {
    return tensor_parameters.empty() ? parameters
                                     : tensor_parameters[static_cast<std::size_t>(tensor)];
  }
  [[nodiscard]] bool owns(int stage) const {
    return plans.placement().rank_of(stage) == place.here.pipeline;
  }
  // Whether NCCL carries messages or tied parameters between ranks of the pipeline.
  [[nodiscard]] bool nccl_in_pipeline() const;
};

}  // namespace sluice
