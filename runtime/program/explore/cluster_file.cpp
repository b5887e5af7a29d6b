#include "runtime/program/explore/cluster_file.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include <sluice/error.hpp>
#include <sluice/plan.hpp>

#include "comm/base/index.hpp"
#include "comm/base/throw_error.hpp"
#include "runtime/files/atomic_file.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/files/mapped_file.hpp"

namespace sluice {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr const char* kClusterFormat = "sluice-cluster";
constexpr std::int64_t kVersion = 1;
constexpr double kMostSeconds = 1e6, kMostBandwidth = 1e18;  // bytes per second
constexpr int kMostInteger = std::numeric_limits<int>::max();

// One object of the file. `where`: its path in the file, as "links[3]"; empty for the file itself.
class Reader {
 public:
  Reader(const OrderedJson& json, std::string file, std::string where)
      : json_(json), file_(std::move(file)), where_(std::move(where)) {
    if (!json_.is_object()) fail("", "is not an object");
  }

  [[nodiscard]] const OrderedJson& field(const char* key) const {
    const auto found = json_.find(key);
    if (found == json_.end()) fail(key, "is missing");
    return *found;
  }
  [[nodiscard]] bool has(const char* key) const { return json_.contains(key); }
  [[nodiscard]] int integer(const char* key, std::int64_t low, std::int64_t high) const {
    const OrderedJson& value = field(key);
    const bool legal =
        value.is_number_integer() &&
        !(value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{kMostInteger}) &&
        value.get<std::int64_t>() >= low && value.get<std::int64_t>() <= high;
    if (!legal) {
      fail(key,
           fmt::format("is {}; legal is a whole number from {} to {}", shown(value), low, high));
    }
    return value.get<int>();
  }
  [[nodiscard]] double real(const char* key, double low, double high) const {
    const OrderedJson& value = field(key);
    const double number = value.is_number() ? value.get<double>() : low - 1;
    if (!std::isfinite(number) || number < low || number > high) {
      fail(key, fmt::format("is {}; legal is a number from {:g} to {:g}", shown(value), low, high));
    }
    return number;
  }
  [[nodiscard]] std::string text(const char* key) const {
    const OrderedJson& value = field(key);
    if (!value.is_string()) fail(key, fmt::format("is {}; legal is a text", shown(value)));
    return value.get<std::string>();
  }
  template <typename Read>
  void each(const char* key, const Read& read) const {
    const OrderedJson& items = field(key);
    if (!items.is_array()) fail(key, fmt::format("is {}; legal is a list", shown(items)));
    const std::string prefix = path_of(key);
    for (std::size_t i = 0; i < items.size(); ++i) {
      read(Reader(items[i], file_, fmt::format("{}[{}]", prefix, i)));
    }
  }
  void allow_only(std::initializer_list<std::string_view> keys) const {
    for (const auto& item : json_.items()) {
      if (std::find(keys.begin(), keys.end(), item.key()) != keys.end()) continue;
      fail(item.key().substr(0, kShown), "is not a key of version 1");
    }
  }
  void refuse_without_tensor(const char* key) const {
    if (has(key)) fail(key, "stands in a file without 'tensor'; legal are both or neither");
  }

  [[noreturn]] void fail(const std::string& key, const std::string& what) const {
    const std::string path = path_of(key);
    throw_error(ErrorCode::kData, "cluster file '{}': {} {}", file_,
                path.empty() ? "it" : fmt::format("'{}'", path), what);
  }

 private:
  static constexpr std::size_t kShown = 40;  // bytes of a wrong value

  [[nodiscard]] std::string path_of(const std::string& key) const {
    if (key.empty() || where_.empty()) return key.empty() ? where_ : key;
    return where_ + "." + key;
  }
  static std::string shown(const OrderedJson& value) {
    if (value.is_structured()) return value.is_array() ? "a list" : "an object";
    std::string text = dump_json(value, -1, InvalidUtf8::strict, true);
    if (text.size() > kShown) text = text.substr(0, kShown) + "...";
    return text;
  }

