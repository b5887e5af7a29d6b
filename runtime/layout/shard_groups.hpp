// Which part of what replicas divide each of them has, where each group of them has a copy of the
// values (PipelineOptions::Shape::shard_group), as ZeRO++'s secondary partition
// (arXiv:2306.10209).
//
// What is updated is cut into one part a replica. A group is consecutive replicas, and divides a
// copy of the values among them: at rest a replica has the parts of as many replicas as there are
// copies. These are the replicas of the same place in each group, and the parts are numbered so
// that theirs follow one another.
#pragma once

#include <string>
#include <vector>

namespace sluice {

struct ShardGroups {
  int replicas = 1;
  int copies = 1;  // groups; a divisor of `replicas`

  [[nodiscard]] int size() const { return replicas / copies; }
  [[nodiscard]] int group_of(int replica) const { return replica / size(); }
  [[nodiscard]] int place_of(int replica) const { return replica % size(); }
  // The number of the part that a replica updates, and the inverse.
  [[nodiscard]] int part_of(int replica) const {
    return place_of(replica) * copies + group_of(replica);
  }
  [[nodiscard]] int replica_of(int part) const { return part % copies * size() + part / copies; }
  // Of all replicas, in their order.
  [[nodiscard]] std::vector<int> parts() const;
  // The replicas of a replica's group, and those that have the same values at rest, ascending.
  [[nodiscard]] std::vector<int> sharers_of(int replica) const;
  [[nodiscard]] std::vector<int> copies_of(int replica) const;
};

// The largest groups of which each is on one host: `hosts` are those of the replicas of each place.
// 1 where there are none.
[[nodiscard]] int shard_group_within_hosts(const std::vector<std::vector<int>>& hosts);

// The numbers nearest to `size` that divide `replicas` into groups of two or more, in words.
[[nodiscard]] std::string legal_shard_groups(int size, int replicas);

}  // namespace sluice
