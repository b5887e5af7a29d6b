#include "runtime/engine/sharded_values.hpp"

#include <algorithm>

#include <sluice/operators.hpp>

#include "comm/base/index.hpp"
#include "stages/tensor/value_access.hpp"

namespace sluice {

ShardedValues::ShardedValues(HostSums& gathers, ActivityBoard* activity, ComputeContext& compute,
                             HostMirror& mirror, const JobLayout& layout)
    : gathers_(gathers),
      activity_(activity),
      compute_(compute),
      mirror_(mirror),
      layout_(layout),
      replica_(layout.place.here.replica),
      sharers_(layout.place.shard_groups.sharers_of(replica_)),
      places_(layout, layout.place.here.pipeline, replica_),
      memory_(std::make_shared<PartialMemory>(compute.device(), places_.bytes, places_.ranges)) {}

const ShardedMemory::Place& ShardedValues::place_of(int stage) const {
  return *std::ranges::find(places_.places, stage, &ShardedMemory::Place::stage);
}

void ShardedValues::place(ParameterSet& set, int stage) const {
  const ShardedMemory::Place& place = place_of(stage);
  ValueAccess::place(set, memory_->data() + place.values, memory_->data() + place.copies, memory_);
}

void ShardedValues::give_back(std::span<const std::byte> memory) const {
  const auto begin = static_cast<std::size_t>(memory.data() - memory_->data());
  const std::vector<PartialMemory::Range>& ranges = places_.ranges;
  auto range = std::ranges::partition_point(
      ranges, [&](const PartialMemory::Range& each) { return each.begin + each.bytes <= begin; });
  for (; range != ranges.end() && range->begin < begin + memory.size(); ++range) {
    memory_->drop(static_cast<std::size_t>(range - ranges.begin()));
  }
}

void ShardedValues::drop_others(const Parameter& parameter) const {
  give_back(std::as_bytes(parameter.value.floats()));
}

void ShardedValues::drop_all() const {
  for (std::size_t i = 0; i < places_.ranges.size(); ++i) memory_->drop(i);
}

void ShardedValues::add_parts(std::span<const CutRange> ranges, std::size_t place,
                              Unit& unit) const {
  auto* const flat = reinterpret_cast<float*>(memory_->data() + place);
  for (const CutRange& each : ranges) {
    unit.parts.push_back({{flat + each.begin, each.size()}, each.ends_at_rest()});
  }
}

void ShardedValues::add(const StageBinding& stage) {
  ParameterSet* const set = stage.parameters;
  if (set == nullptr) return;
  const StageEntry& entry = layout_.parameters.stages[at(stage.index)];
  const std::vector<Parameter*> parameters = set->all();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Parameter& each = *parameters[i];
    each.bf16_copy_is_current = false;  // prepare() has seen values that are away
    if (each.bf16_copy.data == nullptr || entry.parameters[i].ends.empty()) continue;
    copied_.push_back({&each, entry.parameters[i].part_at_rest(replica_)});
  }
  const ShardedMemory::Place& place = place_of(stage.index);
  for (const ShardedUnit& each : sharded_units(entry)) {
    Unit& unit = units_.emplace_back(Unit{.stage = stage.index, .number = each.unit});
    add_parts(each.values, place.values, unit);
    add_parts(each.copies, place.copies, unit);
    unit.owner = set->memory();
    unit.bytes = each.bytes();
    unit.nccl_tickets.reserve(unit.parts.size());
  }
  std::size_t calls = 1;
  for (const Unit& each : units_) calls += each.parts.size();
  gathers_.reserve(0, calls);
  drop_all();
}

void ShardedValues::gather_over(NcclRoutes* nccl) {
  nccl_ = nccl;
  if (nccl != nullptr || compute_.device().kind == DeviceKind::kCpu) return;
  std::size_t largest = 0;
  for (const Unit& unit : units_) {
    for (const Part& each : unit.parts) largest = std::max(largest, each.floats.size_bytes());
  }
  for (const Copied& each : copied_) {  // lend() has their values
    largest = std::max(largest, each.parameter->value.spec.bytes());
  }
  mirror_.reserve(largest);
}

