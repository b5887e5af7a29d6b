#include "runtime/layout/parameter_cut.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "comm/base/index.hpp"
#include "stages/compute/call_arguments.hpp"

namespace sluice {
namespace {

std::int64_t blocks_of(const ParameterEntry& entry) {
  std::int64_t blocks = 0;
  for (const ElementRange& shard : entry.shards()) blocks += sum_blocks(shard.count);
  return blocks;
}

// Where the first `blocks` blocks of its shards end.
std::int64_t end_of(const ParameterEntry& entry, std::int64_t blocks) {
  for (const ElementRange& shard : entry.shards()) {
    const std::int64_t here = sum_blocks(shard.count);
    if (blocks < here) return shard.first + std::max<std::int64_t>(blocks, 0) * kSumBlock;
    blocks -= here;
  }
  return entry.elements;
}

// Cuts `entries` as one sequence of blocks. `next` is the replica that gets the next remaining
// block, of this sequence and those before.
void cut_sequence(std::span<ParameterEntry* const> entries, const ShardGroups& groups, int& next) {
  std::int64_t blocks = 0;
  for (const ParameterEntry* entry : entries) blocks += blocks_of(*entry);
  const std::int64_t count = groups.replicas;
  std::vector<std::int64_t> ends(at(groups.replicas), blocks / count);  // blocks
  for (std::int64_t left = blocks % count; left > 0; --left, next = (next + 1) % groups.replicas) {
    ++ends[at(groups.part_of(next))];
  }
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  std::int64_t begin = 0;
  for (ParameterEntry* entry : entries) {
    entry->copies = groups.copies;
    for (const std::int64_t end : ends) entry->ends.push_back(end_of(*entry, end - begin));
    begin += blocks_of(*entry);
  }
}

}  // namespace

void cut_parameters(ParameterTable& table, const ShardGroups& groups) {
  table.cut = true;
  for (std::size_t s = 0; s < table.stages.size(); ++s) {
    std::vector<ParameterEntry>& all = table.stages[s].parameters;
    int next = 0;
    for (std::size_t i = 0; i < all.size();) {
      std::vector<ParameterEntry*> updated;
      for (const int unit = all[i].unit; i < all.size() && all[i].unit == unit; ++i) {
        const bool owner = table.is_owner(static_cast<int>(s), static_cast<int>(i));
        if (owner && all[i].updated) updated.push_back(&all[i]);
      }
      cut_sequence(updated, groups, next);
    }
  }
  for (const TiedParameter& tie : table.tied) {
    const TiedUse& owner = tie.uses.front();
    const ParameterEntry& cut = table.stages[at(owner.stage)].parameters[at(owner.index)];
    for (std::size_t u = 1; u < tie.uses.size(); ++u) {
      ParameterEntry& use = table.stages[at(tie.uses[u].stage)].parameters[at(tie.uses[u].index)];
      use.ends = cut.ends;
      use.copies = cut.copies;
    }
  }
}

namespace {

// Adds the parts of a parameter that lies in `size` floats from `place` on; `packed` elements lie
// in each.
void add_range(const ParameterEntry& entry, std::size_t place, std::size_t size, std::size_t packed,
               std::vector<CutRange>& ranges) {
  if (size == 0 || entry.ends.empty()) return;
  // Padding belongs to the last part that has elements.
  std::vector<std::size_t> ends;
  for (const std::int64_t end : entry.ends) {
    ends.push_back(end == entry.elements ? size : static_cast<std::size_t>(end) / packed);
  }
  // It goes on with the last range where it follows it and none of its elements is of a part before
  // that range's last one.
  std::size_t first = 0;  // part
  while (first + 1 < ends.size() && ends[first] == 0) ++first;
  const bool joins = !ranges.empty() && [&] {
    const std::vector<std::size_t>& last = ranges.back().ends;
    return ranges.back().begin + last.back() == place &&
           (first + 1 == last.size() || last[first] == last.back());
  }();
  if (!joins) ranges.push_back({place, std::vector<std::size_t>(ends.size()), entry.copies});
  CutRange& range = ranges.back();
  const std::size_t offset = place - range.begin;
  for (std::size_t part = first; part < ends.size(); ++part) range.ends[part] = offset + ends[part];
}

std::size_t floats_of(std::span<const CutRange> ranges) {
  std::size_t floats = 0;
  for (const CutRange& each : ranges) floats += each.size();
  return floats;
}

}  // namespace

std::size_t value_bytes(const ParameterEntry& entry) { return parameter_bytes(entry.elements); }

std::size_t copy_bytes(const ParameterEntry& entry) {
  const auto bytes = static_cast<std::size_t>(entry.elements) * sizeof(Bf16);
  return entry.copied ? round_up(bytes, kBufferAlignment) : 0;
}

std::vector<CutRange> ranges_of(const StageEntry& stage) {
  std::vector<CutRange> ranges;
  std::size_t place = 0;
  for (const ParameterEntry& entry : stage.parameters) {
    const std::size_t size = value_bytes(entry) / sizeof(float);
    add_range(entry, place, size, 1, ranges);
    place += size;
  }
  return ranges;
}

std::vector<std::vector<CutRange>> unit_ranges_of(const StageEntry& stage) {
  std::vector<std::vector<CutRange>> units;
  std::size_t place = 0;
  for (int last = -1; const ParameterEntry& entry : stage.parameters) {
    const std::size_t size = value_bytes(entry) / sizeof(float);
    if (size > 0 && !entry.ends.empty()) {
      const int unit = stage.uses_units ? entry.unit : 0;
      if (std::exchange(last, unit) != unit) units.emplace_back();
      add_range(entry, place, size, 1, units.back());
    }
    place += size;
  }
  return units;
}

CutRange CutRange::of(int replica) const {
  const auto part = at(ShardGroups{static_cast<int>(ends.size()), copies}.part_of(replica));
  const std::size_t before = part == 0 ? 0 : ends[part - 1];
  return {begin + before, {ends[part] - before}};
}

CutRange CutRange::at_rest(int replica) const {
  const ShardGroups groups{static_cast<int>(ends.size()), copies};
  CutRange made{of(groups.copies_of(replica).front()).begin, {}};
  for (const int each : groups.copies_of(replica)) made.ends.push_back(of(each).end() - made.begin);
  return made;
}

std::vector<std::size_t> CutRange::ends_at_rest() const {
  std::vector<std::size_t> made;
  for (std::size_t part = at(copies); part <= ends.size(); part += at(copies)) {
    made.push_back(ends[part - 1]);
  }
  return made;
}

std::size_t ShardedUnit::bytes() const {
  return (floats_of(values) + floats_of(copies)) * sizeof(float);
}

std::size_t ShardedUnit::own_bytes(int replica) const {
  std::size_t floats = 0;
  for (const std::vector<CutRange>* ranges : {&values, &copies}) {
    for (const CutRange& each : *ranges) floats += each.at_rest(replica).size();
  }
  return floats * sizeof(float);
}

std::vector<ShardedUnit> sharded_units(const StageEntry& stage) {
  std::vector<ShardedUnit> units;
  std::size_t value = 0, copy = 0;
  for (const ParameterEntry& entry : stage.parameters) {
    const std::size_t values = value_bytes(entry) / sizeof(float);
    const std::size_t copies = copy_bytes(entry) / sizeof(float);
    if (entry.elements > 0 && !entry.ends.empty()) {
      const int number = stage.uses_units ? entry.unit : 0;
      if (units.empty() || units.back().unit != number) units.push_back({number, {}, {}, {}});
      ShardedUnit& unit = units.back();
      if (entry.copied) {
        add_range(entry, copy, copies, 2, unit.copies);
        std::vector<CutRange> alone;
        add_range(entry, value, values, 1, alone);
        unit.lent.push_back(std::move(alone.front()));
      } else {
        add_range(entry, value, values, 1, unit.values);
      }
    }
    value += values;
    copy += copies;
  }
  return units;
}

}  // namespace sluice
