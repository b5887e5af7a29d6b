// Layout: who does what, agreed on by all ranks before anything is allocated: topology, schedule,
// plans, shapes of every edge, owners of every parameter, bytes per rank.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/control.hpp"
#include "comm/topology.hpp"
#include "runtime/data.hpp"
#include "runtime/edges.hpp"
#include "schedules/plan.hpp"
#include "stages/optimizer.hpp"
#include "stages/stage.hpp"

namespace sluice {

// Makes global stage `stage` of `stages`; called on the owning rank only.
using StageFactory = std::function<std::unique_ptr<Stage>(int stage, int stages)>;

struct PipelineOptions {
  int pipeline = 0;  // p; 0: all ranks / replicas
  int replicas = 1;  // d
  RankOrder rank_order = RankOrder::kPipelineFirst;
  std::string schedule = "1f1b";
  int chunks = 1;
  int micro_batches = 1;
  std::int64_t micro_batch_size = 1;  // samples
  std::int64_t batch_size = 0;        // samples per step over all replicas; 0: d * m * size
  std::uint64_t seed = 1;
  int threads = 1;
  OptimizerConfig optimizer = {};
  LearningRate learning_rate = {};
  double clip = 0;                             // of the global gradient norm; 0: off
  std::vector<std::int64_t> evaluations = {};  // sample counts that evaluate() may be asked for
  std::uint64_t check_replicas = 0;  // compare replicas and tied copies every that many steps
  bool inference = false;            // infer() only: no gradients are computed
  bool trace = false;
  // More values that must agree on all ranks, by name.
  std::vector<std::pair<std::string, std::string>> configuration = {};
};

struct ParameterEntry {
  std::string name;
  std::int64_t elements = 0;
  bool tied = false;
};

struct StageEntry {
  std::vector<ParameterEntry> parameters;  // in the stage's order
  std::size_t state_bytes = 0;             // per slot, at the largest micro-batch
  std::size_t split_bytes = 0;             // more per slot where I and W are parted
  std::size_t workspace_bytes = 0;
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
};

// What one rank of a pipeline holds, in bytes.
struct RankMemory {
  std::size_t parameters = 0, gradients = 0, optimizer = 0;
  std::size_t activations = 0;  // states of all slots
  std::size_t buffers = 0;      // messages and hand-overs
  std::size_t workspace = 0;
  [[nodiscard]] std::size_t total() const {
    return parameters + gradients + optimizer + activations + buffers + workspace;
  }
};

// Forward-only plans over `samples` samples, in rounds of at most kRoundMicroBatches and a rest.
// Replicas may differ in their number of micro-batches; one whose share is empty has none.
struct EvaluationPlan {
  static constexpr std::size_t kRoundMicroBatches = 64;
  std::int64_t samples = 0;
  std::vector<SampleRange> micro_batches;  // of this replica
  Plan round, rest;                        // no ranks where there is none
};

struct PipelineLayout {
  Topology topology;
  int rank = 0, replica = 0;               // of the pipeline; which replica
  std::vector<SampleRange> micro_batches;  // of this replica
  Plan train;                              // forward only in inference
  std::vector<EvaluationPlan> evaluations;
  EdgeTable edges;
  std::vector<StageEntry> stages;   // [global stage]
  std::vector<TiedParameter> tied;  // group index of plan ops
  std::vector<RankMemory> memory;   // [pipeline rank]
  double bubble_ideal = 0;

  [[nodiscard]] int num_stages() const { return train.placement.stages(); }
  [[nodiscard]] bool owns(int stage) const { return train.placement.rank_of(stage) == rank; }
  [[nodiscard]] int first_rank() const { return train.placement.rank_of(0); }
  [[nodiscard]] int last_rank() const { return train.placement.rank_of(num_stages() - 1); }
  // Does the training plan part I and W?
  [[nodiscard]] bool splits_backward() const;
  // Is parameter `index` of `stage` its name's owner?
  [[nodiscard]] bool is_owner(int stage, int index) const;
};

// The communicators and error handling of one pipeline's job.
class JobGroups {
 public:
  // Collective over `world`. Compares options.configuration and the layout's own options first.
  JobGroups(Communicator& world, const PipelineOptions& options);

  // Runs `body`; an exception in it is told to every rank, and what is thrown here, on every rank,
  // is the Error that came first.
  void guarded(const std::function<void()>& body);

  Topology topology;
  int rank = 0, replica = 0;            // pipeline rank; replica
  std::unique_ptr<Communicator> world;  // for collectives
  std::unique_ptr<ControlChannel> control;
  std::unique_ptr<Communicator> pipeline;  // for collectives
  std::unique_ptr<Communicator> messages;  // the same ranks, for the engine's transport
  std::unique_ptr<Communicator> replicas;
  std::unique_ptr<Collectives> in_world, in_pipeline, in_replicas;
};

struct BuiltLayout {
  PipelineLayout layout;
  std::vector<std::unique_ptr<Stage>> stages;  // of this rank, ascending
};

// Collective. Makes this rank's stages (nothing allocated), plans, verifies, and exchanges shapes
// and parameters. Throws Error(kUsage) for what cannot work, Error(kPlan) for a schedule or plan
// that breaks a rule.
[[nodiscard]] BuiltLayout build_layout(JobGroups& groups, const PipelineOptions& options,
                                       const StageFactory& make_stage, const DataSource& source);

// Compares named values over all ranks of `comm`; throws the same Error(kMismatch) on all of them,
// naming the first key that differs, the rank that differs from rank 0, and both values.
void require_same_configuration(Collectives& comm,
                                const std::vector<std::pair<std::string, std::string>>& values);

}  // namespace sluice
