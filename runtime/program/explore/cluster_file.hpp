// What `sluice doctor --output` measured of a cluster, as a JSON file that `sluice schedule
// --cluster` reads. The file has "format": "sluice-cluster" and "version": 1; a reader refuses any
// other version, and any key that it does not know. Keys of tensor ranks stand where there are
// several.
#pragma once

#include <array>
#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/simulate.hpp>

namespace sluice {

struct ClusterHost {
  std::string name;
  int cores = 1;  // that the job may use
  friend bool operator==(const ClusterHost&, const ClusterHost&) = default;
};

struct ClusterRank {
  int host = 0;  // index of Cluster::hosts
  int replica = 0, pipeline_rank = 0, tensor_rank = 0;
  friend bool operator==(const ClusterRank&, const ClusterRank&) = default;
};

// From one rank of the job to another, in one direction.
struct ClusterLink {
  int from = 0, to = 0;
  double latency = 0;           // seconds of a small message, one way
  double bandwidth = 0;         // bytes per second of large ones, alone; at least 1
  double shared_bandwidth = 0;  // while all links carry messages; 0: not measured
  double advanced = 0;          // share of a message (0 to 1) that moves while the rank computes
  // "eth0 (10.0.0.5)" at the sender, "memory" on one host, "no TCP" between two; may be empty.
  std::string over;
  friend bool operator==(const ClusterLink&, const ClusterLink&) = default;
};

// What a collective over the tensor ranks of a stage takes, of the slowest group; in seconds and
// bytes per second for PlannedCollective::bytes.
struct ClusterCollective {
  CollectiveKind kind = CollectiveKind::kSum;
  double latency = 0, bandwidth = 0;
  friend bool operator==(const ClusterCollective&, const ClusterCollective&) = default;
};

struct Cluster {
  std::string sluice, mpi;  // versions
  int pipeline = 1, replicas = 1, tensor = 1;
  std::vector<ClusterHost> hosts;
  std::vector<ClusterRank> ranks;                   // [rank]; pipeline x replicas x tensor of them
  std::vector<ClusterLink> links;                   // each pair of ranks at most once per direction
  std::vector<ClusterCollective> collectives = {};  // over tensor ranks; empty: not measured
  int pairs_left_out = 0;  // that the training uses, not measured for want of time
  friend bool operator==(const Cluster&, const Cluster&) = default;
};

inline constexpr std::size_t kLargestClusterFile = std::size_t{64} << 20;  // bytes

// Other bytes than UTF-8 are replaced in texts. A reader refuses numbers out of range: seconds
// above 1e6, bandwidths above 1e18 or below 1.
[[nodiscard]] std::string to_json_text(const Cluster& cluster);
// Throws Error(kData) with `name` and the key that is wrong: missing, unknown, of another type, out
// of range, or at odds with another one.
[[nodiscard]] Cluster parse_cluster(std::string_view text, const std::string& name);
// parse_cluster() of a file of at most kLargestClusterFile bytes.
[[nodiscard]] Cluster read_cluster(const std::filesystem::path& path);
// Whole or not at all. Throws Error(kIo) naming the path.
void write_cluster(const std::filesystem::path& path, const Cluster& cluster);

// Links of one pipeline for simulate(), in milliseconds and bytes per millisecond. `from` and `to`
// are ranks of the pipeline; of several replicas and tensor ranks the slowest counts. `slowest` has
// the largest latency and the smallest bandwidth of `links`, for links that were not measured;
// `replicas` the same over links between replicas of a stage. Both are 0 where there is none.
struct PipelineLinks {
  std::vector<RankLink> links;
  LinkCost slowest, replicas;
  std::array<LinkCost, kCollectiveKinds> collectives = {};  // over tensor ranks
};
[[nodiscard]] PipelineLinks pipeline_links(const Cluster& cluster);

}  // namespace sluice
