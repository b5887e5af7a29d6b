#include "runtime/engine/planned_collectives.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <string>

#include <sluice/error.hpp>
#include <sluice/tensor.hpp>

#include "comm/base/byte_sums.hpp"
#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/group/activity.hpp"
#include "runtime/group/nccl_routes.hpp"
#include "runtime/layout/edge_route.hpp"
#include "schedules/plan/collectives.hpp"

namespace sluice {
namespace {

constexpr std::array kActions = {ActionKind::kForward, ActionKind::kBackward,
                                 ActionKind::kBackwardInput, ActionKind::kBackwardWeight,
                                 ActionKind::kRecompute};

void copy_of_one(const CollectiveCall& call) {
  if (call.in.size() != call.out.size()) {
    throw_usage("one rank alone takes {} bytes and gives {}; legal: as many", call.in.size(),
                call.out.size());
  }
  Collective::alone().make(call);
}

std::size_t staged_of(const PlannedCollective& collective, std::size_t ranks) {
  const std::size_t bytes = collective.bytes;
  switch (collective.kind) {
    case CollectiveKind::kSum:
      return bytes;
    case CollectiveKind::kAllGather:
      return sum_of_bytes({bytes, multiply_bytes(bytes, ranks)});
    case CollectiveKind::kReduceScatter:
      return sum_of_bytes({bytes, bytes / ranks});
    case CollectiveKind::kAllToAll:
      break;
  }
  return multiply_bytes(bytes, 2);
}

// The most that `needs(collective, ranks)` is for those of a rank's stages.
template <typename Needs>
std::size_t most_of(const JobLayout& layout, int rank, bool trains, const Needs& needs) {
  std::size_t most = 0;
  const auto raise = [&](const std::vector<PlannedCollective>& list) {
    for (const PlannedCollective& each : list) {
      const int ranks = layout.place.topology.size[PlannedCollectives::axis_of(each)];
      if (ranks > 1) most = std::max(most, needs(each, ranks));
    }
  };
  for (const int stage : layout.plans.placement().stages_of(rank)) {
    const StageCollectives& made = layout.parameters.stages[at(stage)].collectives;
    raise(collectives_of(made, ActionKind::kForward, !trains));
    raise(trains ? collectives_of(made, ActionKind::kBackward, false) : made.answer);
    if (trains) raise(made.recompute);
  }
  return most;
}

}  // namespace

void PlannedCollectives::refuse(const std::string& what) const {
  const int rank = config_.activity == nullptr ? config_.rank : config_.activity->rank();
  throw Error(ErrorCode::kUsage, fmt::format("the stage {}, on rank {}", what, rank));
}

PlannedCollectives::PlannedCollectives(const EngineConfig& config)
    : config_(config),
      axes_{OfAxis(*this, CollectiveAxis::kReplica, config.collective),
            OfAxis(*this, CollectiveAxis::kTensor, config.tensor)} {}

const PlannedCollectives::Lists& PlannedCollectives::lists_of(const StageBinding& binding,
                                                              UnitShape shape) {
  const auto found = std::find_if(lists_.begin(), lists_.end(), [&](const Lists& each) {
    return each.stage == binding.index && each.shape == shape;
  });
  if (found != lists_.end()) return *found;
  std::vector<TensorSpec> inputs;
  for (const EdgeTensor& tensor : config_.edges->inputs(shape, binding.index)) {
    inputs.push_back(tensor.spec);
  }
  StageCollectives stage = binding.stage->describe(inputs, *config_.compute).collectives;
  Lists lists{.stage = binding.index, .shape = shape};
  const bool forward_only = config_.plan->forward_only;
  for (std::size_t i = 0; i < kActions.size(); ++i) {
    lists.of[i] = collectives_of(stage, kActions[i], forward_only);
  }
  lists.in_loss =
      lists.of[0].size() >
      collectives_of({.forward = stage.forward}, ActionKind::kForward, forward_only).size();
  stage.loss = std::move(stage.answer);
  lists.of.back() = collectives_of(stage, ActionKind::kForward, forward_only);
  return lists_.emplace_back(std::move(lists));
}

void PlannedCollectives::begin(const StageBinding& binding, const PlanOp& op, UnitShape shape,
                               bool loss) {
  made_ = 0;
  planned_ = {};
  in_loss_ = false;
  stage_ = op.stage;
  const int group = config_.plan->fold_every;  // as the stage sees it
  micro_batch_ = group > 0 ? op.micro_batch % group : op.micro_batch;
  const std::span<const PlannedCollective> plan = collectives_of(*config_.plan, op);
  const bool no_loss = op.action == ActionKind::kForward && !loss;
  if (plan.empty() && !(no_loss && !config_.edges->answers(shape).empty())) return;
  const Lists& lists = lists_of(binding, shape);
  const auto action = std::ranges::find(kActions, op.action) - kActions.begin();
  const std::vector<PlannedCollective>& now = lists.of[static_cast<std::size_t>(action)];
  if (const std::string why = why_unlike(plan, now); !why.empty()) {
    refuse(fmt::format("describes other collectives than its plan has: {}", why));
  }
  planned_ = no_loss ? std::span(lists.of.back()) : std::span(now);
  in_loss_ = loss && lists.in_loss;
}

void PlannedCollectives::make(CollectiveAxis axis, Collective* group, CollectiveCall call) {
  const PlannedCollective made{axis, call.kind, call.in.size(), call.type};
  if (made_ == planned_.size()) {
    refuse(fmt::format("makes {} where its description has no more ({} in this action)",
                       in_sentence(made), planned_.size()));
  }
  if (made != planned_[made_]) {
    refuse(fmt::format("makes {} where its description has {} (collective {} of {})",
                       in_sentence(made), in_sentence(planned_[made_]), made_ + 1,
                       planned_.size()));
  }
  call.stage = stage_;
  call.micro_batch = micro_batch_;
  call.index = static_cast<int>(made_++);
  if (group == nullptr) return copy_of_one(call);
  const CollectiveScope scope(config_.activity, made, call.index);
  if (call.compute != nullptr && call.compute->device().kind != DeviceKind::kCpu) {
    Collective* const nccl = axis == CollectiveAxis::kTensor ? config_.tensor_nccl : nullptr;
    return nccl != nullptr && by_nccl(made) ? nccl->make(call) : make_staged(*group, call);
  }
  group->make(call);
}

std::size_t PlannedCollectives::staged_bytes(const JobLayout& layout, int rank, bool trains) {
  return most_of(layout, rank, trains, [&](const PlannedCollective& each, int ranks) {
    return through_host(each, layout, rank) ? staged_of(each, at(ranks)) : 0;
  });
}

std::size_t PlannedCollectives::nccl_floats(const JobLayout& layout, int rank, bool trains) {
  const auto floats = [&](const PlannedCollective& each, int ranks) {
    return through_host(each, layout, rank) ? 0 : NcclRoutes::collective_floats(each, ranks);
  };
  // A pipeline that trains infers too, in the same workspace.
  return std::max(most_of(layout, rank, trains, floats), most_of(layout, rank, false, floats));
}

void PlannedCollectives::make_staged(Collective& group, CollectiveCall call) {
  ComputeContext& compute = *std::exchange(call.compute, nullptr);
  HostBuffer& staged = *config_.staged;
  std::byte* const out = call.out.data();
  const std::size_t passed = call.kind == CollectiveKind::kSum ? 0 : call.in.size();
  if (staged.size() < passed + call.out.size()) {
    compute.wait();  // what came out last may still be read
    staged = HostBuffer(compute.device(), passed + call.out.size());
  }
  copy_async(staged.data(), call.in.data(), call.in.size(), compute.stream());
  compute.wait();
  call.in = {staged.data(), call.in.size()};
  call.out = {staged.data() + passed, call.out.size()};
  group.make(call);
  copy_async(out, call.out.data(), call.out.size(), compute.stream());
}

void PlannedCollectives::end() const {
  if (made_ == planned_.size()) return;
  refuse(fmt::format("does not make {}, which its description has (collective {} of {})",
                     in_sentence(planned_[made_]), made_ + 1, planned_.size()));
}

}  // namespace sluice
