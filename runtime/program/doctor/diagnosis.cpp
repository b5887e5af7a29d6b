#include "runtime/program/doctor/diagnosis.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/group/block_steps.hpp"
#include "runtime/layout/edge_route.hpp"

namespace sluice {
namespace {

constexpr std::int64_t kSharedMemoryPerRank = std::int64_t{16} << 20;
// Of a GPU whose NCCL goes over a network: 31.5 MiB for each of five communicators
// (comm/README.md).
constexpr std::int64_t kSharedMemoryOfNccl = std::int64_t{158} << 20;

using Ranks = std::vector<RankFacts>;

const char* plural(int count) { return count == 1 ? "" : "s"; }

bool has_gpu(const RankFacts& rank) { return !rank.device_identity.empty(); }

bool permits_more_ranks(const std::string& variable) {
  return std::find(std::begin(kOversubscribe), std::end(kOversubscribe), variable) !=
         std::end(kOversubscribe);
}

void check_binding(const Ranks& ranks, Findings& findings) {
  for (const RankFacts& rank : ranks) {
    if (rank.threads <= rank.mpi.cores) continue;
    return findings.wrong(
        "rank {} may run on {} core{}, --threads {} would share {}: {}", rank.rank, rank.mpi.cores,
        plural(rank.mpi.cores), rank.threads, rank.mpi.cores == 1 ? "it" : "them",
        rank.threads <= rank.host_cores ? "mpirun has bound it; start with 'mpirun --bind-to none'"
                                        : fmt::format("use at most --threads {}", rank.host_cores));
  }
}

// NCCL's threads, some of which poll, stay on the cores of their rank.
void check_binding_of_gpus(const Ranks& ranks, Findings& findings) {
  if (SLUICE_WITH_NCCL == 0 || std::ranges::count_if(ranks, has_gpu) < 2) return;
  for (const RankFacts& rank : ranks) {
    if (!has_gpu(rank) || rank.limits.cores.size() != 1 || rank.host_cores < 2) continue;
    return findings.note(
        "rank {} is bound to one core, which NCCL's threads share with it: 'mpirun --bind-to none' "
        "(Slurm: 'srun --cpus-per-task=4') gives it more",
        rank.rank);
  }
}

// Bound ranks of one host with a core in common; a host with too few cores is named elsewhere.
void check_double_binding(const Ranks& ranks, Findings& findings) {
  const auto bound = [](const RankFacts& rank) {
    return !rank.limits.cores.empty() &&
           static_cast<int>(rank.limits.cores.size()) < rank.host_cores &&
           rank.mpi.local_size <= rank.host_cores;
  };
  for (std::size_t high = 1; high < ranks.size(); ++high) {
    for (std::size_t low = 0; low < high && bound(ranks[high]); ++low) {
      const RankFacts &one = ranks[low], &two = ranks[high];
      if (one.mpi.host != two.mpi.host || !bound(one)) continue;
      std::vector<int> common;
      std::set_intersection(one.limits.cores.begin(), one.limits.cores.end(),
                            two.limits.cores.begin(), two.limits.cores.end(),
                            std::back_inserter(common));
      if (common.empty()) continue;
      return findings.wrong(
          "{}: ranks {} and {} are both bound to core {}, although the host has {} cores for {} "
          "ranks: start with 'mpirun --map-by slot:PE={}' (Slurm: 'srun --cpus-per-task={}'), or "
          "'--bind-to none'",
          one.mpi.host, one.rank, two.rank, joined(common, ", "), one.host_cores,
          one.mpi.local_size, one.threads, one.threads);
    }
  }
}

// What a host lacks or has wrong.
void check_hosts(const Ranks& ranks, Findings& findings) {
  constexpr std::int64_t kEnough = std::int64_t{1} << 30;  // locked memory
  constexpr double kMostAhead = 1;                         // seconds
  for (const RankFacts* host : first_of_hosts(ranks)) {
    const std::int64_t locked = host->limits.locked_memory_bytes;
    if (host->network.fast && locked >= 0 && locked < kEnough) {
      findings.wrong(
          "{}: it has an InfiniBand or RoCE device, but a rank may lock only {} KiB of memory, "
          "which messages over it need: set 'memlock unlimited' in /etc/security/limits.conf there "
          "(Slurm: PropagateResourceLimitsExcept=MEMLOCK; Docker: --ulimit memlock=-1)",
          host->mpi.host, locked >> 10);
    }
    // Traces do not suffer: they measure clocks themselves.
    if (std::abs(host->clock_ahead) > kMostAhead + host->clock_error) {
      findings.wrong(
          "{}: its clock is {:.1f} s {} that of {}, so times in logs and of files disagree: let "
          "both hosts keep time by NTP (chrony)",
          host->mpi.host, std::abs(host->clock_ahead),
          host->clock_ahead > 0 ? "ahead of" : "behind", ranks.front().mpi.host);
    }
  }
}

void check_shared_memory(const Ranks& ranks, Findings& findings) {
  const auto hosts = first_of_hosts(ranks);
  for (const RankFacts* host : hosts) {
    const auto gpus = std::ranges::count_if(ranks, [&](const RankFacts& rank) {
      return rank.mpi.host == host->mpi.host && has_gpu(rank);
    });
    const int local = host->mpi.local_size;
    const bool by_network = SLUICE_WITH_NCCL == 1 && hosts.size() > 1;
    const std::int64_t wanted = (local > 1 ? kSharedMemoryPerRank * local : 0) +
                                (by_network ? kSharedMemoryOfNccl * gpus : 0);
    const std::int64_t free = host->limits.shared_memory_bytes;
    if (free < 0 || free >= wanted) continue;
    findings.wrong(
        "{}: /dev/shm has {} MiB free, {} rank{} need{} about {}; in a container give it more "
        "(docker run --shm-size=1g)",
        host->mpi.host, free >> 20, local, plural(local), local == 1 ? "s" : "", wanted >> 20);
  }
}

// What a rank computes with: the first that is worth a word.
void check_computing(const Ranks& ranks, Findings& findings) {
  const auto first_where = [&](const auto& is, const auto& say) {
    const auto found = std::ranges::find_if(ranks, is);
    if (found != ranks.end()) say(*found);
  };
  first_where([](const RankFacts& rank) { return !rank.no_gpu.empty(); },
              [&](const RankFacts& rank) {
                findings.note(
                    "{}: this build is for GPUs, but none can be used ({}); ranks there compute "
                    "on the CPU",
                    rank.mpi.host, rank.no_gpu);
              });
  first_where([](const RankFacts& rank) { return rank.device == "cpu" && !rank.native_bf16; },
              [&](const RankFacts& rank) {
                findings.note(
                    "{}: the CPU has no instructions (AMX) that multiply bf16 faster than fp32: "
                    "such matmuls run in fp32 on converted copies, --precision bf16 saves memory "
                    "there, not time",
                    rank.mpi.host);
              });
  const RankFacts& first = ranks.front();
  for (const auto& [what, field] : {std::pair("kernel sets", &RankFacts::kernel_set),
                                    std::pair("matrix libraries", &RankFacts::matmul_library)}) {
    first_where([&](const RankFacts& rank) { return rank.*field != first.*field; },
                [&](const RankFacts& rank) {
                  findings.wrong(
                      "{} differ: rank {} on {} has '{}', rank {} on {} has '{}'. Results then "
                      "depend on which rank computes what; use one kind of host",
                      what, first.rank, first.mpi.host, first.*field, rank.rank, rank.mpi.host,
                      rank.*field);
                });
  }
}

void check_cores(const Ranks& ranks, Findings& findings) {
  std::vector<const RankFacts*> limited;  // by mpirun's slots
  for (const RankFacts* host : first_of_hosts(ranks)) {
    if (host->mpi.local_size > host->host_cores) {
      findings.wrong(
          "{}: {} ranks share {} core{}. A step takes at least {:.1f} times as long and the "
          "measured bubble includes time-slicing; start at most {} there. (Waiting ranks yield: "
          "mpi_yield_when_idle is set.)",
          host->mpi.host, host->mpi.local_size, host->host_cores, plural(host->host_cores),
          static_cast<double>(host->mpi.local_size) / host->host_cores, host->host_cores);
    } else if (is_open_mpi(*host) && std::ranges::none_of(host->environment, [](const auto& each) {
                 return permits_more_ranks(each.first);
               })) {
      limited.push_back(host);
    }
  }
  if (limited.empty()) return;
  const int others = static_cast<int>(limited.size()) - 1;
  findings.note(
      "{}{}: mpirun refuses more ranks than slots (usually cores: {} here) unless called with "
      "--oversubscribe",
      limited.front()->mpi.host,
      others == 0 ? "" : fmt::format(" and {} more host{}", others, plural(others)),
      limited.front()->host_cores);
}

void check_network(const Ranks& ranks, Findings& findings) {
  const RankFacts& first = ranks.front();
  const bool several_hosts = first_of_hosts(ranks).size() > 1;
  const std::string& asked = first.mpi.components;
  if (!is_open_mpi(first) || asked.find("ucx") != std::string::npos ||
      asked.find("ofi") != std::string::npos) {
    return;
  }
  if (first.network.fast) {
    findings.add(several_hosts,
                 "this host has an InfiniBand or RoCE device, but no setting makes MPI use it "
                 "(Debian's Open MPI has no such path by default): use an Open MPI with UCX and "
                 "start with '--mca pml ucx', which fails where UCX is missing");
  } else if (several_hosts) {
    findings.note(
        "several hosts without a fast network device: messages between them go over TCP; choose it "
        "with '--mca btl_tcp_if_include <network>'");
  } else {
    findings.note(
        "no InfiniBand path is asked for (Debian's Open MPI has none by default): between hosts "
        "messages would go over TCP");
  }
}

// A launcher outside of a container, and the MPI library in it.
void check_launcher(const Ranks& ranks, Findings& findings) {
  const LauncherFacts& launcher = ranks.front().launcher;
  const std::string &its = launcher.pmix, &ours = launcher.pmix_of;
  const auto or_unknown = [](const std::string& version) {
    return version.empty() ? "of an unknown version" : version;
  };
  const auto major = [](const std::string& version) {
    return version.substr(0, version.find('.'));
  };
  if (launcher.processes > static_cast<int>(ranks.size())) {
    findings.wrong(
        "the launcher started {} processes, but each is a job of {}: its PMIx ({}) and that of "
        "this program's MPI library ({}) do not meet. Start with 'srun --mpi=pmix', or with the "
        "mpirun of the program's own MPI",
        launcher.processes, ranks.size(), or_unknown(its), or_unknown(ours));
  } else if (!its.empty() && !ours.empty() && major(its) != major(ours)) {
    findings.note(
        "the launcher has PMIx {}, this program's MPI library PMIx {}: they meet here; where a job "
        "hangs at its start, use one major version",
        its, ours);
  }
}

void check_progress(const Ranks& ranks, Findings& findings) {
  if (!is_open_mpi(ranks.front())) return;
  findings.note(
      "Open MPI has no asynchronous progress: large messages move only while a rank is inside the "
      "engine's progress loop, and on a CPU between operators");
}

void check_environment(const Ranks& ranks, Findings& findings) {
  std::set<std::pair<std::string, std::string>> said;
  for (const RankFacts& rank : ranks) {
    for (const auto& [name, value] : rank.environment) {
      if (permits_more_ranks(name) || !said.insert({name, value}).second) continue;
      const bool threads = name == "OMP_NUM_THREADS" || name == "OPENBLAS_NUM_THREADS";
      findings.add(!threads && name != "OMP_PROC_BIND", "{}={} is set (rank {}): {}", name, value,
                   rank.rank,
                   threads ? "--threads decides instead"
                           : "it changes speed and may change results; unset it, or set it equally "
                             "in every run you compare");
    }
  }
}

void check_gpus(const Ranks& ranks, Findings& findings) {
  std::map<std::pair<std::string, std::string>, std::vector<int>> sharing;
  for (const RankFacts& rank : ranks) {
    if (has_gpu(rank)) sharing[{rank.mpi.host, rank.device_identity}].push_back(rank.rank);
  }
  for (const auto& [gpu, sharers] : sharing) {
    if (sharers.size() < 2) continue;
    findings.note(
        "{}: ranks {} share the GPU at {}: NCCL refuses that, so their messages pass host memory",
        gpu.first, joined(sharers, ", "), gpu.second);
  }
  const std::string& why_not = ranks.front().no_device_messages;
  if (!sharing.empty() && !why_not.empty() && why_not != kDeviceMessagesNotTried) {
    findings.note(
        "MPI carries no messages from GPU to GPU ({}): without NCCL they pass page-locked host "
        "memory",
        why_not);
  }
}

// What crosses between hosts in a sum over the replicas of every stage.
struct SumTraffic {
  std::size_t addends = 0;  // of a part
  std::size_t parts = 0;    // sums of them that come back: one to each other host
  std::set<int> alone;      // replicas whose values cross although their host has others

