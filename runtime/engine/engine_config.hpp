// What an engine works with, and the times that it measures. The caller owns everything that is
// named here; it outlives the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <sluice/plan.hpp>

#include "comm/group/communicator.hpp"
#include "comm/group/host_sums.hpp"
#include "comm/group/transport.hpp"
#include "comm/group/waiter.hpp"
#include "runtime/engine/stage_binding.hpp"
#include "runtime/layout/edge_route.hpp"

namespace sluice {

class ActivityBoard;  // runtime/group/activity.hpp
class DeviceBatch;    // runtime/engine/device_batch.hpp
class ShardedValues;  // runtime/engine/sharded_values.hpp
class SlotStore;      // runtime/engine/slots.hpp
class StateStore;     // runtime/engine/state_store.hpp

// Seconds in the compute actions of a stage: forward, whole backward, input half and weight half,
// each summed over `count` actions.
struct ActionSeconds {
  int stage = 0;
  struct Sum {
    double seconds = 0;
    std::int64_t count = 0;
  };
  Sum forward, backward, backward_input, backward_weight;

  // `kind`: F, B, I, W or RECOMPUTE, which is part of the input halves without being one.
  void add(ActionKind kind, double seconds) {
    Sum& sum = kind == ActionKind::kForward          ? forward
               : kind == ActionKind::kBackward       ? backward
               : kind == ActionKind::kBackwardWeight ? backward_weight
                                                     : backward_input;
    sum.seconds += seconds;
    sum.count += kind == ActionKind::kRecompute ? 0 : 1;
  }
};

struct EngineConfig {
  const Plan* plan = nullptr;     // outlives the engine
  int rank = 0;                   // of the pipeline
  int first_virtual_replica = 0;  // of this rank's
  const EdgeTable* edges = nullptr;
  std::vector<StageBinding> stages;  // of this rank, ascending
  ComputeContext* compute = nullptr;
  Communicator* communicator = nullptr;      // of the pipeline, for the transport alone
  Interrupt* interrupt = nullptr;            // polled by waits; may be null
  ActivityBoard* activity = nullptr;         // shows what runs; may be null
  std::size_t piece_bytes = kMaxPieceBytes;  // of messages; equal on all ranks
  Transport* nccl = nullptr;                 // for edges of kind kNccl
  std::span<const EdgeRoute> routes = {};    // [stage], as Wires::routes; empty: by device
  Collective* collective = nullptr;          // over replicas within actions; null: one replica
  Collective* tensor = nullptr;              // over the ranks that share the stages; null: one
  Collective* tensor_nccl = nullptr;         // likewise, of a GPU's values: NcclRoutes::tensor()
  HostSums* sums = nullptr;                  // progress with the messages; may be null
  ShardedValues* sharded = nullptr;          // null: parameters are whole
  bool gradients_in_parts = false;           // as ParameterTable
  bool sums_each_micro_batch = false;        // likewise
  bool progress_in_actions = true;           // on a CPU, as PipelineOptions::Expert
  // Shared with engines that never run at the same time; null: the engine's own.
  std::shared_ptr<SlotStore> slots = nullptr;
  StateStore* store = nullptr;   // of what the plan moves; null: it moves nothing
  HostBuffer* staged = nullptr;  // likewise, for collectives of a GPU's values
  DeviceBatch* batch = nullptr;
  bool cuda_graphs = false;      // record and replay stages' calls on a GPU
  std::size_t trace_events = 0;  // recorded per step at most; 0: none
};

}  // namespace sluice
