#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "schedules/model/index.hpp"
#include "schedules/model/text.hpp"
#include "schedules/search/search_candidates.hpp"
#include "schedules/simulate/simulation_costs.hpp"

namespace sluice::search {
namespace {

// Beyond it a search takes longer than a quarter of a minute.
constexpr std::int64_t kMaxPairs = 400'000;
int layers_of(const SearchRequest& request) {
  return static_cast<int>(std::max(request.model.stages.size(), request.model.bytes.size()));
}

Placement zigzag(int ranks, int chunks) {
  std::vector<int> ranks_of_stages;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    for (int i = 0; i < ranks; ++i) {
      ranks_of_stages.push_back(chunk % 2 == 0 ? i : ranks - 1 - i);
    }
  }
  return Placement::custom(ranks, std::move(ranks_of_stages));
}

// The largest load of a rank, and the sums of squares over ranks and over stages, which tell how
// uneven they are.
struct Load {
  double most = 0, of_ranks = 0, of_stages = 0;
  bool operator<(const Load& other) const {
    return std::tuple(most, of_ranks, of_stages) <
           std::tuple(other.most, other.of_ranks, other.of_stages);
  }
};

Load load_of(const std::vector<double>& prefix, const std::vector<int>& first,
             const Placement& placement) {
  std::vector<double> loads(at(placement.ranks()));
  Load load;
  for (int stage = 0; stage < placement.stages(); ++stage) {
    const double own = prefix[at(first[at(stage) + 1])] - prefix[at(first[at(stage)])];
    loads[at(placement.rank_of(stage))] += own;
    load.of_stages += own * own;
  }
  for (const double each : loads) {
    load.most = std::max(load.most, each);
    load.of_ranks += each * each;
  }
  return load;
}

// least[s][n]: the smallest possible largest of s runs of the first n costs.
std::vector<int> smallest_largest(const std::vector<double>& prefix, int stages) {
  const int layers = static_cast<int>(prefix.size()) - 1;
  const double infinity = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> least(at(stages) + 1,
                                         std::vector<double>(prefix.size(), infinity));
  std::vector<std::vector<int>> begins(least.size(), std::vector<int>(prefix.size()));
  least[0][0] = 0;
  for (int s = 1; s <= stages; ++s) {
    for (int n = s; n <= layers - (stages - s); ++n) {
      double& best = least[at(s)][at(n)];
      for (int begin = n - 1; begin >= s - 1; --begin) {
        const double run = prefix[at(n)] - prefix[at(begin)];
        if (run >= best) break;  // it only grows from here
        const double largest = std::max(least[at(s) - 1][at(begin)], run);
        if (largest < best) {
          best = largest;
          begins[at(s)][at(n)] = begin;
        }
      }
    }
  }
  std::vector<int> first(at(stages) + 1, layers);
  for (int s = stages; s > 0; --s) first[at(s) - 1] = begins[at(s)][at(first[at(s)])];
  return first;
}

template <class... Parts>
void require(bool legal, const Parts&... message) {
  if (!legal) refuse("schedule search: ", message...);
}

void check_request(const SearchRequest& request) {
  const auto positive = [](const char* what, int value) {
    require(value >= 1, what, " is ", value, "; the nearest legal value is 1");
  };
  positive("ranks", request.ranks);
  positive("micro-batches", request.micro_batches);
  for (const int chunks : request.chunks) {
    positive("chunks", chunks);
    require(chunks <= kMaxSearchedChunks, "chunks is ", chunks, "; the nearest legal value is ",
            kMaxSearchedChunks);
  }
  require(request.byte_limit.empty() || request.in_flight_limit.empty(),
          "limits of bytes and of micro-batches in flight; legal is one of the two");
  require(request.byte_limit.empty() || !request.model.bytes.empty(),
          "a limit of bytes needs bytes of the model's parts; without them legal is a limit of "
          "micro-batches in flight");
  const std::size_t limits = std::max(request.byte_limit.size(), request.in_flight_limit.size());
  require(limits <= 1 || limits == at(request.ranks), limits,
          " memory limits; legal is 1 for all ranks or one for each of ", request.ranks);
  for (const double limit : request.in_flight_limit) {
    require(limit > 0, "a limit of ", limit,
            " micro-batches in flight; the nearest legal value is 1");
  }
  const int parts = layers_of(request);
  require(parts <= kMaxLayers, parts, " parts of the model; at most ", kMaxLayers, " are legal");
  require(parts >= 1, "no times of the model's parts; at least one entry is needed");
  for (const std::size_t entries : {request.model.stages.size(), request.model.bytes.size()}) {
    const bool legal = entries <= 1 || entries == at(request.whole_layers ? parts : request.ranks);
    require(legal, entries, " entries for the model's parts; legal is 1 or ",
            request.whole_layers ? parts : request.ranks);
  }
  require(!request.whole_layers || parts >= request.ranks, parts, " layers on ", request.ranks,
          " ranks; each rank needs a layer, so at most ", parts, " ranks");
}

// Numbers of chunks that are tried unasked: small powers of two, and the divisors of the whole
// layers of a rank, which cut it evenly.
std::vector<int> usual_chunks(const SearchRequest& request) {
  constexpr int kMostUnasked = 16;
  if (request.ranks == 1) return {1};
  std::vector<int> counts = {1, 2, 4, 8};
  if (!request.whole_layers) return counts;
  const int layers = layers_of(request) / request.ranks;
  for (int chunks = 3; chunks <= std::min(layers, kMostUnasked); ++chunks) {
    if (layers % chunks == 0) counts.push_back(chunks);
  }
  return counts;
}

StageMap make_stage_map(const SearchRequest& request, std::string name, Placement placement) {
  StageMap map;
  map.name = std::move(name);
  map.chunks = placement.stages() / placement.ranks();
  map.placement = std::move(placement);
  if (!request.whole_layers) {
    map.times = recut(request.model, request.ranks, map.placement.stages());
    return map;
  }
  std::vector<double> costs;
  for (int i = 0; i < layers_of(request); ++i) {
    costs.push_back(work_of(of_stage(request.model.stages, i)));
  }
  map.first_layer = cut(costs, map.placement);
  map.times = join_layers(request.model, map.first_layer);
  return map;
}

}  // namespace

