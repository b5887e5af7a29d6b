#include "runtime/engine/stage_table.hpp"

#include <optional>

#include "comm/base/index.hpp"

namespace sluice {
namespace {

// How a pool's slots reach the stage at the other end of its edge.
RouteKind route_of(const BufferPool& pool, const EngineConfig& config) {
  const Placement& placement = config.plan->placement;
  const int edge = SlotPool::edge_of(pool);  // between stages edge - 1 and edge
  const auto here = [&](int stage) {
    return stage < 0 || stage >= placement.stages() || placement.rank_of(stage) == config.rank;
  };
  if (here(edge - 1) && here(edge)) return RouteKind::kLocal;
  if (!config.routes.empty()) return config.routes[at(edge)].kind;
  return config.compute->device().kind == DeviceKind::kCpu ? RouteKind::kHost : RouteKind::kStaged;
}

// What this rank's end of the route is: a CPU's end of a staged route is plain host memory.
RouteKind end_of(RouteKind route, Device device) {
  return route == RouteKind::kStaged && device.kind == DeviceKind::kCpu ? RouteKind::kHost : route;
}

}  // namespace

StageTable::StageTable(const EngineConfig& config)
    : ops_(config.plan->ranks[at(config.rank)].ops),
      store_(config.slots != nullptr ? config.slots : std::make_shared<SlotStore>()),
      stages_(config.stages.size()) {
  const RankPlan& mine = config.plan->ranks[at(config.rank)];
  const Placement& placement = config.plan->placement;
  index_of_stage_.assign(at(placement.stages()), -1);
  for (std::size_t i = 0; i < stages_.size(); ++i) {
    stages_[i].binding = config.stages[i];
    stages_[i].seconds.stage = config.stages[i].index;
    index_of_stage_[at(config.stages[i].index)] = static_cast<std::int32_t>(i);
  }
  for (const BufferPool& pool : mine.pools) {
    const DeviceMemory& memory = config.compute->memory();
    pools_.emplace_back(
        pool, *config.edges,
        SlotPool::Place{memory, *store_, end_of(route_of(pool, config), memory.device()),
                        find(pool.stage)->binding.state});
    if (SlotPool::has_tensors(pool.kind)) {
      const auto edge = config.edges->inputs(config.edges->largest(), SlotPool::edge_of(pool));
      tensors_ += static_cast<std::size_t>(pool.count) * edge.size();
    }
  }
  bind_pools();
  for (const PlanOp& op : ops_) op_stages_.push_back(find(op.stage));
  bind_slots();
  bind_messages(config.plan->channels);
  bind_needed_ops(*config.plan, config.rank);
  find_ends();
}

bool StageTable::has_staged() const {
  return std::any_of(pools_.begin(), pools_.end(),
                     [](const SlotPool& pool) { return pool.route() == RouteKind::kStaged; });
}

LocalStage* StageTable::find(std::int32_t stage) {
  if (stage < 0 || at(stage) >= index_of_stage_.size()) return nullptr;
  const std::int32_t index = index_of_stage_[at(stage)];
  return index < 0 ? nullptr : &stages_[at(index)];
}

void StageTable::bind_pools() {
  for (SlotPool& pool : pools_) {
    const BufferPool& what = pool.description();
    find(what.stage)->pool(what.kind) = &pool;
    // At a local hand-over the neighbour writes into this pool.
    if (what.kind == BufferKind::kInput && find(what.stage - 1) != nullptr) {
      find(what.stage - 1)->pool(BufferKind::kOutput) = &pool;
    }
    if (what.kind == BufferKind::kGradOutput && find(what.stage + 1) != nullptr) {
      find(what.stage + 1)->pool(BufferKind::kGradInput) = &pool;
    }
  }
}

const PlanOp* StageTable::first_op_out_of_range(std::size_t micro_batches) const {
  if (lowest_ == nullptr) return nullptr;
  if (lowest_->micro_batch < 0) return lowest_;
  return at(highest_->micro_batch) >= micro_batches ? highest_ : nullptr;
}

void StageTable::find_ends() {
  for (const PlanOp& op : ops_) {
    if (op.kind != OpKind::kRelease && op.kind != OpKind::kReduceGrad &&
        op.kind != OpKind::kReduceTied && op.kind != OpKind::kOptimizer &&
        op.kind != OpKind::kUnshard && op.kind != OpKind::kReshard) {
      if (lowest_ == nullptr || op.micro_batch < lowest_->micro_batch) lowest_ = &op;
      if (highest_ == nullptr || op.micro_batch > highest_->micro_batch) highest_ = &op;
    }
    const bool adds =
        op.action == ActionKind::kBackward || op.action == ActionKind::kBackwardWeight;
    LocalStage* const stage = stage_of(op);
    if (op.kind != OpKind::kCompute || !adds || stage == nullptr) continue;
    if (stage->first_gradient == nullptr) stage->first_gradient = &op;
    stage->last_gradient = &op;
  }
}

// Which slots ops name, once for all steps.
void StageTable::bind_slots() {
  op_slots_.resize(ops_.size());
  for (std::size_t i = 0; i < ops_.size(); ++i) {
    for (int k = 0; op_stages_[i] != nullptr && k < kBufferKinds; ++k) {
      const auto kind = static_cast<BufferKind>(k);
      const std::int32_t index = ops_[i].slot(kind);
      SlotPool* pool = op_stages_[i]->pool(kind);
      if (pool == nullptr || index < 0 || index >= pool->count()) continue;
      op_slots_[i][at(k)] = &pool->slot(index);
    }
  }
}

void StageTable::bind_messages(std::span<const Channel> channels) {
  messages_.resize(ops_.size());
  for (std::size_t i = 0; i < ops_.size(); ++i) {
    const PlanOp& op = ops_[i];
    std::optional<BufferKind> kind;
    if (op.action == ActionKind::kRecvForward) kind = BufferKind::kInput;
    if (op.action == ActionKind::kSendForward) kind = BufferKind::kOutput;
    if (op.action == ActionKind::kRecvBackward) kind = BufferKind::kGradOutput;
    if (op.action == ActionKind::kSendBackward) kind = BufferKind::kGradInput;
    if (!kind || op.channel < 0 || at(op.channel) >= channels.size()) continue;
    const Channel& channel = channels[at(op.channel)];
    const bool sends =
        op.action == ActionKind::kSendForward || op.action == ActionKind::kSendBackward;
    messages_[i] = {slot(op, *kind), sends ? channel.to_rank : channel.from_rank, channel.tag};
  }
}

// Both ends of a channel name its messages in the same order.
void StageTable::bind_needed_ops(const Plan& plan, int rank) {
  needed_ops_.assign(ops_.size(), -1);
  // [channel] Indices of the other end's starts of sends, or posts of receives.
  std::vector<std::vector<std::int32_t>> theirs(plan.channels.size());
  for (const bool i_receive : {true, false}) {
    for (std::vector<std::int32_t>& each : theirs) each.clear();
    for (std::size_t peer = 0; peer < plan.ranks.size(); ++peer) {
      const std::vector<PlanOp>& ops = plan.ranks[peer].ops;
      for (std::size_t i = 0; i < ops.size(); ++i) {
        const OpKind needed = i_receive ? OpKind::kStartSend : OpKind::kPostRecv;
        if (ops[i].kind != needed || ops[i].channel < 0 || at(ops[i].channel) >= theirs.size()) {
          continue;
        }
        const Channel& channel = plan.channels[at(ops[i].channel)];
        if ((i_receive ? channel.to_rank : channel.from_rank) != rank) continue;
        theirs[at(ops[i].channel)].push_back(static_cast<std::int32_t>(i));
      }
    }
    std::vector<std::size_t> next(theirs.size());
    for (std::size_t i = 0; i < ops_.size(); ++i) {
      const OpKind waits = i_receive ? OpKind::kWaitRecv : OpKind::kWaitSend;
      if (ops_[i].kind != waits || messages_[i].peer < 0) continue;
      const std::vector<std::int32_t>& list = theirs[at(ops_[i].channel)];
      const std::size_t message = next[at(ops_[i].channel)]++;
      if (message < list.size()) needed_ops_[i] = list[message];
    }
  }
}

}  // namespace sluice
