// Topology: how the job's ranks split into pipelines and replicas.
//
//   pipeline-first (default): rank = replica * p + pipeline_rank   (a pipeline's ranks adjacent)
//   replica-first:            rank = pipeline_rank * d + replica
#pragma once

#include <string_view>

#include <sluice/communicator.hpp>

namespace sluice {

struct Topology {
  int pipeline = 1;  // p
  int replicas = 1;  // d
  RankOrder order = RankOrder::kPipelineFirst;

  [[nodiscard]] int ranks() const { return pipeline * replicas; }
  [[nodiscard]] int pipeline_rank(int rank) const;
  [[nodiscard]] int replica(int rank) const;
  [[nodiscard]] int rank_of(int replica, int pipeline_rank) const;
};

// Throws Error(kUsage) naming all three numbers and the nearest legal values unless
// size == pipeline * replicas with both >= 1.
[[nodiscard]] Topology make_topology(int size, int pipeline, int replicas, RankOrder order);
// "pipeline-first" | "replica-first", else Error(kUsage).
[[nodiscard]] RankOrder parse_rank_order(std::string_view text);

}  // namespace sluice
