#include "runtime/layout/shard_groups.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "comm/base/index.hpp"

namespace sluice {

std::vector<int> ShardGroups::parts() const {
  std::vector<int> all;
  for (int replica = 0; replica < replicas; ++replica) all.push_back(part_of(replica));
  return all;
}

std::vector<int> ShardGroups::sharers_of(int replica) const {
  std::vector<int> all;
  for (int place = 0; place < size(); ++place) all.push_back(group_of(replica) * size() + place);
  return all;
}

std::vector<int> ShardGroups::copies_of(int replica) const {
  std::vector<int> all;
  for (int group = 0; group < copies; ++group) all.push_back(group * size() + place_of(replica));
  return all;
}

int shard_group_within_hosts(const std::vector<std::vector<int>>& hosts) {
  const int replicas = static_cast<int>(hosts.front().size());
  const auto within = [&](int size) {
    return std::ranges::all_of(hosts, [&](const std::vector<int>& of_replica) {
      for (int replica = 0; replica < replicas; ++replica) {
        if (of_replica[at(replica)] != of_replica[at(replica / size * size)]) return false;
      }
      return true;
    });
  };
  int size = replicas;
  while (size > 1 && (replicas % size != 0 || !within(size))) --size;
  return size;
}

std::string legal_shard_groups(int size, int replicas) {
  int below = std::clamp(size, 1, replicas), above = std::clamp(size, 2, replicas);
  while (below > 1 && replicas % below != 0) --below;
  while (replicas % above != 0) ++above;
  return below < 2 || below == above ? fmt::format("{}", above)
                                     : fmt::format("{} or {}", below, above);
}

}  // namespace sluice
