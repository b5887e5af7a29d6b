#include "runtime/layout/sharded_memory.hpp"

#include <algorithm>
#include <functional>
#include <span>

#include "comm/base/index.hpp"
#include "runtime/layout/parameter_cut.hpp"

namespace sluice {
namespace {

using Range = PartialMemory::Range;

// What a replica has of a range.
using Own = CutRange (CutRange::*)(int replica) const;

// What lies on either side of that in each range, from `place` on.
void add_others(std::span<const CutRange> cut, Own own_of, std::size_t place, int replica,
                std::vector<Range>& ranges) {
  for (const CutRange& each : cut) {
    const CutRange own = (each.*own_of)(replica);
    const auto add = [&](std::size_t from, std::size_t until) {
      if (from == until) return;
      ranges.push_back({place + from * sizeof(float), (until - from) * sizeof(float), 0});
    };
    add(each.begin, own.begin);
    add(own.end(), each.end());
  }
}

}  // namespace

GradientMemory::GradientMemory(const JobLayout& layout, int rank, int replica) {
  for (const int stage : layout.plans.placement().stages_of(rank)) {
    const StageEntry& entry = layout.parameters.stages[at(stage)];
    places.emplace_back(stage, bytes);
    for (int number = 0; const std::vector<CutRange>& unit : unit_ranges_of(entry)) {
      std::vector<Range> used;
      add_others(unit, &CutRange::of, bytes, replica, used);
      std::ranges::stable_sort(used, std::greater<>(), &Range::bytes);
      for (int i = 0; Range & each : used) {
        each.slot = 2 * i++ + number % 2;
        ranges.push_back(each);
      }
      ++number;
    }
    for (const ParameterEntry& each : entry.parameters) bytes += value_bytes(each);
  }
  std::ranges::sort(ranges, {}, &Range::begin);
}

ShardedMemory::ShardedMemory(const JobLayout& layout, int rank, int replica) {
  constexpr int kLent = 2;  // slots of the values of parameters with a copy
  int unit_number = 0, slots = kLent;
  for (const int stage : layout.plans.placement().stages_of(rank)) {
    const StageEntry& entry = layout.parameters.stages[at(stage)];
    Place& place = places.emplace_back(Place{stage, bytes, bytes});
    for (const ParameterEntry& each : entry.parameters) {
      place.copies += value_bytes(each);
      bytes += value_bytes(each) + copy_bytes(each);
    }
    for (const ShardedUnit& unit : sharded_units(entry)) {
      std::vector<Range> used;
      add_others(unit.values, &CutRange::at_rest, place.values, replica, used);
      add_others(unit.copies, &CutRange::at_rest, place.copies, replica, used);
      // The largest of each unit share memory, and so on.
      std::ranges::stable_sort(used, std::greater<>(), &Range::bytes);
      for (int i = 0; Range & each : used) {
        each.slot = layout.parameters.gather == Gather::kPerUse ? kLent + 2 * i++ + unit_number % 2
                                                                : slots++;
        ranges.push_back(each);
      }
      for (const CutRange& each : unit.lent) {
        std::vector<Range> lent;
        add_others({&each, 1}, &CutRange::at_rest, place.values, replica, lent);
        for (int slot = 0; Range & side : lent) {
          side.slot = slot++;
          ranges.push_back(side);
        }
      }
      ++unit_number;
    }
  }
  std::ranges::sort(ranges, {}, &Range::begin);
}

}  // namespace sluice