  const OrderedJson& json_;
  std::string file_, where_;
};

void read_header(const Reader& file) {
  if (file.text("format") != kClusterFormat) {
    file.fail("format", fmt::format("is not '{}': 'sluice doctor --output' writes such files",
                                    kClusterFormat));
  }
  const int version = file.integer("version", 1, kMostInteger);
  if (version != kVersion) {
    file.fail("version",
              fmt::format("is {}; this Sluice reads version {}: write the file anew with its own "
                          "'sluice doctor --output'",
                          version, kVersion));
  }
}

void read_ranks(const Reader& file, Cluster& cluster) {
  const double ranks = double{1} * cluster.pipeline * cluster.replicas * cluster.tensor;
  std::set<std::tuple<int, int, int>> places;
  file.each("ranks", [&](const Reader& json) {
    json.allow_only({"rank", "host", "replica", "pipeline_rank", "tensor_rank"});
    if (cluster.tensor == 1) json.refuse_without_tensor("tensor_rank");
    ClusterRank rank;
    const auto index = static_cast<std::int64_t>(cluster.ranks.size());
    (void)json.integer("rank", index, index);
    const std::string host = json.text("host");
    const auto found = std::find_if(cluster.hosts.begin(), cluster.hosts.end(),
                                    [&](const ClusterHost& each) { return each.name == host; });
    if (found == cluster.hosts.end()) json.fail("host", "is not one of 'hosts'");
    rank.host = static_cast<int>(found - cluster.hosts.begin());
    rank.replica = json.integer("replica", 0, cluster.replicas - 1);
    rank.pipeline_rank = json.integer("pipeline_rank", 0, cluster.pipeline - 1);
    if (cluster.tensor > 1) rank.tensor_rank = json.integer("tensor_rank", 0, cluster.tensor - 1);
    if (!places.insert({rank.replica, rank.pipeline_rank, rank.tensor_rank}).second) {
      json.fail("pipeline_rank", "and its replica are those of an earlier rank");
    }
    cluster.ranks.push_back(rank);
  });
  if (static_cast<double>(cluster.ranks.size()) != ranks) {
    file.fail(
        "ranks",
        fmt::format("has {} entries; pipeline {} x replicas {}{} need {}", cluster.ranks.size(),
                    cluster.pipeline, cluster.replicas,
                    cluster.tensor > 1 ? fmt::format(" x tensor {}", cluster.tensor) : "", ranks));
  }
}

void read_collectives(const Reader& file, Cluster& cluster) {
  file.each("collectives", [&](const Reader& json) {
    json.allow_only({"kind", "latency_s", "bandwidth_bytes_per_s"});
    const std::string name = json.text("kind");
    ClusterCollective each;
    int kind = 0;
    while (kind < kCollectiveKinds && name != name_of(static_cast<CollectiveKind>(kind))) ++kind;
    if (kind == kCollectiveKinds) json.fail("kind", "is no kind of collective");
    each.kind = static_cast<CollectiveKind>(kind);
    if (std::ranges::count(cluster.collectives, each.kind, &ClusterCollective::kind) > 0) {
      json.fail("kind", "stands twice");
    }
    each.latency = json.real("latency_s", 0, kMostSeconds);
    each.bandwidth = json.real("bandwidth_bytes_per_s", 1, kMostBandwidth);
    cluster.collectives.push_back(each);
  });
}

void read_links(const Reader& file, Cluster& cluster) {
  const auto last = static_cast<std::int64_t>(cluster.ranks.size()) - 1;
  std::set<std::pair<int, int>> ends;
  file.each("links", [&](const Reader& json) {
    json.allow_only({"from", "to", "latency_s", "bandwidth_bytes_per_s",
                     "shared_bandwidth_bytes_per_s", "advanced_while_computing", "over"});
    ClusterLink link;
    link.from = json.integer("from", 0, last);
    link.to = json.integer("to", 0, last);
    if (link.from == link.to) json.fail("to", "is the rank of 'from'");
    if (!ends.insert({link.from, link.to}).second) json.fail("to", "ends a link that stands twice");
    link.latency = json.real("latency_s", 0, kMostSeconds);
    link.bandwidth = json.real("bandwidth_bytes_per_s", 1, kMostBandwidth);
    link.shared_bandwidth = json.real("shared_bandwidth_bytes_per_s", 0, kMostBandwidth);
    link.advanced = json.real("advanced_while_computing", 0, 1);
    link.over = json.text("over");
    cluster.links.push_back(std::move(link));
  });
}

LinkCost slower(const LinkCost& one, const LinkCost& two) {
  if (!(one.bandwidth > 0)) return two;
  return {std::max(one.latency, two.latency), std::min(one.bandwidth, two.bandwidth)};
}

}  // namespace

