#include "comm/group/topology.hpp"

#include <fmt/core.h>

#include <cstddef>
#include <string>
#include <utility>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"

namespace sluice {

namespace {

std::string settings(int size, int pipeline, int replicas) {
  return fmt::format("{} rank{}, pipeline {}, replicas {}", size, size == 1 ? "" : "s", pipeline,
                     replicas);
}

// Layouts one change away: other ranks, other replicas, another depth. Both settings are >= 1.
std::string legal_neighbours(int size, int pipeline, int replicas) {
  const auto wanted = static_cast<long long>(pipeline) * replicas;
  std::string text = fmt::format("start {} rank{}", wanted, wanted == 1 ? "" : "s");
  if (size % pipeline == 0) text += fmt::format(", or use replicas {}", size / pipeline);
  if (size % replicas == 0) text += fmt::format(", or use pipeline {}", size / replicas);
  if (size % pipeline != 0 && size % replicas != 0) {
    text += fmt::format(", or use pipeline {} and replicas 1", size);
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
    throw_usage(
        "pipeline and replicas must be at least 1, got {}; for these ranks pipeline {} and "
        "replicas 1 would do",
        settings(size, pipeline, replicas), size);
  }
  if (static_cast<long long>(pipeline) * replicas != size) {
    throw_usage("ranks must equal pipeline x replicas, got {}; {}",
                settings(size, pipeline, replicas), legal_neighbours(size, pipeline, replicas));
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
