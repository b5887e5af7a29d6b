#include "runtime/layout/rank_arrangement.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "comm/base/index.hpp"
#include "comm/group/block_steps.hpp"

namespace sluice {
namespace {

// [rank] the index of its host, in the order in which ranks name them.
std::vector<int> number_hosts(const std::vector<std::string>& hosts) {
  std::map<std::string, int> numbers;
  std::vector<int> host_of_rank;
  for (const std::string& host : hosts) {
    host_of_rank.push_back(
        numbers.try_emplace(host, static_cast<int>(numbers.size())).first->second);
  }
  return host_of_rank;
}

// Groups of `size` members, from their hosts: as many as fit into each host, then what is left
// over, in the order of hosts. The first group begins with member 0.
std::vector<std::vector<int>> pack(const std::vector<int>& host_of_member, int size) {
  const int count = *std::max_element(host_of_member.begin(), host_of_member.end()) + 1;
  std::vector<std::vector<int>> members(at(count));
  for (std::size_t i = 0; i < host_of_member.size(); ++i) {
    members[at(host_of_member[i])].push_back(static_cast<int>(i));
  }
  std::vector<std::vector<int>> groups;
  std::vector<int> left_over;
  const auto add_group = [&](auto begin) { groups.emplace_back(begin, begin + size); };
  for (const std::vector<int>& host : members) {
    const std::ptrdiff_t whole = std::ssize(host) / size * size;
    for (std::ptrdiff_t i = 0; i < whole; i += size) add_group(host.begin() + i);
    left_over.insert(left_over.end(), host.begin() + whole, host.end());
  }
  for (std::ptrdiff_t i = 0; i < std::ssize(left_over); i += size) add_group(left_over.begin() + i);
  const auto first = std::find_if(groups.begin(), groups.end(),
                                  [](const std::vector<int>& group) { return group.front() == 0; });
  std::rotate(groups.begin(), first, first + 1);
  return groups;
}

// Replicas in an order in which subtrees of the tree of sums are on one host, taken one after
// the other, which is not always the best order; the first replica stays the first. `hosts_of` says
// where one is.
template <typename Replica, typename HostsOf>
std::vector<Replica> align_subtrees(const std::vector<Replica>& replicas, const HostsOf& hosts_of) {
  std::vector<std::vector<Replica>> left;  // [their hosts]
  for (const Replica& each : replicas) {
    const auto found = std::find_if(left.begin(), left.end(), [&](const auto& some) {
      return hosts_of(some.front()) == hosts_of(each);
    });
    (found == left.end() ? left.emplace_back() : *found).push_back(each);
  }
  std::vector<Replica> order;
  const auto fill = [&](const auto& self, std::size_t size) -> void {
    auto best = left.end();  // the fewest that fill the subtree
    for (auto some = left.begin(); some != (order.empty() ? left.begin() + 1 : left.end());
         ++some) {
      if (some->size() < size || (best != left.end() && best->size() <= some->size())) continue;
      best = some;
    }
    if (best == left.end()) {
      const std::size_t half = std::bit_floor(size - 1);
      self(self, half);
      return self(self, size - half);
    }
    const auto end = best->begin() + static_cast<std::ptrdiff_t>(size);
    order.insert(order.end(), best->begin(), end);
    best->erase(best->begin(), end);
    if (best->empty()) left.erase(best);
  };
  fill(fill, replicas.size());
  return order;
}

// Packs the ranks that share a stage, then their groups along `axis`: the pipelines, or the
// replicas of each stage.
Topology pack_groups(const std::vector<int>& host_of_rank, const AxisSizes& size, Axis axis) {
  const std::vector<std::vector<int>> stages = pack(host_of_rank, size.tensor);
  std::vector<int> host_of_stage;
  for (const std::vector<int>& ranks : stages) {
    host_of_stage.push_back(host_of_rank[at(ranks.front())]);
  }
  std::vector<std::vector<int>> groups = pack(host_of_stage, size[axis]);
  const auto host_of = [&](int stage) { return host_of_stage[at(stage)]; };
  if (axis == Axis::kPipeline) {
    groups = align_subtrees(groups, [&](const std::vector<int>& pipeline) {
      std::vector<int> hosts;
      std::transform(pipeline.begin(), pipeline.end(), std::back_inserter(hosts), host_of);
      return hosts;
    });
  } else {
    for (std::vector<int>& replicas : groups) replicas = align_subtrees(replicas, host_of);
  }
  const Axis other = axis == Axis::kPipeline ? Axis::kReplica : Axis::kPipeline;
  const int ranks = static_cast<int>(host_of_rank.size());
  Topology topology = make_topology(ranks, size, RankOrder::kPipelineFirst);
  std::vector<int> rank_of_place;
  for (int number = 0; number < ranks; ++number) {
    const Place place = topology.place_of(number);
    rank_of_place.push_back(
        stages[at(groups[at(place[other])][at(place[axis])])][at(place.tensor)]);
  }
  return make_topology(size, std::move(rank_of_place));
}

// What hosts exchange with others in a step.
struct Traffic {
  int split_stages = 0;         // whose ranks lie on several hosts: they exchange the most
  double busiest = 0, all = 0;  // bytes of the busiest host; of all of them
};

Traffic traffic_of(const Topology& topology, const Placement& placement,
                   const std::vector<int>& host_of_rank, double edge_bytes, double part_bytes,
                   bool hosts_sum) {
  std::map<int, double> bytes;  // by host
  const auto add = [&](int one, int other, double count) {
    const int a = host_of_rank[at(one)], b = host_of_rank[at(other)];
    if (a == b) return;
    bytes[a] += count;
    bytes[b] += count;
  };
  for (const std::vector<int>& pipeline : topology.groups(Axis::kPipeline)) {
    for (int stage = 1; stage < placement.stages(); ++stage) {
      add(pipeline[at(placement.rank_of(stage - 1))], pipeline[at(placement.rank_of(stage))],
          edge_bytes);
    }
  }
  for (const std::vector<int>& replicas : topology.groups(Axis::kReplica)) {
    if (part_bytes == 0) break;
    std::vector<int> hosts(replicas.size());
    std::iota(hosts.begin(), hosts.end(), 0);  // each sends for itself
    if (hosts_sum) {
      std::transform(replicas.begin(), replicas.end(), hosts.begin(),
                     [&](int rank) { return host_of_rank[at(rank)]; });
    }
    for (auto* steps_of : {&scatter_steps, &gather_steps}) {
      for (const Crossing& each : crossings(hosts, *steps_of)) {
        add(replicas[at(each.from)], replicas[at(each.to)], part_bytes);
      }
    }
  }
  Traffic traffic;
  for (const std::vector<int>& ranks : topology.groups(Axis::kTensor)) {
    traffic.split_stages += std::any_of(ranks.begin(), ranks.end(), [&](int rank) {
      return host_of_rank[at(rank)] != host_of_rank[at(ranks.front())];
    });
  }
  for (const auto& [host, count] : bytes) {
    traffic.busiest = std::max(traffic.busiest, count);
    traffic.all += count;
  }
  return traffic;
}

struct Candidate {
  const char* shares = "";
  Topology topology;
  Traffic traffic = {};

