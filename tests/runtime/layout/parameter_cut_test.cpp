// How the parameters of a stage are divided among its replicas, and sums over their parts into
// buckets: properties over random tables.
#include "runtime/layout/parameter_cut.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/gradients/gradient_sums.hpp"
#include "stages/compute/call_arguments.hpp"

namespace sluice {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

bool is_frozen(const ParameterEntry& entry) { return !entry.updated; }

std::int64_t blocks_in(const ElementRange& range) {
  return (range.count + kSumBlock - 1) / kSumBlock;
}

// The largest difference between replicas, whose numbers these are.
std::int64_t spread(const std::vector<std::int64_t>& numbers) {
  const auto [least, most] = std::minmax_element(numbers.begin(), numbers.end());
  return *most - *least;
}

ParameterEntry entry_of(std::string name, std::int64_t elements, int unit = 0) {
  const bool frozen = name.starts_with("frozen");
  return {.name = std::move(name), .elements = elements, .unit = unit, .updated = !frozen};
}

ParameterTable table_of(std::vector<ParameterEntry> entries) {
  ParameterTable table;
  table.stages.emplace_back().parameters = std::move(entries);
  return table;
}

void cut(ParameterTable& table, int replicas, int copies = 1) {
  cut_parameters(table, {.replicas = replicas, .copies = copies});
}

// [replica] elements of a parameter.
std::vector<std::int64_t> counts_of(const ParameterEntry& entry, int replicas) {
  std::vector<std::int64_t> counts;
  for (int r = 0; r < replicas; ++r) counts.push_back(entry.part(r).count);
  return counts;
}

class RandomTables {
 public:
  // Stages of up to 5 units of up to 7 parameters: none, few and many blocks, full and odd ones.
  ParameterTable next() {
    ParameterTable table;
    const int stages = number(1, 3);
    for (int s = 0; s < stages; ++s) {
      StageEntry& stage = table.stages.emplace_back();
      const int units = number(0, 5);
      for (int unit = 0; unit < units; ++unit) {
        for (int i = number(1, 7); i > 0; --i) {
          const bool frozen = number(0, 4) == 0;
          stage.parameters.push_back(
              entry_of((frozen ? "frozen " : "") + std::to_string(++names_), elements(), unit));
        }
      }
    }
    tie_some(table);
    return table;
  }
  int number(int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random_);
  }

 private:
  std::int64_t elements() {
    switch (number(0, 5)) {
      case 0:
        return 0;
      case 1:
        return number(1, 100);
      case 2:
        return number(1, 12) * kSumBlock;
      case 3:
        return number(1, 12) * kSumBlock + number(-1, 1);
      default:
        return number(1, 12 * static_cast<int>(kSumBlock));
    }
  }
  // Further uses, in the same stage and in others, of parameters that are there.
  void tie_some(ParameterTable& table) {
    for (int ties = number(0, 3); ties > 0; --ties) {
      const int s = number(0, static_cast<int>(table.stages.size()) - 1);
      auto& owners = table.stages[static_cast<std::size_t>(s)].parameters;
      if (owners.empty()) continue;
      const int index = number(0, static_cast<int>(owners.size()) - 1);
      ParameterEntry use = owners[static_cast<std::size_t>(index)];
      if (use.tied) continue;
      owners[static_cast<std::size_t>(index)].tied = use.tied = true;
      TiedParameter tie{.name = use.name, .uses = {{s, index}}, .routes = {}};
      for (int uses = number(1, 2); uses > 0; --uses) {
        const int other = number(s, static_cast<int>(table.stages.size()) - 1);
        auto& into = table.stages[static_cast<std::size_t>(other)].parameters;
        use.unit = into.empty() ? 0 : into.back().unit + number(0, 1);
        tie.uses.push_back({other, static_cast<int>(into.size())});
        into.push_back(use);
      }
      table.tied.push_back(std::move(tie));
    }
  }

  std::mt19937 random_{41};
  int names_ = 0;
};

