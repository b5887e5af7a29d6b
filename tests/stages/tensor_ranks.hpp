// Ranks that share a stage, as threads of a test, and numbers to compare what they make.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <sluice/stage.hpp>

#include "comm/base/index.hpp"
#include "comm/base/sum_tree.hpp"
#include "stages/tensor/slice_runs.hpp"

namespace sluice::testing {

using Values = std::vector<float>;

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
      const std::vector<std::byte> all = sum();
      const std::size_t piece = call.out.size() / call.segments;
      for (std::size_t s = 0; s < call.segments; ++s) {
        const std::span part =
            std::span(all).subspan((s * group_.passed.size() + at(rank_)) * piece);
        result.insert(result.end(), part.begin(), part.begin() + std::ptrdiff_t(piece));
      }
    } else {
      const std::size_t piece = call.in.size() / call.segments;
      for (std::size_t s = 0; s < call.segments; ++s) {
        for (const auto& passed : group_.passed) {
          const auto part = passed.subspan(s * piece, piece);
          result.insert(result.end(), part.begin(), part.end());
        }
      }
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

// Numbers in [-1, 1) by a place.
inline float number_at(std::uint64_t place) {
  place = (place + 1) * 0x9E3779B97F4A7C15U;
  place = (place ^ (place >> 29)) * 0xBF58476D1CE4E5B9U;
  return static_cast<float>(static_cast<std::int32_t>(place >> 32)) * 0x1p-31F;
}

inline void append(const Tensor& from, Values& to) {
  for (std::int64_t i = 0; i < from.elements(); ++i) {
    to.push_back(from.spec.dtype == DType::kF32 ? from.as<float>()[i]
                                                : to_float(from.as<Bf16>()[i]));
  }
}

// visit(element here, element of the whole) for all of a parameter's elements.
template <typename Visit>
void for_elements(const Parameter& parameter, const Visit& visit) {
  for (const PlacedPart& part :
       placed_parts(parameter.slice, parameter.parts, parameter.shape.elements())) {
    if (part.count == 0) continue;
    for_runs(slice_shape(parameter.whole_shape(), part.slice), part.slice, 0, part.count,
             [&](std::int64_t here, std::int64_t whole, std::int64_t count) {
               for (std::int64_t i = 0; i < count; ++i) visit(part.first + here + i, whole + i);
             });
  }
}

// Gains that are 1 and biases that are 0 would hide what they do.
inline void disturb(ParameterSet& set) {
  for (Parameter* parameter : set.all()) {
    const std::uint64_t name = std::hash<std::string>()(parameter->name) % 100'000;
    for_elements(*parameter, [&](std::int64_t here, std::int64_t whole) {
      parameter->value.at(here) +=
          0.05F * number_at(name * 10'000'019U + static_cast<std::uint64_t>(whole));
    });
  }
  set.mark_values_changed();
}

inline void expect_same_bits(const Values& mine, const Values& other, const std::string& name) {
  ASSERT_EQ(mine.size(), other.size()) << name;
  if (mine.empty()) return;
  EXPECT_EQ(std::memcmp(mine.data(), other.data(), mine.size() * sizeof(float)), 0) << name;
}

inline void expect_close(const Values& mine, const Values& other, double tolerance,
                         const std::string& name) {
  ASSERT_EQ(mine.size(), other.size()) << name;
  double most = 0, difference = 0;
  for (std::size_t i = 0; i < mine.size(); ++i) {
    ASSERT_FALSE(std::isnan(mine[i])) << name << " " << i;
    most = std::max(most, std::abs(double{other[i]}));
    difference = std::max(difference, std::abs(double{mine[i]} - other[i]));
  }
  EXPECT_GT(most, 0) << name;
  EXPECT_LE(difference, tolerance * most) << name;
}

}  // namespace sluice::testing
