// Partition: which layers sit on which stage. Plain integers, no tensors.
#pragma once

#include <span>
#include <string_view>
#include <vector>

namespace sluice {

// A model is a row of layers; stage s owns layers [first[s], first[s + 1]). first has stages + 1
// entries, first[0] = 0, first[stages] = number of layers; empty stages pass their input on.
struct Partition {
  std::vector<int> first;
  [[nodiscard]] int stages() const { return static_cast<int>(first.size()) - 1; }
  friend bool operator==(const Partition&, const Partition&) = default;
};

// Contiguous, smallest possible largest cost, found by bisection in time linear in the layers; ties
// go to the partition whose later stages are lighter. costs[i] >= 0 is layer i's work (embedding
// and head included). Stage 0 always owns the first layer and the last stage the last one. With at
// least as many layers as stages no stage is empty; with fewer, each layer has a stage of its own
// and the stages before the last are empty. Throws Error(kUsage) for stages < 1, and for one layer
// on several stages.
[[nodiscard]] Partition partition_by_cost(std::span<const double> costs, int stages);

// "auto" (by cost), "even" (equal counts of blocks, the first stages take one more; embedding with
// the first block, head with the last), or a list of blocks per stage such as "2,3,0,2". `costs`
// has 1 + blocks + 1 entries: embedding, blocks, head. Throws Error(kUsage) naming what was given
// and what the counts must add up to.
[[nodiscard]] Partition parse_partition(std::string_view text, std::span<const double> costs,
                                        int stages);

}  // namespace sluice