std::string to_json_text(const Cluster& cluster) {
  OrderedJson json = {{"format", kClusterFormat},      {"version", kVersion},
                      {"sluice", cluster.sluice},      {"mpi", cluster.mpi},
                      {"pipeline", cluster.pipeline},  {"replicas", cluster.replicas},
                      {"hosts", OrderedJson::array()}, {"ranks", OrderedJson::array()},
                      {"links", OrderedJson::array()}, {"pairs_left_out", cluster.pairs_left_out}};
  for (const ClusterHost& host : cluster.hosts) {
    json["hosts"].push_back({{"name", host.name}, {"cores", host.cores}});
  }
  for (std::size_t rank = 0; rank < cluster.ranks.size(); ++rank) {
    const ClusterRank& each = cluster.ranks[rank];
    json["ranks"].push_back({{"rank", rank},
                             {"host", cluster.hosts[at(each.host)].name},
                             {"replica", each.replica},
                             {"pipeline_rank", each.pipeline_rank}});
    if (cluster.tensor > 1) json["ranks"].back()["tensor_rank"] = each.tensor_rank;
  }
  for (const ClusterLink& link : cluster.links) {
    json["links"].push_back({{"from", link.from},
                             {"to", link.to},
                             {"latency_s", link.latency},
                             {"bandwidth_bytes_per_s", link.bandwidth},
                             {"shared_bandwidth_bytes_per_s", link.shared_bandwidth},
                             {"advanced_while_computing", link.advanced},
                             {"over", link.over}});
  }
  if (cluster.tensor == 1) return dump_json(json, 1, InvalidUtf8::replace) + "\n";
  json["tensor"] = cluster.tensor;
  json["collectives"] = OrderedJson::array();
  for (const ClusterCollective& each : cluster.collectives) {
    json["collectives"].push_back({{"kind", name_of(each.kind)},
                                   {"latency_s", each.latency},
                                   {"bandwidth_bytes_per_s", each.bandwidth}});
  }
  return dump_json(json, 1, InvalidUtf8::replace) + "\n";
}

Cluster parse_cluster(std::string_view text, const std::string& name) {
  const OrderedJson json = parse_ordered_json(text, NoJson::kDiscard);
  if (json.is_discarded()) {
    throw_error(ErrorCode::kData, "cluster file '{}': it is not JSON, or it is cut off", name);
  }
  const Reader file(json, name, "");
  read_header(file);
  file.allow_only({"format", "version", "sluice", "mpi", "pipeline", "replicas", "hosts", "ranks",
                   "links", "pairs_left_out", "tensor", "collectives"});
  Cluster cluster;
  cluster.sluice = file.text("sluice");
  cluster.mpi = file.text("mpi");
  cluster.pipeline = file.integer("pipeline", 1, kMostInteger);
  cluster.replicas = file.integer("replicas", 1, kMostInteger);
  const bool shared = file.has("tensor");
  if (shared) cluster.tensor = file.integer("tensor", 2, kMostInteger);
  std::set<std::string> hosts;
  file.each("hosts", [&](const Reader& host) {
    host.allow_only({"name", "cores"});
    cluster.hosts.push_back({host.text("name"), host.integer("cores", 1, kMostInteger)});
    if (!hosts.insert(cluster.hosts.back().name).second) host.fail("name", "stands twice");
  });
  read_ranks(file, cluster);
  read_links(file, cluster);
  if (shared) {
    read_collectives(file, cluster);
  } else {
    file.refuse_without_tensor("collectives");
  }
  cluster.pairs_left_out = file.integer("pairs_left_out", 0, kMostInteger);
  return cluster;
}

Cluster read_cluster(const std::filesystem::path& path) {
  const MappedFile file(path, ErrorCode::kData);
  if (file.bytes().size() > kLargestClusterFile) {
    throw_error(ErrorCode::kData, "cluster file '{}': it has {} bytes; legal are at most {}",
                path.string(), file.bytes().size(), kLargestClusterFile);
  }
  return parse_cluster({reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()},
                       path.string());
}

void write_cluster(const std::filesystem::path& path, const Cluster& cluster) {
  AtomicFile file(path);
  file.write(to_json_text(cluster));
  file.commit();
}

PipelineLinks pipeline_links(const Cluster& cluster) {
  constexpr double kMilliseconds = 1000;
  PipelineLinks result;
  std::map<std::pair<int, int>, LinkCost> links;
  for (const ClusterLink& each : cluster.links) {
    const ClusterRank& from = cluster.ranks[at(each.from)];
    const ClusterRank& to = cluster.ranks[at(each.to)];
    if (from.tensor_rank != to.tensor_rank) continue;  // their collectives are measured
    const LinkCost link = {each.latency * kMilliseconds, each.bandwidth / kMilliseconds};
    if (from.replica != to.replica) {
      result.replicas = slower(result.replicas, link);
      continue;
    }
    result.slowest = slower(result.slowest, link);
    LinkCost& known = links[{from.pipeline_rank, to.pipeline_rank}];
    known = slower(known, link);
  }
  for (const ClusterCollective& each : cluster.collectives) {
    result.collectives[at(static_cast<int>(each.kind))] = {each.latency * kMilliseconds,
                                                           each.bandwidth / kMilliseconds};
  }
  for (const auto& [ends, link] : links) result.links.push_back({ends.first, ends.second, link});
  return result;
}

}  // namespace sluice