std::size_t ShardedValues::most_open() const {
  std::size_t all = 1, largest = 0;
  for (const Unit& each : units_) {
    all += each.parts.size();
    largest = std::max(largest, each.parts.size());
  }
  return gather() == Gather::kPerUse ? 1 + 2 * largest : all;
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

bool ShardedValues::weight_reads(int stage) const {
  return layout_.parameters.stages[at(stage)].weight_reads;
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

bool ShardedValues::has_room(std::size_t unit) const {
  if (compute_.device().kind == DeviceKind::kCpu) return true;
  for (std::size_t other = 0; other < units_.size(); ++other) {
    if (other == unit || units_[other].presence == Presence::kAway) continue;
    if (ShardedMemory::share_slots(gather(), unit, other)) return false;
  }
  return true;
}

NcclTicket ShardedValues::gather_over_nccl(const Part& part) {
  pieces_.assign(at(layout_.place.shard_groups.replicas), {});
  for (std::size_t place = 0, begin = 0; place < sharers_.size(); ++place) {
    pieces_[at(sharers_[place])] = {begin, part.ends[place] - begin};
    begin = part.ends[place];
  }
  return nccl_->gather(part.floats, pieces_, sharers_);
}

void ShardedValues::gather_on_mirror(const Part& part) {
  const std::span<float> host = mirror_.read_back(part.floats);
  gathers_.wait(gathers_.start_gather(host, part.ends, mirror_.owner(nullptr)));
  mirror_.write_back();
}

void ShardedValues::start(std::size_t unit) {
  Unit& of = units_[unit];
  if (of.presence != Presence::kAway) return;
  of.presence = Presence::kComing;
  for (const Part& each : of.parts) {
    if (nccl_ != nullptr) {
      of.nccl_tickets.push_back(gather_over_nccl(each));
    } else if (compute_.device().kind == DeviceKind::kCpu) {
      of.ticket = gathers_.start_gather(each.floats, each.ends, of.owner);
    }  // else need() gathers it
  }
}

void ShardedValues::need(std::size_t unit) {
  start(unit);
  Unit& of = units_[unit];
  if (of.presence == Presence::kThere) return;
  const CollectiveScope scope(activity_,
                              {CollectiveAxis::kReplica, CollectiveKind::kAllGather,
                               of.bytes / sharers_.size(), DType::kF32},
                              of.number);
  if (nccl_ != nullptr) {
    for (NcclTicket& ticket : of.nccl_tickets) nccl_->wait_on_stream(ticket);
    of.nccl_tickets.clear();
  } else if (compute_.device().kind == DeviceKind::kCpu) {
    gathers_.wait(of.ticket);
  } else {
    for (const Part& each : of.parts) gather_on_mirror(each);
  }
  of.presence = Presence::kThere;
}

void ShardedValues::drop(std::size_t unit) {
  Unit& of = units_[unit];
  if (of.presence == Presence::kAway) return;
  need(unit);
  for (const Part& each : of.parts) give_back(std::as_bytes(each.floats));
  of.presence = Presence::kAway;
}

void ShardedValues::lend(const Parameter& parameter, const ParameterEntry& entry) {
  if (entry.ends.empty() || entry.elements == 0) return;
  const CutRange range{0, {entry.ends.begin(), entry.ends.end()}, entry.copies};
  const Part part{parameter.value.floats(), range.ends_at_rest()};
  if (nccl_ != nullptr) {
    NcclTicket ticket = gather_over_nccl(part);
    nccl_->wait_on_stream(ticket);
  } else if (compute_.device().kind == DeviceKind::kCpu) {
    gathers_.wait(gathers_.start_gather(part.floats, part.ends, parameter.memory));
  } else {
    gather_on_mirror(part);
  }
}

}  // namespace sluice
