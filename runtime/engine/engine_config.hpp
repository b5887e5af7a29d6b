// What an engine is made of and what it counts: this rank's stages, the plan, and the means it
// works with. Everything named here is the caller's and outlives the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <sluice/communicator.hpp>
#include <sluice/plan.hpp>
#include <sluice/stage.hpp>

#include "comm/group/transport.hpp"
#include "comm/group/waiter.hpp"
#include "runtime/layout/edge_route.hpp"
#include "runtime/layout/edges.hpp"

namespace sluice {

class NcclRoutes;  // runtime/job/nccl_routes.hpp

// A stage and what it can do; the pointers are views of the same object, owned by the caller.
struct StageBinding {
  int index = 0;  // global
  Stage* stage = nullptr;
  SplitBackward* split = nullptr;  // null: only whole backwards
  LossStage* loss = nullptr;       // set on the last stage
};

// Seconds spent in compute actions, per local stage in ascending order: forward, whole backward,
// input half, weight half, each as a sum over `count` actions.
struct ActionSeconds {
  int stage = 0;
  struct Sum {
    double seconds = 0;
    std::int64_t count = 0;
  };
  Sum forward, backward, backward_input, backward_weight;

  // Requires a kind that computes.
  [[nodiscard]] Sum& of(ActionKind kind) {
    return kind == ActionKind::kForward         ? forward
           : kind == ActionKind::kBackward      ? backward
           : kind == ActionKind::kBackwardInput ? backward_input
                                                : backward_weight;
  }
};

struct EngineConfig {
  const Plan* plan = nullptr;  // outlives the engine
  int rank = 0;                // of the pipeline
  const EdgeTable* edges = nullptr;
  std::vector<StageBinding> stages;  // of this rank, ascending
  ComputeContext* compute = nullptr;
  Communicator* communicator = nullptr;      // of the pipeline, for the transport alone
  Interrupt* interrupt = nullptr;            // polled by waits; may be null
  std::size_t piece_bytes = kMaxPieceBytes;  // of messages; equal on all ranks
  NcclRoutes* nccl = nullptr;                // for edges of kind kNccl
  std::span<const EdgeRoute> routes = {};    // [stage], as Wires::routes; empty: by device
  Collective* collective = nullptr;          // handed to stages; may be null
  bool cuda_graphs = false;                  // record and replay stages' calls on a GPU
  std::size_t trace_events = 0;              // room for that many per step; 0: record none
};

}  // namespace sluice
