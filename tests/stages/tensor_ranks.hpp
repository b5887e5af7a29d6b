// Ranks that share a stage, as threads of a test.
#pragma once

#include <algorithm>
#include <barrier>
#include <cstddef>
#include <cstring>
#include <functional>
#include <span>
#include <thread>
#include <vector>

#include <sluice/stage.hpp>

#include "comm/base/index.hpp"
#include "comm/base/sum_tree.hpp"

namespace sluice::testing {

struct TensorGroup {
  explicit TensorGroup(int ranks) : all(ranks), passed(at(ranks)) {}
  std::barrier<> all;
  std::vector<std::span<const std::byte>> passed;  // by each rank, to the call in progress
};

// Sums of floats by the tree, all-gathers and reduce-scatters.
class TensorRank final : public Collective {
 public:
  TensorRank(TensorGroup& group, int rank) : group_(group), rank_(rank) {}

  void make(const CollectiveCall& call) override {
    calls.push_back({.kind = call.kind, .bytes = call.in.size(), .type = call.type});
    group_.passed[at(rank_)] = call.in;
    group_.all.arrive_and_wait();
    std::vector<std::byte> result;
    if (call.kind == CollectiveKind::kSum) {
      result = sum();
    } else if (call.kind == CollectiveKind::kReduceScatter) {
      result = sum();
      const auto first = result.begin() + std::ptrdiff_t(call.out.size()) * rank_;
      result = {first, first + std::ptrdiff_t(call.out.size())};
    } else {
      for (const auto& part : group_.passed) result.insert(result.end(), part.begin(), part.end());
    }
    group_.all.arrive_and_wait();
    std::copy(result.begin(), result.end(), call.out.begin());
  }

  std::vector<PlannedCollective> calls;

 private:
  [[nodiscard]] std::vector<std::byte> sum() const {
    std::vector<std::vector<float>> leaves;
    for (const auto& part : group_.passed) {
      leaves.emplace_back(part.size() / sizeof(float));
      std::memcpy(leaves.back().data(), part.data(), part.size());
    }
    add_leaves(leaves.size(), [&](std::size_t into, std::size_t from) {
      for (std::size_t i = 0; i < leaves[into].size(); ++i) leaves[into][i] += leaves[from][i];
    });
    const auto bytes = std::as_bytes(std::span(leaves[0]));
    return {bytes.begin(), bytes.end()};
  }

  TensorGroup& group_;
  int rank_;
};

// work(rank's shards, rank's collective) on a thread for each rank.
inline void on_ranks(int shards, int ranks,
                     const std::function<void(const Shards&, TensorRank&)>& work,
                     bool deals_positions = true) {
  TensorGroup group(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      TensorRank mine(group, rank);
      work({shards, shards / ranks * rank, shards / ranks, deals_positions}, mine);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace sluice::testing
