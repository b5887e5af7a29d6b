// Partitions of layers into stages.
#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>

#include <sluice/error.hpp>
#include <sluice/stage.hpp>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"

namespace sluice {

namespace {

void require_stages(int stages) {
  if (stages < 1) {
    throw_usage("a partition over {} stages; it needs at least 1", stages);
  }
}

// A stage per layer; surplus stages before the last are empty.
Partition one_layer_each(int layers, int stages) {
  if (layers < 2) {
    throw_usage(
        "{} layer on {} stages; the first and the last stage "
        "need a layer each, so at most {} stage",
        layers, stages, std::max(layers, 1));
  }
  Partition partition;
  partition.first.reserve(at(stages) + 1);
  for (int s = 0; s < stages; ++s) {
    partition.first.push_back(std::min(s, layers - 1));
  }
  partition.first.back() = layers - 1;
  partition.first.push_back(layers);
  return partition;
}

// [n]: the fewest stages for the first n layers if no stage costs more than `bound`, which no
// single layer exceeds. Each stage takes as many layers as it can.
std::vector<int> stages_needed(const std::vector<double>& prefix, double bound) {
  std::vector<int> needed(prefix.size(), 0);
  size_t begin = 0;
  for (size_t n = 1; n < prefix.size(); ++n) {
    needed[n] = needed[n - 1];
    if (n == 1 || prefix[n] - prefix[begin] > bound) {
      begin = n - 1;
      ++needed[n];
    }
  }
  return needed;
}

// The smallest possible largest cost of a stage. Non-negative doubles have the order of their bits,
// so bisection over the bits finds the exact number.
double least_largest(const std::vector<double>& prefix, int stages) {
  double most = 0;
  for (size_t n = 1; n < prefix.size(); ++n) {
    most = std::max(most, prefix[n] - prefix[n - 1]);
  }
  auto low = std::bit_cast<std::uint64_t>(most);
  auto high = std::bit_cast<std::uint64_t>(prefix.back());
  while (low < high) {
    const std::uint64_t middle = low + (high - low) / 2;
    if (stages_needed(prefix, std::bit_cast<double>(middle)).back() <= stages) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return std::bit_cast<double>(low);
}

std::vector<int> parse_counts(std::string_view text, int blocks, int stages) {
  const auto refuse = [&](std::string_view why) {
    throw_usage(
        "--partition {}: {}; legal: auto, even, or {} counts of blocks, "
        "separated by commas, that add up to {}",
        text, why, stages, blocks);
  };
  std::vector<int> counts;
  std::int64_t sum = 0;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    const std::string_view field = text.substr(begin, comma - begin);
    int count = 0;
    const auto parsed = std::from_chars(field.data(), field.data() + field.size(), count);
    if (field.empty() || parsed.ec != std::errc() || parsed.ptr != field.data() + field.size() ||
        count < 0) {
      refuse(fmt::format("'{}' is not a count", field));
    }
    counts.push_back(count);
    sum += count;
    begin = comma + 1;
  }
  if (counts.size() != at(stages)) {
    refuse(fmt::format("{} counts for {} stages", counts.size(), stages));
  }
  if (sum != blocks) {
    refuse(fmt::format("the counts add up to {}, the model has {} blocks", sum, blocks));
  }
  return counts;
}

// The embedding joins the first stage's blocks, the head the last stage's.
Partition from_block_counts(const std::vector<int>& counts) {
  Partition partition;
  partition.first.push_back(0);
  int layer = 1;
  for (const int count : counts) {
    layer += count;
    partition.first.push_back(layer);
  }
  partition.first.back() += 1;
  return partition;
}

}  // namespace

Partition partition_by_cost(std::span<const double> costs, int stages) {
  require_stages(stages);
  for (std::size_t i = 0; i < costs.size(); ++i) {
    if (costs[i] >= 0 && std::isfinite(costs[i])) continue;
    throw_usage("layer {} costs {}; legal are numbers from 0", i, costs[i]);
  }
  const int layers = static_cast<int>(costs.size());
  if (layers < stages) {
    return one_layer_each(layers, stages);
  }
  std::vector<double> prefix(costs.size() + 1, 0.0);
  std::partial_sum(costs.begin(), costs.end(), prefix.begin() + 1);
  const double bound = least_largest(prefix, stages);
  const std::vector<int> needed = stages_needed(prefix, bound);

  // From the back: each stage as light as the bound on the rest allows, none empty.
  Partition partition;
  partition.first.assign(at(stages) + 1, 0);
  size_t end = costs.size();
  for (int s = stages; s > 1; --s) {
    partition.first[at(s)] = static_cast<int>(end);
    --end;
    while (needed[end] > s - 1) {
      --end;
    }
  }
  partition.first[1] = static_cast<int>(end);
  return partition;
}

Partition parse_partition(std::string_view text, std::span<const double> costs, int stages) {
  require_stages(stages);
  if (costs.size() < 3) {
    throw_usage(
        "a partition of {} layers by their costs; legal: at least 3, of the "
        "embedding, each block and the head",
        costs.size());
  }
  const int blocks = static_cast<int>(costs.size()) - 2;
  if (text == "auto") {
    return partition_by_cost(costs, stages);
  }
  if (text == "even") {
    std::vector<int> counts;
    for (int s = 0; s < stages; ++s) {
      counts.push_back(blocks / stages + (s < blocks % stages ? 1 : 0));
    }
    return from_block_counts(counts);
  }
  return from_block_counts(parse_counts(text, blocks, stages));
}

Slice StagePlace::slice(int axis, std::int64_t whole) const {
  if (axis < 0 || whole < 0) {
    throw_usage("a slice of {} rows of dimension {}; legal are numbers from 0", whole, axis);
  }
  if (tensors == 1) return {};
  const std::int64_t least = whole / tensors, more = whole % tensors;
  return {.axis = axis,
          .begin = tensor * least + std::min<std::int64_t>(tensor, more),
          .length = least + (tensor < more ? 1 : 0),
          .whole = whole};
}

}  // namespace sluice
