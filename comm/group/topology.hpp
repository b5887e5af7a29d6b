// Topology: where each rank of a job stands on the job's axes.
//
// A rank has one coordinate on every axis: its place. Ranks whose places differ on one axis alone
// are a group of that axis: the ranks of one pipeline, the replicas of a stage, the ranks that
// share the tensors of a stage. Places are numbered (replica * p + pipeline) * t + tensor.
//
//   pipeline-first: rank = (replica * p + pipeline) * t + tensor   (a pipeline's ranks adjacent)
//   replica-first:  rank = (pipeline * d + replica) * t + tensor
//
// Any other order is legal too (runtime/layout/rank_arrangement.hpp chooses one from host names).
// The bits of a training depend on the places, not on which rank has which.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "comm/group/communicator.hpp"

namespace sluice {

enum class Axis : std::uint8_t { kPipeline, kReplica, kTensor };
inline constexpr std::array kAxes = {Axis::kPipeline, Axis::kReplica, Axis::kTensor};

// A number for each axis.
struct AxisNumbers {
  int pipeline = 0, replica = 0, tensor = 0;

  [[nodiscard]] int operator[](Axis axis) const {
    return axis == Axis::kPipeline ? pipeline : axis == Axis::kReplica ? replica : tensor;
  }
  [[nodiscard]] int& operator[](Axis axis) {
    return axis == Axis::kPipeline ? pipeline : axis == Axis::kReplica ? replica : tensor;
  }
  friend bool operator==(const AxisNumbers&, const AxisNumbers&) = default;
};
// Coordinates, from 0.
using Place = AxisNumbers;
// How many places there are along each axis, from 1: p ranks of a pipeline, d replicas, t ranks
// that share a stage.
using AxisSizes = AxisNumbers;

struct Topology {
  AxisSizes size = {1, 1, 1};
  std::vector<int> rank_of_place = {0};  // [number of the place]
  std::vector<int> place_of_rank = {0};  // the inverse

  [[nodiscard]] int ranks() const { return size.replica * size.pipeline * size.tensor; }
  [[nodiscard]] Place place_of(int rank) const;
  [[nodiscard]] int rank_of(const Place& place) const;
  // The ranks of `place`'s group along `axis`, by their coordinate there.
  [[nodiscard]] std::vector<int> group(Axis axis, Place place) const;
  // All groups along `axis`, by the place of their first rank.
  [[nodiscard]] std::vector<std::vector<int>> groups(Axis axis) const;
  // Of `place`'s group along `axis`, for Communicator::split(): each has its own number.
  [[nodiscard]] int group_number(Axis axis, Place place) const;
};

// Throws Error(kUsage) naming all numbers and the nearest legal values unless `ranks` is the
// product of the sizes, each >= 1. kAuto is pipeline-first here.
[[nodiscard]] Topology make_topology(int ranks, const AxisSizes& size, RankOrder order);
// Requires: `rank_of_place` holds each of [0, product of the sizes) once, else Error(kInternal).
[[nodiscard]] Topology make_topology(const AxisSizes& size, std::vector<int> rank_of_place);

}  // namespace sluice