// Calls `check(table, replicas)` with tables that have been cut.
void for_random_tables(const std::function<void(const ParameterTable&, int replicas)>& check) {
  RandomTables tables;
  for (int round = 0; round < 500 && !::testing::Test::HasFailure(); ++round) {
    ParameterTable table = tables.next();
    const int replicas = round % 10 == 0 ? tables.number(30, 100) : tables.number(1, 9);
    SCOPED_TRACE("round " + std::to_string(round));
    cut(table, replicas);
    check(table, replicas);
  }
}

// Owners of one stage: [unit][replica] blocks.
using BlocksOfUnits = std::map<int, std::vector<std::int64_t>>;
BlocksOfUnits blocks_of_units(const ParameterTable& table, int stage, int replicas) {
  BlocksOfUnits units;
  const auto& entries = table.stages[static_cast<std::size_t>(stage)].parameters;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (!table.is_owner(stage, static_cast<int>(i)) || is_frozen(entries[i])) continue;
    auto& blocks = units[entries[i].unit];
    blocks.resize(static_cast<std::size_t>(replicas));
    for (int r = 0; r < replicas; ++r) {
      blocks[static_cast<std::size_t>(r)] += blocks_in(entries[i].part(r));
    }
  }
  return units;
}

TEST(ParameterCutTest, EveryElementHasOneReplicaAndPartsBeginAtBlocks) {
  for_random_tables([](const ParameterTable& table, int replicas) {
    for (const StageEntry& stage : table.stages) {
      for (const ParameterEntry& entry : stage.parameters) {
        ASSERT_EQ(entry.ends.empty(), is_frozen(entry));
        if (is_frozen(entry)) continue;
        ASSERT_EQ(entry.ends.size(), static_cast<std::size_t>(replicas));
        std::int64_t next = 0;
        for (int r = 0; r < replicas; ++r) {
          const ElementRange part = entry.part(r);
          ASSERT_EQ(part.first, next) << entry.name << " replica " << r;
          ASSERT_GE(part.count, 0);
          ASSERT_TRUE(part.count == 0 || part.first % kSumBlock == 0);
          next = part.end();
        }
        ASSERT_EQ(next, entry.elements) << entry.name;
      }
    }
  });
}

TEST(ParameterCutTest, UnitsAndStagesDifferByAtMostOneBlock) {
  for_random_tables([](const ParameterTable& table, int replicas) {
    for (int s = 0; s < static_cast<int>(table.stages.size()); ++s) {
      std::vector<std::int64_t> stage(static_cast<std::size_t>(replicas));
      for (const auto& [unit, blocks] : blocks_of_units(table, s, replicas)) {
        ASSERT_LE(spread(blocks), 1) << "stage " << s << " unit " << unit;
        for (std::size_t r = 0; r < blocks.size(); ++r) stage[r] += blocks[r];
      }
      ASSERT_LE(spread(stage), 1) << "stage " << s;
    }
  });
}

// The parts of a unit lie one after the other in the order of its parameters.
TEST(ParameterCutTest, AReplicaHasOneRangeOfAUnit) {
  for_random_tables([](const ParameterTable& table, int replicas) {
    for (int s = 0; s < static_cast<int>(table.stages.size()); ++s) {
      const auto& entries = table.stages[static_cast<std::size_t>(s)].parameters;
      std::map<int, int> last;  // [unit] replica that has its last elements so far
      for (std::size_t i = 0; i < entries.size(); ++i) {
        if (!table.is_owner(s, static_cast<int>(i)) || is_frozen(entries[i])) continue;
        int& now = last[entries[i].unit];
        for (int r = 0; r < replicas; ++r) {
          if (entries[i].part(r).count == 0) continue;
          ASSERT_GE(r, now) << entries[i].name;
          now = r;
        }
      }
    }
  });
}

TEST(ParameterCutTest, OtherUsesAreCutLikeTheirOwner) {
  int ties = 0;
  for_random_tables([&](const ParameterTable& table, int /*replicas*/) {
    const auto entry = [&](const TiedUse& use) -> const ParameterEntry& {
      return table.stages[static_cast<std::size_t>(use.stage)]
          .parameters[static_cast<std::size_t>(use.index)];
    };
    for (const TiedParameter& tie : table.tied) {
      for (const TiedUse& use : tie.uses) {
        ASSERT_EQ(entry(use).ends, entry(tie.uses.front()).ends) << tie.name;
        ASSERT_EQ(entry(use).copies, entry(tie.uses.front()).copies);
        ++ties;
      }
    }
  });
  EXPECT_GT(ties, 200);
}