double work_of(const StageTimes& times) {
  return times.forward + times.backward_input + times.backward_weight;
}

bool move_borders(std::vector<int>& first, int rounds, const std::function<bool()>& is_better) {
  bool moved = false;
  bool better = true;
  for (int round = 0; round < rounds && better; ++round) {
    better = false;
    for (std::size_t border = 1; border + 1 < first.size(); ++border) {
      for (const int step : {-1, 1}) {
        const int before = first[border];
        const int there = before + step;
        if (there <= first[border - 1] || there >= first[border + 1]) continue;
        first[border] = there;
        if (is_better()) {
          better = moved = true;
        } else {
          first[border] = before;
        }
      }
    }
  }
  return moved;
}

std::vector<int> cut(const std::vector<double>& costs, const Placement& placement) {
  std::vector<double> prefix(costs.size() + 1);
  std::partial_sum(costs.begin(), costs.end(), prefix.begin() + 1);
  std::vector<int> first = smallest_largest(prefix, placement.stages());
  if (placement.stages() == placement.ranks()) return first;
  Load load = load_of(prefix, first, placement);
  move_borders(first, std::numeric_limits<int>::max(), [&] {
    const Load now = load_of(prefix, first, placement);
    if (!(now < load)) return false;
    load = now;
    return true;
  });
  return first;
}

std::vector<StageMap> stage_maps_of(const SearchRequest& request,
                                    std::vector<std::string>& left_out) {
  check_request(request);
  std::vector<int> counts = request.chunks;
  const bool all = counts.empty();
  if (all) counts = usual_chunks(request);
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  std::vector<StageMap> maps;
  for (const int chunks : counts) {
    const std::int64_t stages = std::int64_t{request.ranks} * chunks;
    const auto leave_out = [&](const std::string& why) {
      left_out.push_back(concat(chunks, " chunks per rank: ", why));
    };
    if (request.whole_layers && stages > layers_of(request)) {
      if (!all) {
        leave_out(concat(layers_of(request), " layers make at most ",
                         layers_of(request) / request.ranks));
      }
      continue;
    }
    if (stages * request.micro_batches > kMaxPairs) {
      leave_out(concat("more than ", kMaxPairs, " pairs of stage and micro-batch",
                       stages > kMaxPairs
                           ? std::string()
                           : concat("; nearest legal: ", kMaxPairs / stages, " micro-batches")));
      continue;
    }
    const auto add = [&](const char* name, Placement placement) {
      maps.push_back(make_stage_map(request, name, std::move(placement)));
    };
    if (chunks == 1) {
      add("linear", Placement::linear(request.ranks));
      continue;
    }
    add("looped", Placement::looped(request.ranks, chunks));
    if (chunks % 2 != 0 || request.ranks == 1) continue;
    if (chunks == 2) {
      add("V", Placement::v_shape(request.ranks));
    } else {
      add("zigzag", zigzag(request.ranks, chunks));
    }
  }
  require(!maps.empty(), left_out.empty() ? "no number of chunks to try" : left_out.front());
  return maps;
}

}  // namespace sluice::search

namespace sluice {

SimulationTimes join_layers(const SimulationTimes& given, const std::vector<int>& first_layer) {
  const SimulationTimes layers =
      with_collectives(given, static_cast<int>(given.stages.size()), /*forward_only=*/false);
  SimulationTimes times = layers;
  times.stages.clear();
  times.bytes.clear();
  for (std::size_t stage = 0; stage + 1 < first_layer.size(); ++stage) {
    std::vector<StagePiece> pieces;
    for (int layer = first_layer[stage]; layer < first_layer[stage + 1]; ++layer) {
      pieces.push_back({layer});
    }
    // An empty stage hands on what the layer before it made.
    if (pieces.empty()) pieces.push_back({std::max(first_layer[stage] - 1, 0), 0});
    append_stage(layers, pieces, times);
  }
  return times;
}

std::vector<int> cut_layers(const SimulationTimes& layers, const Placement& placement) {
  const std::size_t count = layers.stages.size();
  const bool legal = count > 0 && (layers.bytes.size() <= 1 || layers.bytes.size() == count);
  if (!legal) {
    refuse("layers on stages: ", count, " entries of times and ", layers.bytes.size(),
           " of bytes; legal is one of each per layer");
  }
  if (count > at(search::kMaxLayers)) {
    refuse("layers on stages: ", count, " layers; at most ", search::kMaxLayers, " are legal");
  }
  if (count < at(placement.stages())) {
    std::vector<int> first(at(placement.stages()) + 1, static_cast<int>(count) - 1);
    std::iota(first.begin(), first.begin() + static_cast<std::ptrdiff_t>(count), 0);
    first.back() = static_cast<int>(count);
    return first;
  }
  std::vector<double> costs;
  for (const StageTimes& each : layers.stages) costs.push_back(search::work_of(each));
  return search::cut(costs, placement);
}

}  // namespace sluice