  [[nodiscard]] bool operator<(const Candidate& other) const {
    const auto cost = [](const Traffic& of) {
      return std::tuple(of.split_stages, of.busiest, of.all);
    };
    return cost(traffic) < cost(other.traffic);
  }
};

std::string bytes_text(double bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; bytes >= 1000 && unit + 1 < kUnits.size(); ++unit) bytes /= 1024;
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : 1, kUnits[unit]);
}

}  // namespace

RankArrangement arrange_ranks(const Topology& numbered, const PipelineOptions& options,
                              const Placement& placement, const std::vector<std::string>& hosts) {
  const PipelineOptions::Shape& shape = options.shape;
  const AxisSizes& size = numbered.size;
  const std::vector<int> host_of_rank = number_hosts(hosts);
  const bool one_host =
      std::all_of(host_of_rank.begin(), host_of_rank.end(), [](int host) { return host == 0; });
  // A list of devices names those of places or of ranks: their order is its author's.
  const bool listed = options.devices.choices.size() > 1;
  if (shape.rank_order != RankOrder::kAuto || one_host || listed) return {numbered, ""};
  const PipelineOptions::Expert& expert = options.expert;
  const bool known = expert.edge_bytes > 0 || expert.gradient_bytes > 0;
  const double edge_bytes = known ? expert.edge_bytes : 1;
  // Sizes that nobody knows: edges decide, and sums among orders that are equal in them.
  const double part_bytes = known ? expert.gradient_bytes / size.replica : 1e-6;
  // GPUs of one host do not send together (comm/nccl/nccl_sums.hpp).
  const bool hosts_sum = !built_with_cuda() || options.devices.choices.empty() ||
                         options.devices.choices.front().kind == DeviceChoice::Kind::kCpu;
  constexpr const char* kByNumber = "the order of the ranks' numbers";
  const auto packed = [&](Axis axis) { return pack_groups(host_of_rank, size, axis); };
  const auto by_number = [&](RankOrder order) {
    return make_topology(numbered.ranks(), size, order);
  };
  std::array candidates = {
      Candidate{size.pipeline == 1 ? "each host's replicas are neighbours in the tree of sums"
                                   : "the ranks of a pipeline share hosts",
                packed(Axis::kPipeline)},
      Candidate{"the replicas of a stage share hosts", packed(Axis::kReplica)},
      Candidate{kByNumber, by_number(RankOrder::kPipelineFirst)},
      Candidate{kByNumber, by_number(RankOrder::kReplicaFirst)}};
  for (Candidate& each : candidates) {
    each.traffic =
        traffic_of(each.topology, placement, host_of_rank, edge_bytes, part_bytes, hosts_sum);
  }
  const Candidate& best = *std::min_element(candidates.begin(), candidates.end());
  const bool kept = best.topology.rank_of_place == numbered.rank_of_place;
  if (kept && (size.pipeline == 1 || size.replica == 1)) return {numbered, ""};
  std::string reason = best.shares;
  if (known) {
    reason += fmt::format(": a host then exchanges at most about {} with others in a step",
                          bytes_text(best.traffic.busiest));
    const Candidate& other = candidates[&best == &candidates[0] ? 1 : 0];
    if (best.traffic.busiest < other.traffic.busiest) {
      reason += fmt::format(", {} if {}", bytes_text(other.traffic.busiest), other.shares);
    }
  }
  return {best.topology, std::move(reason)};
}

}  // namespace sluice