// What the ranges of a stage say of each float, beside what the parts of its parameters say.
TEST(ParameterCutTest, RangesCoverWhatIsUpdatedAsThePartsDo) {
  for_random_tables([](const ParameterTable& table, int replicas) {
    for (const StageEntry& stage : table.stages) {
      std::size_t size = 0;
      for (const ParameterEntry& entry : stage.parameters) {
        size += parameter_bytes(entry.elements) / sizeof(float);
      }
      std::vector<std::int8_t> owner_at(size, -1);
      std::size_t covered = 0;
      for (const CutRange& range : ranges_of(stage)) {
        ASSERT_GE(range.begin, covered);
        ASSERT_GT(range.ends.back(), 0U);
        ASSERT_EQ(range.ends.size(), static_cast<std::size_t>(replicas));
        std::size_t begin = 0;
        for (std::size_t r = 0; r < range.ends.size(); ++r) {
          ASSERT_LE(begin, range.ends[r]);
          ASSERT_LE(range.begin + range.ends[r], size);
          std::fill(owner_at.begin() + static_cast<std::ptrdiff_t>(range.begin + begin),
                    owner_at.begin() + static_cast<std::ptrdiff_t>(range.begin + range.ends[r]),
                    static_cast<std::int8_t>(r));
          begin = range.ends[r];
        }
        covered = range.begin + range.ends.back();
      }
      std::size_t begin = 0;
      for (const ParameterEntry& entry : stage.parameters) {
        const std::size_t floats = parameter_bytes(entry.elements) / sizeof(float);
        const auto place = owner_at.begin() + static_cast<std::ptrdiff_t>(begin);
        ASSERT_EQ(std::count(place, place + static_cast<std::ptrdiff_t>(floats), -1),
                  is_frozen(entry) ? static_cast<std::ptrdiff_t>(floats) : 0)
            << entry.name;
        for (int r = 0; r < replicas; ++r) {
          const ElementRange part = entry.part(r);
          const auto first = place + part.first;
          ASSERT_TRUE(is_frozen(entry) || std::count(first, first + part.count, r) == part.count)
              << entry.name;
        }
        begin += floats;
      }
    }
  });
}

// Two ranges that follow each other could not be one: an owner would come after a later one.
TEST(ParameterCutTest, RangesAreTheFewest) {
  for_random_tables([](const ParameterTable& table, int /*replicas*/) {
    for (const StageEntry& stage : table.stages) {
      const std::vector<CutRange> ranges = ranges_of(stage);
      for (std::size_t i = 1; i < ranges.size(); ++i) {
        const std::vector<std::size_t>&before = ranges[i - 1].ends, &after = ranges[i].ends;
        ASSERT_GT(after.back(), 0U);
        if (ranges[i - 1].begin + before.back() < ranges[i].begin) continue;  // frozen ones between
        const auto last = std::find(before.begin(), before.end(), before.back()) - before.begin();
        const auto first =
            std::find_if(after.begin(), after.end(), [](auto end) { return end > 0; }) -
            after.begin();
        ASSERT_LT(first, last) << "range " << i;
      }
    }
  });
}

TEST(ParameterCutTest, OneReplicaHasAllInOneRange) {
  ParameterTable table = table_of({entry_of("a", 5), entry_of("none", 0),
                                   entry_of("b", 3 * kSumBlock + 1, 1), entry_of("frozen", 7, 1)});
  cut(table, 1);
  for (const ParameterEntry& entry : table.stages[0].parameters) {
    if (is_frozen(entry)) continue;
    EXPECT_THAT(entry.ends, ElementsAre(entry.elements)) << entry.name;
  }
  EXPECT_EQ(ranges_of(table.stages[0]).size(), 1U);
}

