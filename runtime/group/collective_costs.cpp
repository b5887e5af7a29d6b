#include "runtime/group/collective_costs.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "comm/base/index.hpp"
#include "comm/base/steady_seconds.hpp"
#include "runtime/group/group_collective.hpp"

namespace sluice {
namespace {

constexpr std::size_t kSmall = std::size_t{32} << 10, kLarge = 64 * kSmall;  // bytes
constexpr std::size_t kLargeIfSlow = 8 * kSmall;
constexpr double kSlow = 0.01;          // seconds of a small one
constexpr double kRoundsSeconds = 0.1;  // of a kind and a size, if they can
constexpr double kMostRounds = 25;

class Probe {
 public:
  Probe(Collectives& job, Collectives& group)
      : job_(job), ranks_(at(group.communicator().size())), collective_(group, "tensor rank") {}

  CollectiveCosts run() {
    CollectiveCosts costs;
    for (int kind = 0; kind < kCollectiveKinds; ++kind) {
      costs[at(kind)] = cost_of(static_cast<CollectiveKind>(kind));
    }
    return costs;
  }

 private:
  LinkCost cost_of(CollectiveKind kind) {
    const double low = median_of(kind, kSmall);
    const std::size_t large = most(low) > kSlow ? kLargeIfSlow : kLarge;
    const double high = median_of(kind, large);
    const double bandwidth = static_cast<double>(large - kSmall) / std::max(high - low, high * 0.5);
    return {.latency = std::max(0.0, low - kSmall / bandwidth), .bandwidth = bandwidth};
  }

  double median_of(CollectiveKind kind, std::size_t bytes) {
    (void)seconds(kind, bytes);  // connects and allocates
    const double longest = std::max(most(seconds(kind, bytes)), 1e-6);
    std::vector<double> rounds;
    for (auto left = static_cast<int>(std::clamp(kRoundsSeconds / longest, 1.0, kMostRounds));
         left > 0; --left) {
      rounds.push_back(seconds(kind, bytes));
    }
    const auto middle = rounds.begin() + std::ssize(rounds) / 2;
    std::nth_element(rounds.begin(), middle, rounds.end());
    return *middle;
  }

  double seconds(CollectiveKind kind, std::size_t bytes) {
    const std::size_t in = bytes / (sizeof(float) * ranks_) * sizeof(float) * ranks_;
    const std::size_t out = kind == CollectiveKind::kAllGather       ? in * ranks_
                            : kind == CollectiveKind::kReduceScatter ? in / ranks_
                                                                     : in;
    in_.resize(in);
    out_.resize(out);
    job_.barrier();
    const double start = steady_seconds();
    collective_.make(
        {.kind = kind, .in = in_, .out = kind == CollectiveKind::kSum ? std::span(in_) : out_});
    return steady_seconds() - start;
  }

  // Of all ranks.
  double most(double mine) {
    std::vector<double> all(at(job_.communicator().size()));
    job_.all_gather(mine, all);
    return *std::max_element(all.begin(), all.end());
  }

  Collectives& job_;
  std::size_t ranks_;
  GroupCollective collective_;
  std::vector<std::byte> in_, out_;
};

}  // namespace

CollectiveCosts measure_collectives(Collectives& job, Collectives& group) {
  return Probe(job, group).run();
}

CollectiveCosts slower(const CollectiveCosts& one, const CollectiveCosts& two) {
  CollectiveCosts costs = one;
  for (std::size_t kind = 0; kind < costs.size(); ++kind) {
    if (!(one[kind].bandwidth > 0)) {
      costs[kind] = two[kind];
    } else if (two[kind].bandwidth > 0) {
      costs[kind] = {std::max(one[kind].latency, two[kind].latency),
                     std::min(one[kind].bandwidth, two[kind].bandwidth)};
    }
  }
  return costs;
}

}  // namespace sluice
