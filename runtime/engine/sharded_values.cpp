#include "runtime/engine/sharded_values.hpp"

#include <algorithm>

#include <sluice/operators.hpp>

#include "comm/base/index.hpp"
#include "comm/device/host_pages.hpp"

namespace sluice {
ShardedValues::ShardedValues(HostSums& gathers, ActivityBoard* activity, ComputeContext& compute,
                             const JobLayout& layout)
    : gathers_(gathers),
      activity_(activity),
      compute_(compute),
      layout_(layout),
      replica_(layout.place.here.replica) {}

void ShardedValues::give_back(const Part& part) const {
  const std::size_t begin = replica_ == 0 ? 0 : part.ends[at(replica_) - 1];
  const std::size_t end = part.ends[at(replica_)];
  give_back_pages(std::as_writable_bytes(part.floats.first(begin)));
  give_back_pages(std::as_writable_bytes(part.floats.subspan(end)));
}

void ShardedValues::drop_others(const Parameter& parameter, const ParameterEntry& entry) const {
  if (entry.ends.empty()) return;
  const ElementRange own = entry.part(replica_);
  for (const ElementRange& other :
       {ElementRange{0, own.first}, ElementRange{own.end(), entry.elements - own.end()}}) {
    give_back_pages(std::as_writable_bytes(elements_of(parameter.value, other).floats()));
  }
}

void ShardedValues::add_parts(std::span<const CutRange> ranges, float* flat,
                              std::vector<Part>& parts) {
  for (const CutRange& each : ranges) {
    parts.push_back({{flat + each.begin, each.ends.back()}, each.ends});
  }
}

void ShardedValues::add(const StageBinding& stage) {
  ParameterSet* const set = stage.parameters;
  if (set == nullptr) return;
  const StageEntry& entry = layout_.parameters.stages[at(stage.index)];
  float *const values = set->flat_values().data(), *copies = nullptr;
  const std::vector<Parameter*> parameters = set->all();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Parameter& each = *parameters[i];
    if (each.bf16_copy.data == nullptr) continue;
    if (copies == nullptr) copies = each.bf16_copy.as<float>();
    if (!entry.parameters[i].ends.empty()) {
      copied_.push_back({&each, entry.parameters[i].part(replica_)});
      each.bf16_copy_is_current = false;  // prepare() may have made it of values that are away
    }
  }
  add_parts(ranges_of(entry), values, all_);
  std::size_t calls = 1;
  for (const ShardedUnit& each : sharded_units(entry)) {
    Unit& unit = units_.emplace_back(Unit{.stage = stage.index, .number = each.unit});
    add_parts(each.values, values, unit.parts);
    add_parts(each.copies, copies, unit.parts);
    add_parts(each.copies, copies, all_);
    unit.owner = set->memory();
    unit.bytes = each.bytes();
  }
  for (const Unit& each : units_) calls += each.parts.size();
  gathers_.reserve(0, calls);
  drop_all();
}

void ShardedValues::drop_all() const {
  for (const Part& each : all_) give_back(each);
}

std::size_t ShardedValues::first_unit(int stage) const {
  return static_cast<std::size_t>(std::ranges::find(units_, stage, &Unit::stage) - units_.begin());
}

std::size_t ShardedValues::units_of(int stage) const {
  return static_cast<std::size_t>(std::ranges::count(units_, stage, &Unit::stage));
}

bool ShardedValues::use_units(int stage) const {
  return layout_.parameters.stages[at(stage)].uses_units;
}

void ShardedValues::renew_copies() {
  for (const Copied& each : copied_) {
    Parameter& parameter = *each.parameter;
    if (parameter.bf16_copy_is_current) continue;
    parameter.bf16_copy_is_current = true;
    if (each.part.count == 0) continue;
    convert(compute_, elements_of(parameter.value, each.part),
            elements_of(parameter.bf16_copy, each.part));
  }
}

void ShardedValues::start(std::size_t unit) {
  Unit& of = units_[unit];
  if (of.presence != Presence::kAway) return;
  for (const Part& each : of.parts) {
    of.ticket = gathers_.start_gather(each.floats, each.ends, of.owner);
  }
  of.presence = Presence::kComing;
}

void ShardedValues::need(std::size_t unit) {
  start(unit);
  Unit& of = units_[unit];
  if (of.presence == Presence::kThere) return;
  const CollectiveScope scope(activity_,
                              {CollectiveAxis::kReplica, CollectiveKind::kAllGather,
                               of.bytes / at(layout_.place.topology.size.replica), DType::kF32},
                              of.number);
  gathers_.wait(of.ticket);
  of.presence = Presence::kThere;
}

void ShardedValues::drop(std::size_t unit) {
  Unit& of = units_[unit];
  if (of.presence == Presence::kAway) return;
  need(unit);
  for (const Part& each : of.parts) give_back(each);
  of.presence = Presence::kAway;
}

void ShardedValues::lend(const Parameter& parameter, const ParameterEntry& entry) {
  if (entry.ends.empty() || entry.elements == 0) return;
  std::vector<std::size_t> ends;
  for (const std::int64_t end : entry.ends) ends.push_back(static_cast<std::size_t>(end));
  gathers_.wait(gathers_.start_gather(parameter.value.floats(), ends, parameter.memory));
}

}  // namespace sluice
