#include "comm/group/topology.hpp"

#include <fmt/core.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"

namespace sluice {

namespace {

// As the options call it.
const char* name_of(Axis axis) {
  return axis == Axis::kPipeline ? "pipeline" : axis == Axis::kReplica ? "replicas" : "tensor";
}

// text(axis) of each axis. One that nobody asks for, tensor 1, is left out.
template <typename Text>
std::string list(const AxisSizes& size, const char* between, const Text& text) {
  std::string all;
  for (const Axis axis : kAxes) {
    if (axis == Axis::kTensor && size.tensor == 1) continue;
    all += (all.empty() ? "" : between) + text(axis);
  }
  return all;
}

std::string names(const AxisSizes& size, const char* between) {
  return list(size, between, [](Axis axis) { return std::string(name_of(axis)); });
}

std::string settings(int ranks, const AxisSizes& size) {
  return fmt::format(
      "{} rank{}, {}", ranks, ranks == 1 ? "" : "s",
      list(size, ", ", [&](Axis axis) { return fmt::format("{} {}", name_of(axis), size[axis]); }));
}

// All are 1 but for the pipeline.
std::string one_pipeline(int ranks, const AxisSizes& size) {
  return list(size, " and ", [&](Axis axis) {
    return fmt::format("{} {}", name_of(axis), axis == Axis::kPipeline ? ranks : 1);
  });
}

// Saturates.
std::int64_t product(const AxisSizes& size) {
  std::int64_t all = 1;
  for (const Axis axis : kAxes) {
    if (__builtin_mul_overflow(all, std::int64_t{size[axis]}, &all)) {
      return std::numeric_limits<std::int64_t>::max();
    }
  }
  return all;
}

// Layouts one change away: other ranks, or another size of one axis. All sizes are >= 1.
std::string legal_neighbours(int ranks, const AxisSizes& size) {
  const std::int64_t wanted = product(size);
  const std::string others = list(size, "", [&](Axis axis) {
    AxisSizes rest = size;
    rest[axis] = 1;
    if (ranks % product(rest) != 0) return std::string();
    return fmt::format(", or use {} {}", name_of(axis), ranks / product(rest));
  });
  return fmt::format("start {} rank{}{}", wanted, wanted == 1 ? "" : "s",
                     others.empty() ? ", or use " + one_pipeline(ranks, size) : others);
}

int number_of(const AxisSizes& size, const Place& place) {
  return (place.replica * size.pipeline + place.pipeline) * size.tensor + place.tensor;
}

Place place_with(const AxisSizes& size, int number) {
  return {.pipeline = number / size.tensor % size.pipeline,
          .replica = number / size.tensor / size.pipeline,
          .tensor = number % size.tensor};
}

}  // namespace

Place Topology::place_of(int rank) const { return place_with(size, place_of_rank[at(rank)]); }

int Topology::rank_of(const Place& place) const {
  return rank_of_place[at(number_of(size, place))];
}

std::vector<int> Topology::group(Axis axis, Place place) const {
  std::vector<int> ranks;
  for (place[axis] = 0; place[axis] < size[axis]; ++place[axis]) ranks.push_back(rank_of(place));
  return ranks;
}

std::vector<std::vector<int>> Topology::groups(Axis axis) const {
  std::vector<std::vector<int>> all;
  for (const int rank : rank_of_place) {
    const Place place = place_of(rank);
    if (place[axis] == 0) all.push_back(group(axis, place));
  }
  return all;
}

int Topology::group_number(Axis axis, Place place) const {
  place[axis] = 0;
  return number_of(size, place);
}

Topology make_topology(int ranks, const AxisSizes& size, RankOrder order) {
  if (size.pipeline < 1 || size.replica < 1 || size.tensor < 1) {
    throw_usage("{} must be at least 1, got {}; for these ranks {} would do", names(size, " and "),
                settings(ranks, size), one_pipeline(ranks, size));
  }
  if (product(size) != ranks) {
    throw_usage("ranks must equal {}, got {}; {}", names(size, " x "), settings(ranks, size),
                legal_neighbours(ranks, size));
  }
  std::vector<int> rank_of_place;
  for (int number = 0; number < ranks; ++number) {
    const Place place = place_with(size, number);
    const int outer = order == RankOrder::kReplicaFirst
                          ? place.pipeline * size.replica + place.replica
                          : place.replica * size.pipeline + place.pipeline;
    rank_of_place.push_back(outer * size.tensor + place.tensor);
  }
  return make_topology(size, std::move(rank_of_place));
}

Topology make_topology(const AxisSizes& size, std::vector<int> rank_of_place) {
  Topology topology{size, std::move(rank_of_place), {}};
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
