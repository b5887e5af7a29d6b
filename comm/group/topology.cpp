#include "comm/group/topology.hpp"

#include <string>

#include <sluice/error.hpp>

namespace sluice {

namespace {

std::string settings(int size, int pipeline, int replicas) {
  return std::to_string(size) + (size == 1 ? " rank" : " ranks") + ", pipeline " +
         std::to_string(pipeline) + ", replicas " + std::to_string(replicas);
}

// Layouts one change away: other ranks, other replicas, another depth. Both settings are >= 1.
std::string legal_neighbours(int size, int pipeline, int replicas) {
  const auto wanted = static_cast<long long>(pipeline) * replicas;
  std::string text = "start " + std::to_string(wanted) + (wanted == 1 ? " rank" : " ranks");
  if (size % pipeline == 0) {
    text += ", or use --replicas " + std::to_string(size / pipeline);
  }
  if (size % replicas == 0) {
    text += ", or use --pipeline " + std::to_string(size / replicas);
  }
  if (size % pipeline != 0 && size % replicas != 0) {
    text += ", or use --pipeline " + std::to_string(size) + " --replicas 1";
  }
  return text;
}

}  // namespace

int Topology::pipeline_rank(int rank) const {
  return order == RankOrder::kPipelineFirst ? rank % pipeline : rank / replicas;
}

int Topology::replica(int rank) const {
  return order == RankOrder::kPipelineFirst ? rank / pipeline : rank % replicas;
}

int Topology::rank_of(int replica, int pipeline_rank) const {
  return order == RankOrder::kPipelineFirst ? replica * pipeline + pipeline_rank
                                            : pipeline_rank * replicas + replica;
}

Topology make_topology(int size, int pipeline, int replicas, RankOrder order) {
  if (pipeline < 1 || replicas < 1) {
    throw Error(ErrorCode::kUsage, "pipeline and replicas must be at least 1, got " +
                                       settings(size, pipeline, replicas) +
                                       "; for these ranks --pipeline " + std::to_string(size) +
                                       " --replicas 1 would do");
  }
  if (static_cast<long long>(pipeline) * replicas != size) {
    throw Error(ErrorCode::kUsage, "ranks must equal pipeline x replicas, got " +
                                       settings(size, pipeline, replicas) + "; " +
                                       legal_neighbours(size, pipeline, replicas));
  }
  return Topology{pipeline, replicas, order};
}

RankOrder parse_rank_order(std::string_view text) {
  if (text == "pipeline-first") {
    return RankOrder::kPipelineFirst;
  }
  if (text == "replica-first") {
    return RankOrder::kReplicaFirst;
  }
  throw Error(ErrorCode::kUsage, "unknown order of ranks '" + std::string(text) +
                                     "'; legal: pipeline-first, replica-first");
}

}  // namespace sluice