// Five blocks over four replicas, unit after unit.
TEST(ParameterCutTest, TheRemainderGoesOnAtTheNextReplica) {
  ParameterTable table = table_of({entry_of("a", 5 * kSumBlock, 0), entry_of("b", 5 * kSumBlock, 1),
                                   entry_of("c", 2 * kSumBlock, 2), entry_of("d", 1, 3)});
  cut(table, 4);
  const auto& entries = table.stages[0].parameters;
  const std::int64_t k = kSumBlock;
  EXPECT_THAT(counts_of(entries[0], 4), ElementsAre(2 * k, k, k, k));
  EXPECT_THAT(counts_of(entries[1], 4), ElementsAre(k, 2 * k, k, k));
  EXPECT_THAT(counts_of(entries[2], 4), ElementsAre(0, 0, k, k));
  EXPECT_THAT(counts_of(entries[3], 4), ElementsAre(1, 0, 0, 0));
}

// The next replica counts on from unit to unit, and does not depend on what is frozen.
TEST(ParameterCutTest, FrozenParametersAreNotCut) {
  const std::int64_t k = kSumBlock;
  ParameterTable with =
      table_of({entry_of("a", 2 * k), entry_of("frozen 1", k), entry_of("b", 3 * k),
                entry_of("frozen 2", 2 * k, 1), entry_of("c", k, 1)});
  ParameterTable without =
      table_of({entry_of("a", 2 * k), entry_of("b", 3 * k), entry_of("c", k, 1)});
  cut(with, 3);
  cut(without, 3);
  const auto& all = with.stages[0].parameters;
  const auto& updated = without.stages[0].parameters;
  EXPECT_EQ(all[0].ends, updated[0].ends);
  EXPECT_EQ(all[2].ends, updated[1].ends);
  EXPECT_EQ(all[4].ends, updated[2].ends);
  EXPECT_THAT(all[1].ends, IsEmpty());
  EXPECT_THAT(all[3].ends, IsEmpty());
}

// Each stage begins at replica 0, and a use that is no owner takes no blocks.
TEST(ParameterCutTest, AUseOfATiedParameterIsNotCounted) {
  const std::int64_t k = kSumBlock;
  ParameterTable table = table_of({entry_of("tied", 3 * k)});
  table.stages.emplace_back().parameters = {entry_of("a", k), entry_of("tied", 3 * k),
                                            entry_of("b", k)};
  table.tied = {{.name = "tied", .uses = {{0, 0}, {1, 1}}, .routes = {}}};
  cut(table, 2);
  const auto& second = table.stages[1].parameters;
  EXPECT_THAT(counts_of(table.stages[0].parameters[0], 2), ElementsAre(2 * k, k));
  EXPECT_THAT(counts_of(second[0], 2), ElementsAre(k, 0));
  EXPECT_THAT(counts_of(second[1], 2), ElementsAre(2 * k, k));
  EXPECT_THAT(counts_of(second[2], 2), ElementsAre(0, k));
}

