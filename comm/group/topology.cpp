#include "comm/group/topology.hpp"

#include <cstddef>
#include <string>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"

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
    text += ", or use replicas " + std::to_string(size / pipeline);
  }
  if (size % replicas == 0) {
    text += ", or use pipeline " + std::to_string(size / replicas);
  }
  if (size % pipeline != 0 && size % replicas != 0) {
    text += ", or use pipeline " + std::to_string(size) + " and replicas 1";
  }
  return text;
}

}  // namespace

int Topology::pipeline_rank(int rank) const { return place_of_rank[at(rank)] % pipeline; }

int Topology::replica(int rank) const { return place_of_rank[at(rank)] / pipeline; }

int Topology::rank_of(int replica, int pipeline_rank) const {
  return rank_of_place[at(replica * pipeline + pipeline_rank)];
}

Topology make_topology(int size, int pipeline, int replicas, RankOrder order) {
  if (pipeline < 1 || replicas < 1) {
    throw Error(ErrorCode::kUsage, "pipeline and replicas must be at least 1, got " +
                                       settings(size, pipeline, replicas) +
                                       "; for these ranks pipeline " + std::to_string(size) +
                                       " and replicas 1 would do");
  }
  if (static_cast<long long>(pipeline) * replicas != size) {
    throw Error(ErrorCode::kUsage, "ranks must equal pipeline x replicas, got " +
                                       settings(size, pipeline, replicas) + "; " +
                                       legal_neighbours(size, pipeline, replicas));
  }
  std::vector<int> rank_of_place(at(size));
  for (int place = 0; place < size; ++place) {
    rank_of_place[at(place)] =
        order == RankOrder::kReplicaFirst ? place % pipeline * replicas + place / pipeline : place;
  }
  return make_topology(pipeline, replicas, std::move(rank_of_place));
}

Topology make_topology(int pipeline, int replicas, std::vector<int> rank_of_place) {
  Topology topology{pipeline, replicas, std::move(rank_of_place), {}};
  topology.place_of_rank.assign(at(topology.ranks()), -1);
  bool each_once = topology.rank_of_place.size() == topology.place_of_rank.size();
  for (std::size_t place = 0; each_once && place < topology.rank_of_place.size(); ++place) {
    const int rank = topology.rank_of_place[place];
    each_once = rank >= 0 && rank < topology.ranks() && topology.place_of_rank[at(rank)] < 0;
    if (each_once) topology.place_of_rank[at(rank)] = static_cast<int>(place);
  }
  if (!each_once) throw Error(ErrorCode::kInternal, "a job's ranks have one place each");
  return topology;
}

}  // namespace sluice
