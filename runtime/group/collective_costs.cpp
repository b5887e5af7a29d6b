#include "runtime/group/collective_costs.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include <sluice/operators.hpp>

#include "comm/base/index.hpp"
#include "comm/base/steady_seconds.hpp"
#include "runtime/group/group_collective.hpp"

namespace sluice {
namespace {

// The product between two collectives takes some milliseconds, as those of models do, and writes
// what the next one passes.
constexpr std::int64_t kRows = 256, kIn = 512, kOut = 2048;
constexpr std::size_t kLarge = kRows * kOut * sizeof(float), kSmall = kLarge / 64;  // bytes
constexpr std::size_t kLargeIfSlow = kLarge / 8;
constexpr double kSlow = 0.01;  // seconds of a small one
// Turns are short, since the speed of machines changes; their median counts.
constexpr int kRounds = 4;
constexpr double kMostTurns = 25;

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

class Probe {
 public:
  Probe(Collectives& job, Collectives& group, ComputeContext& compute, double seconds)
      : job_(job),
        group_(group),
        ranks_(at(group.communicator().size())),
        collective_(group, "tensor rank"),
        compute_(compute),
        seconds_of_kind_(seconds / kCollectiveKinds),
        x_(kRows * kIn),
        weight_(kOut * kIn),
        y_(kRows * kOut),
        out_(kLarge * ranks_) {}

  CollectiveCosts run() {
    CollectiveCosts costs;
    for (int kind = 0; kind < kCollectiveKinds; ++kind) {
      costs[at(kind)] = cost_of(static_cast<CollectiveKind>(kind));
    }
    return costs;
  }

 private:
  // What a collective adds to the product before it, waits for ranks that come to it later
  // included: the products alone take what they take in the mean over the ranks.
  LinkCost cost_of(CollectiveKind kind) {
    (void)seconds_of_rounds(kind, kLarge);  // connects and allocates
    const double slow = most(seconds_of_rounds(kind, kSmall) - seconds_of_rounds(kind, 0));
    const std::size_t large = slow > kSlow ? kLargeIfSlow : kLarge;
    std::vector<double> of_small, of_large;
    const auto turn = [&] {
      const double alone = seconds_of_rounds(kind, 0);
      of_small.push_back(seconds_of_rounds(kind, kSmall) - alone);
      of_large.push_back(seconds_of_rounds(kind, large) - alone);
      return kRounds * (3 * alone + of_small.back() + of_large.back());
    };
    const double turns = std::clamp(seconds_of_kind_ / most(turn()), 1.0, kMostTurns);
    for (int more = static_cast<int>(turns) - 1; more > 0; --more) (void)turn();
    const double low = std::max(median_of(of_small), 0.0);
    const double high = std::max({median_of(of_large), low, 1e-6});
    const double bandwidth =
        static_cast<double>(large - kSmall) / std::max(high - low, high * 0.05);
    return {.latency = std::max(0.0, low - kSmall / bandwidth), .bandwidth = bandwidth};
  }

  // Of a product, and of a collective of `bytes` if there are any: the mean of the rounds and of
  // the group's ranks.
  double seconds_of_rounds(CollectiveKind kind, std::size_t bytes) {
    job_.barrier();
    const double start = steady_seconds();
    for (int round = 0; round < kRounds; ++round) {
      work();
      if (bytes > 0) pass(kind, bytes);
    }
    std::vector<double> all(ranks_);
    group_.all_gather((steady_seconds() - start) / kRounds, all);
    double sum = 0;
    for (const double each : all) sum += each;
    return sum / static_cast<double>(ranks_);
  }

  void work() {
    const auto tensor = [](std::vector<float>& values, std::int64_t rows, std::int64_t columns) {
      return Tensor{values.data(), {DType::kF32, Shape{rows, columns}}};
    };
    linear_forward(compute_, tensor(x_, kRows, kIn), tensor(weight_, kOut, kIn), {},
                   tensor(y_, kRows, kOut));
  }

  void pass(CollectiveKind kind, std::size_t bytes) {
    const std::size_t in = bytes / (sizeof(float) * ranks_) * sizeof(float) * ranks_;
    const std::size_t out = kind == CollectiveKind::kAllGather       ? in * ranks_
                            : kind == CollectiveKind::kReduceScatter ? in / ranks_
                                                                     : in;
    const std::span<std::byte> passed = std::as_writable_bytes(std::span(y_)).first(in);
    collective_.make({.kind = kind,
                      .in = passed,
                      .out = kind == CollectiveKind::kSum ? passed : std::span(out_).first(out)});
  }

  // Of all ranks.
  double most(double mine) {
    std::vector<double> all(at(job_.communicator().size()));
    job_.all_gather(mine, all);
    return *std::max_element(all.begin(), all.end());
  }

  Collectives &job_, &group_;
  std::size_t ranks_;
  GroupCollective collective_;
  ComputeContext& compute_;
  double seconds_of_kind_;
  std::vector<float> x_, weight_, y_;
  std::vector<std::byte> out_;
};

}  // namespace

CollectiveCosts measure_collectives(Collectives& job, Collectives& group, ComputeContext& compute,
                                    double seconds) {
  return Probe(job, group, compute, seconds).run();
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