// Each float of a part is in one piece, of its replica.
TEST(PartBucketsTest, HaveAllPartsFromTheLastRangeOn) {
  for_random_tables([](const ParameterTable& table, int replicas) {
    for (const StageEntry& stage : table.stages) {
      std::vector<CutRange> ranges = ranges_of(stage);
      std::size_t next = 0;  // bucket
      const auto buckets = part_buckets(ranges, 50'000);
      for (; !ranges.empty(); ranges.pop_back()) {
        std::vector<std::size_t> now = ranges.back().ends;  // [replica]
        for (std::size_t r = now.size() - 1; r > 0; --r) now[r] = now[r - 1];
        now[0] = 0;
        while (now != ranges.back().ends) {
          ASSERT_LT(next, buckets.size());
          ASSERT_EQ(buckets[next].begin, ranges.back().begin);
          ASSERT_EQ(buckets[next].pieces.size(), static_cast<std::size_t>(replicas));
          for (std::size_t r = 0; r < now.size(); ++r) {
            const NcclSums::Piece& piece = buckets[next].pieces[r];
            ASSERT_EQ(piece.begin, ranges.back().begin + now[r]);
            ASSERT_EQ(piece.begin % NcclSums::kPieceMultiple, 0U);
            now[r] += piece.size;
            ASSERT_LE(now[r], ranges.back().ends[r]);
          }
          ++next;
        }
      }
      ASSERT_EQ(next, buckets.size());
    }
  });
}

// A unit much larger than a bucket: all replicas receive at a time, and need little memory for it.
TEST(PartBucketsTest, NoReplicaReceivesMoreThanItsShareOfABucket) {
  for (const int replicas : {2, 3, 8, 16}) {
    ParameterTable table = table_of(
        {entry_of("a", 500 * kSumBlock + 7), entry_of("b", 100), entry_of("c", 300 * kSumBlock)});
    cut(table, replicas);
    const std::size_t bucket = 20 * kSumBlock, blocks = 802;
    const auto buckets = part_buckets(ranges_of(table.stages[0]), bucket);
    EXPECT_EQ(buckets.size(), 41U);
    // A part may have one block more than others.
    const std::size_t most =
        bucket * (blocks / static_cast<std::size_t>(replicas) + 1) / blocks + 100;
    for (const GradientBucket& each : buckets) {
      std::size_t sum = 0;
      for (const NcclSums::Piece& piece : each.pieces) {
        EXPECT_LE(piece.size, most) << "of " << replicas;
        sum += piece.size;
      }
      EXPECT_LE(sum, bucket + NcclSums::kPieceMultiple * each.pieces.size());
    }
  }
}

TEST(PartBucketsTest, ASmallRangeIsOneAndNoElementsAreNone) {
  ParameterTable table = table_of({entry_of("none", 0), entry_of("a", 3 * kSumBlock)});
  table.stages.emplace_back().parameters = {entry_of("nothing", 0)};
  cut(table, 2);
  EXPECT_EQ(part_buckets(ranges_of(table.stages[0]), 3 * kSumBlock).size(), 1U);
  EXPECT_THAT(part_buckets(ranges_of(table.stages[1]), 64), ::testing::IsEmpty());
}

// Each shard's blocks begin at its first element, and replicas have as many of them.
TEST(ParameterCutTest, BlocksBeginAnewAtEachShard) {
  const std::int64_t k = kSumBlock;
  const std::vector<std::pair<int, std::int64_t>> rows = {
      {2, k + 3}, {2, 5}, {3, 0}, {4, 2 * k}, {5, 7}, {5, k - 7}, {6, 3 * k + 1}};
  ParameterEntry entry = entry_of("w", 0);
  entry.slice = {.axis = 0, .begin = 0, .length = 0, .whole = 100 * k};
  for (const auto& [shard, count] : rows) {
    entry.parts.push_back({{0, entry.elements, count, 100 * k}, shard});
    entry.slice.length = entry.elements += count;
  }
  // [block] where it ends: 2 of shard 2, 2 of shard 4, 1 of shard 5, 4 of shard 6.
  const std::int64_t two = k + 8, four = two + 2 * k, five = four + k;
  const std::vector<std::int64_t> ends = {
      k, two, two + k, four, five, five + k, five + 2 * k, five + 3 * k, five + 3 * k + 1};
  for (int replicas = 1; replicas < 12; ++replicas) {
    ParameterTable table = table_of({entry, entry_of("b", 5 * k)});
    cut(table, replicas);
    const auto& entries = table.stages[0].parameters;
    std::vector<std::int64_t> blocks;
    std::ptrdiff_t before = 0;
    for (int r = 0; r < replicas; ++r) {
      const std::int64_t end = entries[0].ends[static_cast<std::size_t>(r)];
      const auto found = std::find(ends.begin(), ends.end(), end);
      ASSERT_TRUE(found != ends.end() || end == 0) << end;
      const std::ptrdiff_t now = end == 0 ? 0 : found - ends.begin() + 1;
      blocks.push_back(now - before + blocks_in(entries[1].part(r)));
      before = now;
    }
    EXPECT_EQ(entries[0].ends.back(), entry.elements);
    EXPECT_LE(spread(blocks), 1) << replicas;
    EXPECT_EQ(ranges_of(table.stages[0]).size(), 1U);
  }
}

TEST(ParameterCutTest, WithoutACutAllReplicasHaveTheWhole) {
  const ParameterEntry entry = entry_of("a", 5);
  EXPECT_EQ(entry.part(3).first, 0);
  EXPECT_EQ(entry.part(3).count, 5);
}

// --- groups of replicas that have a copy each ---
TEST(ShardGroupsTest, PartsOfEqualPlacesInGroupsFollowOneAnother) {
  const ShardGroups groups{.replicas = 6, .copies = 3};
  EXPECT_THAT(groups.parts(), ElementsAre(0, 3, 1, 4, 2, 5));
  for (int replica = 0; replica < 6; ++replica) {
    EXPECT_EQ(groups.replica_of(groups.part_of(replica)), replica);
  }
  EXPECT_THAT(groups.sharers_of(3), ElementsAre(2, 3));
  EXPECT_THAT(groups.copies_of(3), ElementsAre(1, 3, 5));
}

TEST(ShardGroupsTest, WithinHostsAreTheLargestThatFitAllStages) {
  const std::vector<int> pairs = {0, 0, 1, 1, 2, 2, 3, 3}, fours = {0, 0, 0, 0, 1, 1, 1, 1};
  EXPECT_EQ(shard_group_within_hosts({fours}), 4);
  EXPECT_EQ(shard_group_within_hosts({fours, pairs}), 2);
  EXPECT_EQ(shard_group_within_hosts({{7, 7, 7}}), 3);
  EXPECT_EQ(shard_group_within_hosts({{0, 0, 1, 1, 1, 1}}), 2);
  EXPECT_EQ(shard_group_within_hosts({{0, 0, 0, 0, 1, 1}}), 2);
  EXPECT_EQ(shard_group_within_hosts({{0, 1, 0, 1}}), 1);
  EXPECT_EQ(shard_group_within_hosts({pairs, {0, 1, 1, 1, 1, 1, 1, 0}}), 1);
  EXPECT_EQ(shard_group_within_hosts({{5}}), 1);
}

TEST(ShardGroupsTest, TheNearestNumbersThatDivideReplicasAreLegal) {
  EXPECT_EQ(legal_shard_groups(3, 8), "2 or 4");
  EXPECT_EQ(legal_shard_groups(5, 8), "4 or 8");
  EXPECT_EQ(legal_shard_groups(1, 9), "3");
  EXPECT_EQ(legal_shard_groups(-3, 4), "2");
  EXPECT_EQ(legal_shard_groups(2, 7), "7");
  EXPECT_EQ(legal_shard_groups(99, 6), "6");
}

// What replicas update covers a stage once, and what they have at rest once a group; each has at
// rest what those of its place update, and groups are even.
TEST(ShardGroupsTest, PartsAtRestAreThoseOfTheReplicasThatUpdateThem) {
  RandomTables random;
  for (int round = 0; round < 300 && !::testing::Test::HasFailure(); ++round) {
    SCOPED_TRACE(round);
    ParameterTable table = random.next();
    const ShardGroups groups{
        .replicas = 12,
        .copies = std::array{1, 2, 3, 4, 6}.at(static_cast<std::size_t>(round % 5))};
    cut_parameters(table, groups);
    table.gather = Gather::kPerUse;
    for (int s = 0; s < static_cast<int>(table.stages.size()); ++s) {
      const StageEntry& stage = table.stages[static_cast<std::size_t>(s)];
      for (std::size_t i = 0; i < stage.parameters.size(); ++i) {
        const ParameterEntry& entry = stage.parameters[i];
        if (is_frozen(entry)) continue;
        std::int64_t updated = 0;
        for (int r = 0; r < groups.replicas; ++r) {
          const ElementRange rests = table.at_rest(s, static_cast<int>(i), r);
          std::int64_t next = rests.first;
          for (const int same : groups.copies_of(r)) {
            ASSERT_EQ(entry.part(same).first, next);
            next = entry.part(same).end();
            ASSERT_EQ(entry.part_at_rest(same).first, rests.first);
          }
          ASSERT_EQ(next, rests.end());
          const int place = groups.place_of(r);
          ASSERT_EQ(rests.first, place == 0 ? 0 : entry.part_at_rest(r - 1).end());
          updated += entry.part(r).count;
        }
        ASSERT_EQ(updated, entry.elements);
      }
      std::vector<std::int64_t> at_rest(static_cast<std::size_t>(groups.size()));
      for (const auto& [unit, blocks] : blocks_of_units(table, s, groups.replicas)) {
        ASSERT_LE(spread(blocks), 1);
        for (int r = 0; r < groups.replicas; ++r) {
          at_rest[static_cast<std::size_t>(groups.place_of(r))] +=
              blocks[static_cast<std::size_t>(r)];
        }
      }
      ASSERT_LE(spread(at_rest), 1);
      for (const CutRange& range : ranges_of(stage)) {
        const std::vector<std::size_t> ends = range.ends_at_rest();
        ASSERT_EQ(ends.size(), static_cast<std::size_t>(groups.size()));
        for (int r = 0; r < groups.replicas; ++r) {
          const CutRange rests = range.at_rest(r), own = range.of(r);
          ASSERT_EQ(rests.end(), range.begin + ends[static_cast<std::size_t>(groups.place_of(r))]);
          ASSERT_EQ(rests.ends.size(), static_cast<std::size_t>(groups.copies));
          ASSERT_EQ(own.end(),
                    rests.begin + rests.ends[static_cast<std::size_t>(groups.group_of(r))]);
          ASSERT_GE(own.begin, rests.begin);
        }
      }
    }
  }
}

// --- units that replicas gather ---
std::size_t bytes_of(const std::vector<CutRange>& ranges) {
  std::size_t floats = 0;
  for (const CutRange& each : ranges) floats += each.ends.back();
  return floats * sizeof(float);
}

// Every cut parameter is in one unit: its values, or its copy in bf16.
TEST(ShardedUnitsTest, TheyHaveAllThatIsCutOnce) {
  RandomTables random;
  for (int round = 0; round < 200; ++round) {
    ParameterTable table = random.next();
    const int replicas = random.number(2, 5);
    const int groups = random.number(1, 3);
    cut(table, groups * replicas, groups);
    for (StageEntry& stage : table.stages) {
      stage.uses_units = random.number(0, 1) == 1;
      std::size_t values = 0, copies = 0;
      std::set<int> numbers;
      for (ParameterEntry& each : stage.parameters) {
        each.copied = random.number(0, 1) == 1;
        if (each.ends.empty() || each.elements == 0) continue;
        numbers.insert(stage.uses_units ? each.unit : 0);
        (each.copied ? copies : values) +=
            each.copied ? round_up(static_cast<std::size_t>(each.elements) * 2, kBufferAlignment)
                        : parameter_bytes(each.elements);
      }
      std::vector<int> seen;
      for (const ShardedUnit& unit : sharded_units(stage)) {
        seen.push_back(unit.unit);
        values -= bytes_of(unit.values);
        copies -= bytes_of(unit.copies);
        std::size_t own = 0;
        for (int r = 0; r < replicas; ++r) own += unit.own_bytes(r);
        EXPECT_EQ(own, unit.bytes());
      }
      EXPECT_THAT(seen, ::testing::ElementsAreArray(numbers));
      EXPECT_EQ(values, 0U);
      EXPECT_EQ(copies, 0U);
    }
  }
}

// The copy of a parameter of 3 blocks lies behind one of a frozen parameter, and two of its
// elements in a float.
TEST(ShardedUnitsTest, CopiesLieBehindThoseOfFrozenParameters) {
  ParameterTable table = table_of({entry_of("frozen a", 64), entry_of("b", 3 * kSumBlock)});
  for (ParameterEntry& each : table.stages[0].parameters) each.copied = true;
  cut(table, 2);
  const std::vector<ShardedUnit> units = sharded_units(table.stages[0]);
  ASSERT_EQ(units.size(), 1U);
  EXPECT_THAT(units[0].values, IsEmpty());
  ASSERT_EQ(units[0].copies.size(), 1U);
  EXPECT_EQ(units[0].copies[0].begin, kBufferAlignment / sizeof(float));
  EXPECT_THAT(units[0].copies[0].ends, ElementsAre(kSumBlock, 3 * kSumBlock / 2));
}

}  // namespace
}  // namespace sluice
