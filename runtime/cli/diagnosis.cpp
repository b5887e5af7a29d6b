#include "runtime/cli/diagnosis.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "comm/base/cores.hpp"
#include "runtime/layout/edge_route.hpp"
#include "stages/cpu/cpu_report.hpp"

namespace sluice {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(MpiInfo, library, standard, thread_level, host, components,
                                   tag_upper_bound, local_rank, local_size, cores)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankFacts, rank, mpi, device, device_identity, gpu, no_gpu,
                                   no_device_messages, host_cores, threads, kernel_set,
                                   matmul_library, native_bf16, fast_network, shared_memory_bytes,
                                   environment)

namespace {

// Variables of libraries that change results or speed.
constexpr const char* kVariables[] = {
    "OMP_NUM_THREADS",          "OMP_PROC_BIND",
    "OPENBLAS_CORETYPE",        "OPENBLAS_NUM_THREADS",
    "DNNL_MAX_CPU_ISA",         "ONEDNN_MAX_CPU_ISA",
    "DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_DEFAULT_FPMATH_MODE",
    "SLUICE_KERNELS",
};
// Variables that permit more ranks than cores, of Open MPI 4 and 5.
constexpr const char* kOversubscribe[] = {
    "OMPI_MCA_rmaps_base_oversubscribe",
    "PRTE_MCA_rmaps_default_mapping_policy",
};

constexpr std::int64_t kSharedMemoryPerRank = std::int64_t{16} << 20;

using Ranks = std::vector<RankFacts>;

bool has_fast_network() {
  std::error_code ignored;
  const std::filesystem::directory_iterator devices("/sys/class/infiniband", ignored);
  return !ignored && devices != std::filesystem::directory_iterator();
}

std::int64_t free_shared_memory() {
  struct statvfs state = {};
  if (statvfs("/dev/shm", &state) != 0) return -1;
  return static_cast<std::int64_t>(state.f_bavail) * static_cast<std::int64_t>(state.f_frsize);
}

// Host -> its first rank's facts, in order of rank.
std::vector<const RankFacts*> first_of_hosts(const Ranks& ranks) {
  std::vector<const RankFacts*> firsts;
  std::set<std::string> seen;
  for (const RankFacts& rank : ranks) {
    if (seen.insert(rank.mpi.host).second) firsts.push_back(&rank);
  }
  return firsts;
}

bool is_open_mpi(const RankFacts& facts) {
  return facts.mpi.library.find("Open MPI") != std::string::npos;
}

bool oversubscription_permitted(const RankFacts& facts) {
  return std::any_of(facts.environment.begin(), facts.environment.end(), [](const auto& variable) {
    return std::find(std::begin(kOversubscribe), std::end(kOversubscribe), variable.first) !=
           std::end(kOversubscribe);
  });
}

void check_cores(const Ranks& ranks, std::vector<Finding>& findings) {
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
      findings.push_back(
          {false, fmt::format("{}: mpirun refuses more ranks than slots (usually cores: {} here) "
                              "unless called with --oversubscribe",
                              host->mpi.host, host->host_cores)});
    }
  }
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

bool asks_for_fast_path(const RankFacts& facts) {
  return facts.mpi.components.find("ucx") != std::string::npos ||
         facts.mpi.components.find("ofi") != std::string::npos;
}

void check_network(const Ranks& ranks, std::vector<Finding>& findings) {
  const RankFacts& first = ranks.front();
  const bool several_hosts = first_of_hosts(ranks).size() > 1;
  if (!is_open_mpi(first) || asks_for_fast_path(first)) return;
  if (first.fast_network) {
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

void check_progress(const Ranks& ranks, std::vector<Finding>& findings) {
  const RankFacts& first = ranks.front();
  if (is_open_mpi(first)) {
    findings.push_back(
        {false,
         "Open MPI has no asynchronous progress: large messages move only while a rank is "
         "inside the engine's progress loop, between actions"});
  }
  if (first.mpi.thread_level == "single") {
    findings.push_back({true,
                        "MPI grants only MPI_THREAD_SINGLE; Sluice needs MPI_THREAD_FUNNELED: use "
                        "another MPI build"});
  }
}

void check_shared_memory(const Ranks& ranks, std::vector<Finding>& findings) {
  for (const RankFacts* host : first_of_hosts(ranks)) {
    const std::int64_t wanted = kSharedMemoryPerRank * host->mpi.local_size;
    if (host->mpi.local_size < 2 || host->shared_memory_bytes < 0 ||
        host->shared_memory_bytes >= wanted) {
      continue;
    }
    findings.push_back(
        {true, fmt::format("{}: /dev/shm has {} MiB free, {} ranks need about {}; in a container "
                           "give it more (docker run --shm-size=1g)",
                           host->mpi.host, host->shared_memory_bytes >> 20, host->mpi.local_size,
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

std::string describe_gpu(Device device) {
  if (device.kind == DeviceKind::kCpu) return "";
  const DeviceProperties gpu = properties_of(device);
  return fmt::format("{}, {:.1f} GiB, compute capability {}.{}, driver for CUDA {}.{}", gpu.name,
                     static_cast<double>(gpu.memory) / (1 << 30), gpu.major, gpu.minor,
                     gpu.driver / 1000, gpu.driver % 1000 / 10);
}

RankFacts local_facts() {
  RankFacts facts;
  if (built_with_cuda()) facts.no_gpu = no_gpu_reason();
  facts.host_cores = host_cores();
  facts.kernel_set = kernel_set();
  facts.matmul_library = matmul_library();
  facts.native_bf16 = native_bf16();
  facts.fast_network = has_fast_network();
  facts.shared_memory_bytes = free_shared_memory();
  const auto note = [&facts](const char* name) {
    if (const char* value = std::getenv(name); value != nullptr) {
      facts.environment.emplace_back(name, value);
    }
  };
  for (const char* name : kVariables) note(name);
  for (const char* name : kOversubscribe) note(name);
  return facts;
}

std::string to_json_text(const RankFacts& facts) {
  return nlohmann::json(facts).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

RankFacts rank_facts_from_json(const std::string& text) {
  return nlohmann::json::parse(text).get<RankFacts>();
}

std::vector<Finding> diagnose(const std::vector<RankFacts>& ranks) {
  std::vector<Finding> findings;
  check_cores(ranks, findings);
  check_binding(ranks, findings);
  check_network(ranks, findings);
  check_progress(ranks, findings);
  check_shared_memory(ranks, findings);
  check_environment(ranks, findings);
  check_gpus(ranks, findings);
  check_precision(ranks, findings);
  check_alike(
      ranks, "kernel sets", [](const RankFacts& r) { return r.kernel_set; }, findings);
  check_alike(
      ranks, "matrix libraries", [](const RankFacts& r) { return r.matmul_library; }, findings);
  check_alike(
      ranks, "MPI libraries", [](const RankFacts& r) { return r.mpi.library; }, findings);
  std::stable_sort(findings.begin(), findings.end(),
                   [](const Finding& a, const Finding& b) { return a.wrong && !b.wrong; });
  return findings;
}

}  // namespace sluice
