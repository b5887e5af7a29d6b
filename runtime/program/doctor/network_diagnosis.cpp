#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "runtime/program/doctor/diagnosis.hpp"
#include "runtime/program/options/option_table.hpp"

namespace sluice {
namespace {

constexpr double kSlow = 0.1;  // of the median, or of what the interface says of itself
constexpr std::size_t kMostNamed = 4;
constexpr const char* kMemory = "memory";
constexpr const char* kNoTcp = "no TCP";

using Ranks = std::vector<RankFacts>;

std::string setting(const RankFacts& rank, std::string_view name) {
  return value_of(rank.network.settings, name);
}

// A network with a real interface on every host; "<network>" where there is none.
std::string common_network(const std::vector<const RankFacts*>& hosts) {
  const auto has = [](const RankFacts& host, const std::string& network) {
    return std::ranges::any_of(host.network.interfaces, [&](const NetworkInterface& each) {
      return each.network == network && !is_virtual_interface(each.name);
    });
  };
  for (const NetworkInterface& each : hosts.front()->network.interfaces) {
    if (std::ranges::all_of(hosts,
                            [&](const RankFacts* host) { return has(*host, each.network); })) {
      return each.network;
    }
  }
  return "<network>";
}

std::string how_to_choose(const std::vector<const RankFacts*>& hosts) {
  const std::string network = common_network(hosts);
  if (!is_open_mpi(*hosts.front())) {
    return fmt::format("choose the one that leads to the other hosts, in {} ('mpirun -iface NAME')",
                       network);
  }
  return fmt::format(
      "start with 'mpirun --mca btl_tcp_if_include {0} --mca oob_tcp_if_include {0}' (srun: export "
      "OMPI_MCA_btl_tcp_if_include={0})",
      network);
}

bool interface_chosen(const RankFacts& rank) {
  return !setting(rank, "OMPI_MCA_btl_tcp_if_include").empty() ||
         !setting(rank, "OMPI_MCA_btl_tcp_if_exclude").empty() ||
         !setting(rank, "UCX_NET_DEVICES").empty();
}

// The first few, and how many more there are.
std::string few(const std::vector<std::string>& all) {
  const std::size_t shown = std::min(all.size(), kMostNamed);
  std::string text = joined(std::span(all).first(shown), ", ");
  if (shown < all.size()) text += fmt::format(" and {} more", all.size() - shown);
  return text;
}

void check_virtual_interfaces(const std::vector<const RankFacts*>& hosts, Findings& findings) {
  std::vector<std::string> found;
  for (const RankFacts* host : hosts) {
    if (interface_chosen(*host)) continue;
    for (const NetworkInterface& each : host->network.interfaces) {
      if (!is_virtual_interface(each.name)) continue;
      found.push_back(fmt::format("{} ({}) on {}", each.name, each.address, host->mpi.host));
    }
  }
  if (found.empty()) return;
  findings.wrong(
      "{}: MPI may choose this interface for messages, but it leads to containers or virtual "
      "machines, not to other hosts; {}",
      few(found), how_to_choose(hosts));
}

// MPI takes hosts with one network for neighbours there; a host cannot reach its own address.
void check_equal_addresses(const std::vector<const RankFacts*>& hosts, Findings& findings) {
  std::map<std::string, std::vector<std::string>> owners;
  for (const RankFacts* host : hosts) {
    for (const NetworkInterface& each : host->network.interfaces) {
      owners[each.address].push_back(fmt::format("{} on {}", each.name, host->mpi.host));
    }
  }
  for (const auto& [address, interfaces] : owners) {
    if (interfaces.size() < 2) continue;
    findings.wrong("address {} belongs to {}: messages to it do not leave the host; {}", address,
                   few(interfaces), how_to_choose(hosts));
  }
}

void check_equal_settings(const Ranks& ranks, Findings& findings) {
  std::set<std::string> names;
  for (const RankFacts& rank : ranks) {
    for (const auto& [name, value] : rank.network.settings) names.insert(name);
  }
  const auto shown = [](const std::string& value) {
    return value.empty() ? std::string("not set") : fmt::format("'{}'", value);
  };
  for (const std::string& name : names) {
    const std::string first = setting(ranks.front(), name);
    for (const RankFacts& rank : ranks) {
      const std::string other = setting(rank, name);
      if (other == first) continue;
      const std::string give = name.starts_with("OMPI_MCA_")
                                   ? fmt::format("mpirun --mca {} VALUE", name.substr(9))
                                   : fmt::format("mpirun -x {}", name);
      findings.wrong(
          "{} is {} on rank {} ({}), but {} on rank {} ({}): give all ranks the same with '{}'",
          name, shown(first), ranks.front().rank, ranks.front().mpi.host, shown(other), rank.rank,
          rank.mpi.host, give);
      break;
    }
  }
}

void say_ports(const RankFacts& first, Findings& findings) {
  if (!is_open_mpi(first)) return;
  const std::string least = setting(first, "OMPI_MCA_btl_tcp_port_min_v4");
  const std::string range = setting(first, "OMPI_MCA_btl_tcp_port_range_v4");
  if (least.empty()) {
    findings.note(
        "a firewall between the hosts must let TCP ports from 1024 up through; '--mca "
        "btl_tcp_port_min_v4 20000 --mca btl_tcp_port_range_v4 1000 --mca "
        "oob_tcp_dynamic_ipv4_ports 21000-21999' keeps Open MPI to ports 20000 to 21999");
    return;
  }
  findings.note(
      "messages use {} TCP ports from {} up: a firewall between the hosts must let them through",
      range.empty() ? "all" : range, least);
}

// "rank 0 (alpha) to rank 2 (beta) over eth0".
std::string named(const LinkFigures& link, const Ranks& ranks) {
  const RankFacts &from = ranks[at(link.from)], &to = ranks[at(link.to)];
  const std::string way = way_of(from, to);
  const bool interface = way != kMemory && way != kNoTcp;
  return fmt::format("rank {} ({}) to rank {} ({}){}", link.from, from.mpi.host, link.to,
                     to.mpi.host, interface ? " over " + way : "");
}

bool between_hosts(const LinkFigures& link, const Ranks& ranks) {
  return ranks[at(link.from)].mpi.host != ranks[at(link.to)].mpi.host;
}

// Finds the slow ones of one kind; returns them.
std::set<std::pair<int, int>> check_slow_links(const Ranks& ranks, const ProbeResult& probe,
                                               bool across, Findings& findings) {
  std::vector<double> bandwidths;
  for (const LinkFigures& link : probe.links) {
    if (between_hosts(link, ranks) == across) bandwidths.push_back(link.bandwidth);
  }
  std::set<std::pair<int, int>> slow;
  if (bandwidths.size() < 2) return slow;
  const double middle = median(std::move(bandwidths));
  std::vector<std::string> names;
  for (const LinkFigures& link : probe.links) {
    if (between_hosts(link, ranks) != across || link.bandwidth > kSlow * middle) continue;
    slow.insert({link.from, link.to});
    names.push_back(fmt::format("{} has {}", named(link, ranks), bandwidth_text(link.bandwidth)));
  }
  if (names.empty()) return slow;
  findings.wrong("slow: {}; the median of links {} is {}: {}", few(names),
                 across ? "between hosts" : "within a host", bandwidth_text(middle),
                 across ? "check that host's cable, its switch port, the speed that 'ethtool "
                          "<interface>' shows, and limits by 'tc qdisc'"
                        : "check what else runs on that host, and its /dev/shm");
  return slow;
}

void check_interface_speed(const Ranks& ranks, const ProbeResult& probe,
                           const std::set<std::pair<int, int>>& named_before, Findings& findings) {
  for (const LinkFigures& link : probe.links) {
    if (named_before.contains({link.from, link.to}) || !between_hosts(link, ranks)) continue;
    const std::string way = way_of(ranks[at(link.from)], ranks[at(link.to)]);
    for (const NetworkInterface& each : ranks[at(link.from)].network.interfaces) {
      const double claimed = each.speed_megabit * 1e6 / 8;
      if (!way.starts_with(each.name + " ") || link.bandwidth > kSlow * claimed) continue;
      findings.wrong(
          "{} has {}, but the interface says {}: check what else uses the network, and limits by "
          "'tc qdisc'",
          named(link, ranks), bandwidth_text(link.bandwidth), bandwidth_text(claimed));
      return;
    }
  }
}

// What carries messages, as far as sockets tell.
void check_ways(const Ranks& ranks, const ProbeResult& probe, Findings& findings) {
  bool said_memory = false, said_virtual = false, said_ucx = false;
  const auto once = [&](bool& said, const std::string& text) {
    if (!std::exchange(said, true)) findings.wrong("{}", text);
  };
  for (const LinkFigures& link : probe.links) {
    const RankFacts& from = ranks[at(link.from)];
    const std::string way = way_of(from, ranks[at(link.to)]);
    if (way == kMemory || way == kNoTcp) continue;
    if (!between_hosts(link, ranks)) {
      once(said_memory,
           fmt::format("{}: two ranks of one host use TCP: leave shared memory in the list, "
                       "'mpirun --mca btl self,vader,tcp' (Open MPI 5: self,sm,tcp)",
                       named(link, ranks)));
    } else if (is_virtual_interface(way)) {
      once(said_virtual,
           fmt::format("{}: that interface leads to containers or virtual machines; {}",
                       named(link, ranks), how_to_choose(first_of_hosts(ranks))));
    } else if (from.network.fast && from.mpi.components.find("ucx") != std::string::npos) {
      once(said_ucx, fmt::format("{}: UCX is asked for and the host has an InfiniBand or RoCE "
                                 "device, yet TCP carries messages: 'ucx_info -d' lists what UCX "
                                 "finds; choose with 'mpirun -x UCX_NET_DEVICES=mlx5_0:1'",
                                 named(link, ranks)));
    }
  }
}

// Whether every measured link between hosts does without TCP: interfaces do not matter then.
bool without_tcp(const Ranks& ranks, const ProbeResult& probe) {
  bool any = false;
  for (const LinkFigures& link : probe.links) {
    if (!between_hosts(link, ranks)) continue;
    if (way_of(ranks[at(link.from)], ranks[at(link.to)]) != kNoTcp) return false;
    any = true;
  }
  return any;
}

void say_progress(const ProbeResult& probe, Findings& findings) {
  if (probe.links.empty()) return;
  std::vector<double> advanced;
  for (const LinkFigures& link : probe.links) advanced.push_back(link.advanced);
  findings.note(
      "while ranks compute for as long as messages take, {:.0f} % of a message passes (median of "
      "{} links; 100: communication hides behind computation wholly)",
      median(advanced) * 100, advanced.size());
}

}  // namespace

std::string bandwidth_text(double bytes_per_second) {
  const double megabytes = bytes_per_second / 1e6;
  return megabytes >= 10 ? fmt::format("{:.0f} MB/s", megabytes)
                         : fmt::format("{:.2g} MB/s", megabytes);
}

std::string way_of(const RankFacts& from, const RankFacts& to) {
  std::set<std::pair<std::string, std::string>> ends;
  for (const Connection& each : to.network.connections) ends.insert({each.peer, each.local});
  for (const Connection& each : from.network.connections) {
    if (!ends.contains({each.local, each.peer})) continue;
    const std::string address(address_of(each.local));
    for (const NetworkInterface& known : from.network.interfaces) {
      if (known.address == address) return fmt::format("{} ({})", known.name, address);
    }
    return address;
  }
  return from.mpi.host == to.mpi.host ? kMemory : kNoTcp;
}

std::vector<Finding> diagnose_network(const std::vector<RankFacts>& ranks,
                                      const ProbeResult& probe) {
  Findings findings;
  const std::vector<const RankFacts*> hosts = first_of_hosts(ranks);
  if (hosts.size() > 1 && !without_tcp(ranks, probe)) {
    check_virtual_interfaces(hosts, findings);
    check_equal_addresses(hosts, findings);
    say_ports(ranks.front(), findings);
  }
  check_equal_settings(ranks, findings);
  check_ways(ranks, probe, findings);
  (void)check_slow_links(ranks, probe, false, findings);
  const auto slow = check_slow_links(ranks, probe, true, findings);
  check_interface_speed(ranks, probe, slow, findings);
  say_progress(probe, findings);
  if (probe.pairs_left_out > 0) {
    findings.note(
        "{} pairs of ranks were not measured for want of time: give a larger --probe-seconds",
        probe.pairs_left_out);
  }
  return findings.list();
}

}  // namespace sluice
