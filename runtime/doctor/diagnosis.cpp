#include "runtime/doctor/diagnosis.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>

#include "runtime/layout/edge_route.hpp"

namespace sluice {

namespace {

constexpr std::int64_t kSharedMemoryPerRank = std::int64_t{16} << 20;
// Of a GPU whose NCCL goes over a network: 31.5 MiB for each of five communicators
// (comm/README.md).
constexpr std::int64_t kSharedMemoryOfNccl = std::int64_t{158} << 20;

using Ranks = std::vector<RankFacts>;

bool oversubscription_permitted(const RankFacts& facts) {
  return std::any_of(facts.environment.begin(), facts.environment.end(), [](const auto& variable) {
    return std::find(std::begin(kOversubscribe), std::end(kOversubscribe), variable.first) !=
           std::end(kOversubscribe);
  });
}

void check_cores(const Ranks& ranks, std::vector<Finding>& findings) {
  const RankFacts* limited = nullptr;  // by mpirun's slots
  int others = 0;
  for (const RankFacts* host : first_of_hosts(ranks)) {
    if (host->mpi.local_size > host->host_cores) {
      findings.push_back(
          {true, fmt::format("{}: {} ranks share {} core{}. A step takes at least {:.1f} times as "
                             "long and the measured bubble includes time-slicing; start at most "
                             "{} there. (Waiting ranks yield: mpi_yield_when_idle is set.)",
                             host->mpi.host, host->mpi.local_size, host->host_cores,
                             host->host_cores == 1 ? "" : "s",
                             static_cast<double>(host->mpi.local_size) / host->host_cores,
                             host->host_cores)});
    } else if (is_open_mpi(*host) && !oversubscription_permitted(*host)) {
      others += limited == nullptr ? 0 : 1;
      if (limited == nullptr) limited = host;
    }
  }
  if (limited == nullptr) return;
  findings.push_back(
      {false,
       fmt::format(
           "{}{}: mpirun refuses more ranks than slots (usually cores: {} here) "
           "unless called with --oversubscribe",
           limited->mpi.host,
           others == 0 ? "" : fmt::format(" and {} more host{}", others, others == 1 ? "" : "s"),
           limited->host_cores)});
}

void check_binding(const Ranks& ranks, std::vector<Finding>& findings) {
  for (const RankFacts& rank : ranks) {
    if (rank.threads <= rank.mpi.cores) continue;
    const bool host_has_them = rank.threads <= rank.host_cores;
    findings.push_back(
        {true,
         fmt::format("rank {} may run on {} core{}, --threads {} would share {}: {}", rank.rank,
                     rank.mpi.cores, rank.mpi.cores == 1 ? "" : "s", rank.threads,
                     rank.mpi.cores == 1 ? "it" : "them",
                     host_has_them ? "mpirun has bound it; start with 'mpirun --bind-to none'"
                                   : fmt::format("use at most --threads {}", rank.host_cores))});
    return;
  }
}

// NCCL's threads, some of which poll, stay on the cores of their rank.
void check_binding_of_gpus(const Ranks& ranks, std::vector<Finding>& findings) {
  if (SLUICE_WITH_NCCL == 0) return;
  const auto has_gpu = [](const RankFacts& rank) { return !rank.device_identity.empty(); };
  if (std::count_if(ranks.begin(), ranks.end(), has_gpu) < 2) return;
  for (const RankFacts& rank : ranks) {
    if (!has_gpu(rank) || rank.limits.cores.size() != 1 || rank.host_cores < 2) continue;
    findings.push_back(
        {false, fmt::format("rank {} is bound to one core, which NCCL's threads share with it: "
                            "'mpirun --bind-to none' (Slurm: 'srun --cpus-per-task=4') gives it "
                            "more",
                            rank.rank)});
    return;
  }
}

// "3, 4": what both of two ascending lists have.
std::string common_cores(const std::vector<int>& one, const std::vector<int>& two) {
  std::vector<int> common;
  std::set_intersection(one.begin(), one.end(), two.begin(), two.end(), std::back_inserter(common));
  return fmt::format("{}", fmt::join(common, ", "));
}

// Bound ranks of one host with a core in common; a host with too few cores is named elsewhere.
void check_double_binding(const Ranks& ranks, std::vector<Finding>& findings) {
  const auto bound = [](const RankFacts& rank) {
    return !rank.limits.cores.empty() &&
           static_cast<int>(rank.limits.cores.size()) < rank.host_cores &&
           rank.mpi.local_size <= rank.host_cores;
  };
  for (std::size_t high = 1; high < ranks.size(); ++high) {
    for (std::size_t low = 0; low < high && bound(ranks[high]); ++low) {
      const RankFacts &one = ranks[low], &two = ranks[high];
      if (one.mpi.host != two.mpi.host || !bound(one)) continue;
      const std::string cores = common_cores(one.limits.cores, two.limits.cores);
      if (cores.empty()) continue;
      findings.push_back(
          {true,
           fmt::format("{}: ranks {} and {} are both bound to core {}, although the host has "
                       "{} cores for {} ranks: start with 'mpirun --map-by slot:PE={}' (Slurm: "
                       "'srun --cpus-per-task={}'), or '--bind-to none'",
                       one.mpi.host, one.rank, two.rank, cores, one.host_cores, one.mpi.local_size,
                       one.threads, one.threads)});
      return;
    }
  }
}

void check_locked_memory(const Ranks& ranks, std::vector<Finding>& findings) {
  constexpr std::int64_t kEnough = std::int64_t{1} << 30;
  for (const RankFacts* host : first_of_hosts(ranks)) {
    const std::int64_t limit = host->limits.locked_memory_bytes;
    if (!host->network.fast || limit < 0 || limit >= kEnough) continue;
    findings.push_back(
        {true, fmt::format("{}: it has an InfiniBand or RoCE device, but a rank may lock only {} "
                           "KiB of memory, which messages over it need: set 'memlock unlimited' "
                           "in /etc/security/limits.conf there (Slurm: "
                           "PropagateResourceLimitsExcept=MEMLOCK; Docker: --ulimit memlock=-1)",
                           host->mpi.host, limit >> 10)});
  }
}

// Traces do not suffer: they measure clocks themselves.
void check_clocks(const Ranks& ranks, std::vector<Finding>& findings) {
  constexpr double kMost = 1;  // seconds
  for (const RankFacts* host : first_of_hosts(ranks)) {
    if (std::abs(host->clock_ahead) <= kMost + host->clock_error) continue;
    findings.push_back(
        {true, fmt::format("{}: its clock is {:.1f} s {} that of {}, so times in logs and of files "
                           "disagree: let both hosts keep time by NTP (chrony)",
                           host->mpi.host, std::abs(host->clock_ahead),
                           host->clock_ahead > 0 ? "ahead of" : "behind", ranks.front().mpi.host)});
  }
}

bool asks_for_fast_path(const RankFacts& facts) {
  return facts.mpi.components.find("ucx") != std::string::npos ||
         facts.mpi.components.find("ofi") != std::string::npos;
}

void check_network(const Ranks& ranks, std::vector<Finding>& findings) {
  const RankFacts& first = ranks.front();
  const bool several_hosts = first_of_hosts(ranks).size() > 1;
  if (!is_open_mpi(first) || asks_for_fast_path(first)) return;
  if (first.network.fast) {
    findings.push_back(
        {several_hosts,
         "this host has an InfiniBand or RoCE device, but no setting makes MPI use it (Debian's "
         "Open MPI has no such path by default): use an Open MPI with UCX and start with '--mca "
         "pml ucx', which fails where UCX is missing"});
  } else if (several_hosts) {
    findings.push_back({false,
                        "several hosts without a fast network device: messages between them go "
                        "over TCP; choose it with '--mca btl_tcp_if_include <network>'"});
  } else {
    findings.push_back({false,
                        "no InfiniBand path is asked for (Debian's Open MPI has none by default): "
                        "between hosts messages would go over TCP"});
  }
}

// A launcher outside of a container, and the MPI library in it.
void check_launcher(const Ranks& ranks, std::vector<Finding>& findings) {
  const LauncherFacts& launcher = ranks.front().launcher;
  const auto or_unknown = [](const std::string& version) {
    return version.empty() ? "of an unknown version" : version;
  };
  if (launcher.processes > static_cast<int>(ranks.size())) {
    findings.push_back(
        {true, fmt::format("the launcher started {} processes, but each is a job of {}: its PMIx "
                           "({}) and that of this program's MPI library ({}) do not meet. Start "
                           "with 'srun --mpi=pmix', or with the mpirun of the program's own MPI",
                           launcher.processes, ranks.size(), or_unknown(launcher.pmix),
                           or_unknown(launcher.pmix_of))});
    return;
  }
  const auto major = [](const std::string& version) {
    return version.substr(0, version.find('.'));
  };
  if (launcher.pmix.empty() || launcher.pmix_of.empty() ||
      major(launcher.pmix) == major(launcher.pmix_of)) {
    return;
  }
  findings.push_back(
      {false, fmt::format("the launcher has PMIx {}, this program's MPI library PMIx {}: they meet "
                          "here; where a job hangs at its start, use one major version",
                          launcher.pmix, launcher.pmix_of)});
}

void check_progress(const Ranks& ranks, std::vector<Finding>& findings) {
  const RankFacts& first = ranks.front();
  if (is_open_mpi(first)) {
    findings.push_back(
        {false,
         "Open MPI has no asynchronous progress: large messages move only while a rank is "
         "inside the engine's progress loop, and on a CPU between operators"});
  }
  if (first.mpi.thread_level == "single") {
    findings.push_back({true,
                        "MPI grants only MPI_THREAD_SINGLE; Sluice needs MPI_THREAD_FUNNELED: use "
                        "another MPI build"});
  }
}

void check_shared_memory(const Ranks& ranks, std::vector<Finding>& findings) {
  const auto hosts = first_of_hosts(ranks);
  for (const RankFacts* host : hosts) {
    const auto gpus = std::count_if(ranks.begin(), ranks.end(), [&](const RankFacts& rank) {
      return rank.mpi.host == host->mpi.host && !rank.device_identity.empty();
    });
    const bool by_network = SLUICE_WITH_NCCL == 1 && hosts.size() > 1;
    const std::int64_t wanted =
        (host->mpi.local_size > 1 ? kSharedMemoryPerRank * host->mpi.local_size : 0) +
        (by_network ? kSharedMemoryOfNccl * gpus : 0);
    if (host->limits.shared_memory_bytes < 0 || host->limits.shared_memory_bytes >= wanted) {
      continue;
    }
    findings.push_back(
        {true,
         fmt::format("{}: /dev/shm has {} MiB free, {} rank{} need{} about {}; in a container "
                     "give it more (docker run --shm-size=1g)",
                     host->mpi.host, host->limits.shared_memory_bytes >> 20, host->mpi.local_size,
                     host->mpi.local_size == 1 ? "" : "s", host->mpi.local_size == 1 ? "s" : "",
                     wanted >> 20)});
  }
}

void check_environment(const Ranks& ranks, std::vector<Finding>& findings) {
  std::set<std::pair<std::string, std::string>> said;
  for (const RankFacts& rank : ranks) {
    for (const auto& [name, value] : rank.environment) {
      if (std::find(std::begin(kOversubscribe), std::end(kOversubscribe), name) !=
              std::end(kOversubscribe) ||
          !said.insert({name, value}).second) {
        continue;
      }
      const bool threads = name == "OMP_NUM_THREADS" || name == "OPENBLAS_NUM_THREADS";
      findings.push_back(
          {!threads && name != "OMP_PROC_BIND",
           fmt::format("{}={} is set (rank {}): {}", name, value, rank.rank,
                       threads ? "--threads decides instead"
                               : "it changes speed and may change results; unset it, or set it "
                                 "equally in every run you compare")});
    }
  }
}

void check_gpus(const Ranks& ranks, std::vector<Finding>& findings) {
  std::map<std::pair<std::string, std::string>, std::vector<int>> sharing;
  bool any = false;
  for (const RankFacts& rank : ranks) {
    if (rank.device_identity.empty()) continue;
    any = true;
    sharing[{rank.mpi.host, rank.device_identity}].push_back(rank.rank);
  }
  for (const auto& [gpu, sharers] : sharing) {
    if (sharers.size() < 2) continue;
    findings.push_back(
        {false,
         fmt::format("{}: ranks {} share the GPU at {}: NCCL refuses that, so their messages "
                     "pass host memory",
                     gpu.first, fmt::join(sharers, ", "), gpu.second)});
  }
  const std::string& why_not = ranks.front().no_device_messages;
  if (any && !why_not.empty() && why_not != kDeviceMessagesNotTried) {
    findings.push_back({false, fmt::format("MPI carries no messages from GPU to GPU ({}): without "
                                           "NCCL they pass page-locked host memory",
                                           why_not)});
  }
  for (const RankFacts& rank : ranks) {
    if (rank.no_gpu.empty()) continue;
    findings.push_back({false, fmt::format("{}: this build is for GPUs, but none can be used ({}); "
                                           "ranks there compute on the CPU",
                                           rank.mpi.host, rank.no_gpu)});
    break;
  }
}

void check_precision(const Ranks& ranks, std::vector<Finding>& findings) {
  for (const RankFacts& rank : ranks) {
    if (rank.device != "cpu" || rank.native_bf16) continue;
    findings.push_back({false, fmt::format("{}: the CPU has no instructions (AMX) that multiply "
                                           "bf16 faster than fp32: such products run in fp32 on "
                                           "converted copies, --precision bf16 saves memory there, "
                                           "not time",
                                           rank.mpi.host)});
    break;
  }
}

template <typename Field>
void check_alike(const Ranks& ranks, const char* what, Field field,
                 std::vector<Finding>& findings) {
  for (const RankFacts& rank : ranks) {
    if (field(rank) == field(ranks.front())) continue;
    findings.push_back(
        {true, fmt::format("{} differ: rank {} on {} has '{}', rank {} on {} has '{}'. Results "
                           "then depend on which rank computes what; use one kind of host",
                           what, ranks.front().rank, ranks.front().mpi.host, field(ranks.front()),
                           rank.rank, rank.mpi.host, field(rank))});
    return;
  }
}

}  // namespace

std::vector<const RankFacts*> first_of_hosts(const std::vector<RankFacts>& ranks) {
  std::vector<const RankFacts*> firsts;
  std::set<std::string> seen;
  for (const RankFacts& rank : ranks) {
    if (seen.insert(rank.mpi.host).second) firsts.push_back(&rank);
  }
  return firsts;
}

std::vector<Finding> diagnose(const std::vector<RankFacts>& ranks) {
  std::vector<Finding> findings;
  check_cores(ranks, findings);
  check_binding(ranks, findings);
  check_binding_of_gpus(ranks, findings);
  check_double_binding(ranks, findings);
  check_network(ranks, findings);
  check_launcher(ranks, findings);
  check_progress(ranks, findings);
  check_shared_memory(ranks, findings);
  check_locked_memory(ranks, findings);
  check_clocks(ranks, findings);
  check_environment(ranks, findings);
  check_gpus(ranks, findings);
  check_precision(ranks, findings);
  check_alike(
      ranks, "kernel sets", [](const RankFacts& r) { return r.kernel_set; }, findings);
  check_alike(
      ranks, "matrix libraries", [](const RankFacts& r) { return r.matmul_library; }, findings);
  return findings;
}

}  // namespace sluice
