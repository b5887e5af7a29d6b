// A part of <sluice/tensor.hpp>, <sluice/stage.hpp> and <sluice/plan.hpp>: types of numbers, and
// the collectives that the actions of a stage make.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#pragma GCC visibility push(default)
namespace sluice {

// Numbers travel in message headers and must not change.
enum class DType : std::uint8_t { kF32, kBf16, kI32, kU8, kF64, kF16, kI64 };
inline constexpr int kDTypes = 7;

namespace detail {
inline constexpr const char* kTypeNames[] = {"f32", "bf16", "i32", "u8", "f64", "f16", "i64"};
static_assert(sizeof(kTypeNames) / sizeof(kTypeNames[0]) == kDTypes);
}  // namespace detail

[[nodiscard]] inline const char* name_of(DType dtype) {  // "f32", "bf16", ...
  return detail::kTypeNames[static_cast<std::size_t>(dtype)];
}

// Over which ranks: the replicas of a stage, or the ranks that share it.
enum class CollectiveAxis : std::uint8_t { kReplica, kTensor };
inline constexpr int kCollectiveAxes = 2;

enum class CollectiveKind : std::uint8_t { kSum, kAllGather, kReduceScatter, kAllToAll };
inline constexpr int kCollectiveKinds = 4;

// One collective within an action; equal on all ranks of its group.
struct PlannedCollective {
  CollectiveAxis axis = CollectiveAxis::kTensor;
  CollectiveKind kind = CollectiveKind::kSum;
  // What each rank passes: of a sum the values; of an all-gather its part; of a reduce-scatter and
  // an all-to-all all parts.
  std::uint64_t bytes = 0;
  DType type = DType::kF32;  // of a sum and a reduce-scatter: f32 or f64

  friend bool operator==(const PlannedCollective&, const PlannedCollective&) = default;
};

// Those of a stage, in the order in which each action makes them. Those over replicas are made in
// training alone.
struct StageCollectives {
  std::vector<PlannedCollective> forward = {};  // of each forward
  // Of each loss() of the last stage, after forward's: in training and evaluation, not in
  // inference. Part of F in a plan.
  std::vector<PlannedCollective> loss = {};
  // Of each answer() of the last stage, after forward's: in inference, in place of the loss's. Not
  // part of a plan.
  std::vector<PlannedCollective> answer = {};
  // Of each backward_input and each backward_weight; backward makes these, then those.
  std::vector<PlannedCollective> backward_input = {}, backward_weight = {};
  // Of each recompute(), for a stage that has it called (StageDescription::recomputes); its
  // backward makes these first where that was not called before.
  std::vector<PlannedCollective> recompute = {};

  friend bool operator==(const StageCollectives&, const StageCollectives&) = default;
};

}  // namespace sluice
#pragma GCC visibility pop
