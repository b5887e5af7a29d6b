// Topology: how the job's ranks split into pipelines and replicas.
//
//   pipeline-first: rank = replica * p + pipeline_rank   (a pipeline's ranks adjacent)
//   replica-first:  rank = pipeline_rank * d + replica
//
// Any other order is legal too (runtime/layout/rank_arrangement.hpp chooses one from host names).
// The bits of a training depend on the places, not on which rank has which.
#pragma once

#include <vector>

#include "comm/group/communicator.hpp"

namespace sluice {

struct Topology {
  int pipeline = 1;                      // p
  int replicas = 1;                      // d
  std::vector<int> rank_of_place = {0};  // [replica * p + pipeline rank]
  std::vector<int> place_of_rank = {0};  // the inverse

  [[nodiscard]] int ranks() const { return pipeline * replicas; }
  [[nodiscard]] int pipeline_rank(int rank) const;
  [[nodiscard]] int replica(int rank) const;
  [[nodiscard]] int rank_of(int replica, int pipeline_rank) const;
};

// Throws Error(kUsage) naming all three numbers and the nearest legal values unless
// size == pipeline * replicas with both >= 1. kAuto is pipeline-first here.
[[nodiscard]] Topology make_topology(int size, int pipeline, int replicas, RankOrder order);
// Requires: `rank_of_place` holds each of [0, pipeline * replicas) once, else Error(kInternal).
[[nodiscard]] Topology make_topology(int pipeline, int replicas, std::vector<int> rank_of_place);

}  // namespace sluice
