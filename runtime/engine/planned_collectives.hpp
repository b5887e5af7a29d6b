// The collectives of this rank's actions, held to what the stage describes and the plan has.
// Internal to the engine.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sluice/plan.hpp>
#include <sluice/stage.hpp>

#include "comm/base/index.hpp"
#include "runtime/engine/engine_config.hpp"
#include "runtime/layout/job_layout.hpp"

namespace sluice {

class PlannedCollectives {
 public:
  // `config` outlives this.
  explicit PlannedCollectives(const EngineConfig& config);

  // Before the stage's part of a compute op, which computes a micro-batch of this shape; `loss`:
  // loss() is a part of it; else answer() is, of a last stage. The first time for a shape, asks the
  // stage for its description. Throws Error(kUsage) where that is not like the plan's.
  void begin(const StageBinding& binding, const PlanOp& op, UnitShape shape, bool loss);
  [[nodiscard]] static Axis axis_of(const PlannedCollective& collective) {
    return collective.axis == CollectiveAxis::kReplica ? Axis::kReplica : Axis::kTensor;
  }
  // Whether the values of a GPU pass through host memory, in a collective of pipeline rank `rank`.
  [[nodiscard]] static bool through_host(const PlannedCollective& collective,
                                         const JobLayout& layout, int rank) {
    return axis_of(collective) != Axis::kTensor || !layout.wires.tensor_by_nccl(rank) ||
           !by_nccl(collective);
  }
  // Floats that NcclRoutes takes for the largest that does not.
  [[nodiscard]] static std::size_t nccl_floats(const JobLayout& layout, int rank, bool trains);
  // Page-locked memory that the largest collective of a rank's stages takes whose values are in
  // memory of a GPU; in a pipeline for inference alone those of answers count too.
  [[nodiscard]] static std::size_t staged_bytes(const JobLayout& layout, int rank, bool trains);
  // Whether loss() makes some in the op that runs.
  [[nodiscard]] bool in_loss() const { return in_loss_; }
  // After it. Other ranks would wait for a collective that is missing.
  void end() const;

  [[nodiscard]] Collective& over(CollectiveAxis axis) {
    return axes_[static_cast<std::size_t>(axis)];
  }

 private:
  class OfAxis final : public Collective {
   public:
    OfAxis(PlannedCollectives& all, CollectiveAxis axis, Collective* group)
        : all_(all), axis_(axis), group_(group) {}
    void make(const CollectiveCall& call) override { all_.make(axis_, group_, call); }

   private:
    PlannedCollectives& all_;
    CollectiveAxis axis_;
    Collective* group_;  // null: one rank
  };

  // [F, B, I, W, RECOMPUTE, F with answer() for loss()] of a stage for one shape of micro-batches.
  struct Lists {
    int stage = 0;
    UnitShape shape;
    bool in_loss = false;  // loss() makes some
    std::array<std::vector<PlannedCollective>, 6> of = {};
  };

  // NCCL's sums are of f32.
  [[nodiscard]] static bool by_nccl(const PlannedCollective& collective) {
    return collective.type == DType::kF32 || (collective.kind != CollectiveKind::kSum &&
                                              collective.kind != CollectiveKind::kReduceScatter);
  }
  [[nodiscard]] const Lists& lists_of(const StageBinding& binding, UnitShape shape);
  void make(CollectiveAxis axis, Collective* group, CollectiveCall call);
  void make_staged(Collective& group, CollectiveCall call);
  // Says on which rank: one-sided, unlike most errors of usage.
  [[noreturn]] void refuse(const std::string& what) const;

  const EngineConfig& config_;
  std::array<OfAxis, kCollectiveAxes> axes_;
  std::vector<Lists> lists_;
  // Of the action that runs.
  std::span<const PlannedCollective> planned_;
  std::size_t made_ = 0;
  bool in_loss_ = false;
  int stage_ = -1, micro_batch_ = -1;
};

}  // namespace sluice