  // What aligned subtrees on one host would not send.
  [[nodiscard]] std::size_t more() const { return addends - parts; }
};

SumTraffic sum_traffic(const Topology& topology, const std::vector<RankDevice>& devices) {
  SumTraffic traffic;
  for (const std::vector<int>& replicas : topology.groups(Axis::kReplica)) {
    const std::vector<int> hosts = hosts_of(devices, replicas);
    traffic.parts += crossings(hosts, gather_steps).size();
    for (const Crossing& each : crossings(hosts, scatter_steps)) {
      ++traffic.addends;
      if (each.summed || std::ranges::count(hosts, hosts[at(each.from)]) == 1) continue;
      traffic.alone.insert(each.from);
    }
  }
  return traffic;
}

}  // namespace

std::vector<Finding> diagnose_sums(const Topology& topology, const std::vector<RankDevice>& devices,
                                   const std::vector<std::pair<std::string, Topology>>& others) {
  Findings findings;
  const SumTraffic traffic = sum_traffic(topology, devices);
  const bool gpus = std::ranges::any_of(
      devices, [](const RankDevice& each) { return each.device.kind != DeviceKind::kCpu; });
  if (gpus || traffic.more() == 0) return findings.list();
  SumTraffic least = traffic;
  std::string order;
  for (const auto& [name, topology_of_other] : others) {
    const SumTraffic other = sum_traffic(topology_of_other, devices);
    if (other.more() >= least.more()) continue;
    least = other;
    order = name;
  }
  findings.add(
      order == "auto",
      "the tree of sums adds replicas of different hosts first, so a sum sends {} addends between "
      "hosts where {} would do, each 1/{} of a rank's gradients: {:.2f} times the bytes{}. The "
      "bits stay; {}",
      traffic.addends, traffic.parts, topology.size.replica,
      static_cast<double>(traffic.addends + traffic.parts) / static_cast<double>(2 * traffic.parts),
      traffic.alone.empty()
          ? ""
          : fmt::format(" (values of replicas {} cross unsummed)", joined(traffic.alone, ", ")),
      order.empty()
          ? "no --rank-order sends fewer: give each host a power of two of replicas"
          : fmt::format("'--rank-order {}' {}", order,
                        least.more() == 0 ? "avoids it" : fmt::format("sends {}", least.addends)));
  return findings.list();
}

double seconds_of_sum(const TensorGroup& group, double bytes) {
  const LinkCost& cost = group.costs[at(static_cast<int>(CollectiveKind::kSum))];
  return cost.latency + (cost.bandwidth > 0 ? bytes / cost.bandwidth : 0);
}

std::vector<Finding> diagnose_tensor_groups(const std::vector<RankFacts>& ranks,
                                            const std::vector<TensorGroup>& groups) {
  constexpr double kMebi = 1 << 20;
  Findings findings;
  std::vector<std::string> hosts;  // of the slowest of those on several
  const TensorGroup* slowest = nullptr;
  double within = 0;  // milliseconds on one host
  std::size_t spread = 0;
  for (const TensorGroup& group : groups) {
    std::vector<std::string> mine;
    for (const int rank : group.ranks) {
      const std::string& host = ranks[at(rank)].mpi.host;
      if (std::ranges::find(mine, host) == mine.end()) mine.push_back(host);
    }
    if (mine.size() == 1) {
      within = std::max(within, 1e3 * seconds_of_sum(group, kMebi));
      continue;
    }
    ++spread;
    if (slowest != nullptr && seconds_of_sum(group, kMebi) <= seconds_of_sum(*slowest, kMebi)) {
      continue;
    }
    slowest = &group;
    hosts = std::move(mine);
  }
  if (slowest == nullptr) return findings.list();
  const double seconds = seconds_of_sum(*slowest, kMebi);
  findings.wrong(
      "ranks {} share stages, and are on {} hosts ({}){}{}, and every layer waits for several "
      "sums over them; fewer --tensor ranks, with more --pipeline or --replicas, keep them on one "
      "host, and 'sluice train --dry-run' says what a step pays",
      joined(slowest->ranks, ", "), hosts.size(), joined(hosts, ", "),
      spread > 1 ? fmt::format(" ({} such groups)", spread) : "",
      seconds > 0 ? fmt::format(": a sum of 1 MiB takes {:.2f} ms{}", 1e3 * seconds,
                                within > 0 ? fmt::format(", {:.2f} ms within a host", within) : "")
                  : "");
  return findings.list();
}

std::vector<const RankFacts*> first_of_hosts(const std::vector<RankFacts>& ranks) {
  std::vector<const RankFacts*> firsts;
  std::set<std::string> seen;
  for (const RankFacts& rank : ranks) {
    if (seen.insert(rank.mpi.host).second) firsts.push_back(&rank);
  }
  return firsts;
}

std::vector<Finding> diagnose(const std::vector<RankFacts>& ranks) {
  Findings findings;
  for (const auto check : {check_cores, check_binding, check_binding_of_gpus, check_double_binding,
                           check_network, check_launcher, check_progress, check_shared_memory,
                           check_hosts, check_environment, check_gpus, check_computing}) {
    check(ranks, findings);
  }
  return findings.list();
}

}  // namespace sluice
