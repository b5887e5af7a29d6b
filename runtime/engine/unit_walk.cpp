#include "runtime/engine/unit_walk.hpp"

#include <algorithm>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"

namespace sluice {

UnitWalk::UnitWalk(ShardedValues& values, const std::vector<PlanOp>& ops)
    : values_(values), ops_(ops), op_uses_(ops.size()) {
  std::size_t units = 0;
  const bool splits = values.splits_backward();
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const PlanOp& op = ops[i];
    if (op.kind != OpKind::kCompute) continue;
    const std::size_t first = values.first_unit(op.stage), count = values.units_of(op.stage);
    units = std::max(units, first + count);
    const bool reads = op.action != ActionKind::kBackwardWeight || values.weight_reads(op.stage);
    const std::size_t used = !reads                                ? 0
                             : op.action == ActionKind::kRecompute ? std::min(count, 1UL)
                                                                   : count;
    const bool twice =
        splits && op.action == ActionKind::kBackward && values.weight_reads(op.stage);
    op_uses_[i] = {uses_.size(), twice ? 2 * used : used};
    for (std::size_t k = 0; k < op_uses_[i].count; ++k) {
      const bool ascends = op.action == ActionKind::kForward;
      uses_.push_back(first + (ascends ? k : count - 1 - k % count));
    }
  }
  sharded_.resize(units);
}

const UnitWalk::Uses& UnitWalk::uses_of(const PlanOp& op) const {
  return op_uses_[static_cast<std::size_t>(&op - ops_.data())];
}

void UnitWalk::begin_run() {
  first_ = next_ = end_ = 0;
  sharded_.assign(sharded_.size(), false);
  values_.renew_copies();
}

void UnitWalk::lend(int stage) {
  if (values_.use_units(stage)) return;
  for (std::size_t i = 0; i < values_.units_of(stage); ++i) {
    values_.need(values_.first_unit(stage) + i);
  }
}

void UnitWalk::take_back(int stage) {
  if (values_.use_units(stage)) return;
  for (std::size_t i = 0; i < values_.units_of(stage); ++i) {
    values_.drop(values_.first_unit(stage) + i);
  }
}

void UnitWalk::unshard(const PlanOp& op) {
  const std::size_t first = values_.first_unit(op.stage), count = values_.units_of(op.stage);
  for (std::size_t unit = first; unit < first + count; ++unit) {
    sharded_[unit] = true;
    if (values_.gather() == Gather::kPerStep) values_.start(unit);
  }
  start_next();
}

void UnitWalk::reshard(const PlanOp& op) {
  const std::size_t first = values_.first_unit(op.stage), count = values_.units_of(op.stage);
  for (std::size_t unit = first; unit < first + count; ++unit) {
    sharded_[unit] = false;
    values_.drop(unit);
  }
}

ParameterUnits* UnitWalk::begin(const PlanOp& op) {
  stage_ = op.stage;
  const Uses& uses = uses_of(op);
  first_ = next_ = uses.first;
  end_ = uses.first + uses.count;
  if (values_.use_units(op.stage)) return uses.count == 0 ? nullptr : this;
  while (next_ < end_) use_next();
  return nullptr;
}

void UnitWalk::end() {
  while (next_ < end_) use_next();
}

// What has no cut parameters is whole at all times, and not among the uses.
void UnitWalk::use(int unit) {
  const auto find = [&](std::size_t from, std::size_t to) {
    while (from < to && values_.number_of(uses_[from]) != unit) ++from;
    return from;
  };
  const std::size_t place = find(std::max(first_ + 1, next_) - 1, end_);
  if (place == end_) {
    if (find(first_, end_) == end_) return require_uncut(unit);
    throw_usage(
        "unit {} of the parameters is used after a unit that follows it; legal: ascending in "
        "forward() and loss(), descending in backward calls",
        unit);
  }
  while (next_ <= place) use_next();
}

void UnitWalk::require_uncut(int unit) const {
  const std::size_t first = values_.first_unit(stage_);
  for (std::size_t i = 0; i < values_.units_of(stage_); ++i) {
    if (values_.number_of(first + i) != unit) continue;
    throw_usage(
        "unit {} of the parameters is used in an action that has the last one alone; legal "
        "in recompute(): unit {}",
        unit, values_.number_of(first + values_.units_of(stage_) - 1));
  }
}

void UnitWalk::use_next() {
  const std::size_t unit = uses_[next_];
  values_.need(unit);
  if (values_.gather() == Gather::kPerUse && next_ > 0 && uses_[next_ - 1] != unit) {
    values_.drop(uses_[next_ - 1]);
  }
  ++next_;
  start_next();
}

void UnitWalk::start_next() {
  if (values_.gather() != Gather::kPerUse || next_ == uses_.size()) return;
  const std::size_t unit = uses_[next_];
  if (sharded_[unit] && values_.has_room(unit)) values_.start(unit);
}

}  // namespace sluice
