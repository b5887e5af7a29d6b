// Facts of one rank of a job and of its host, as `sluice doctor` gathers them. Does not call MPI.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <sluice/device.hpp>

#include "comm/group/collectives.hpp"
#include "comm/mpi/mpi_session.hpp"
#include "runtime/doctor/file_facts.hpp"
#include "runtime/doctor/network_facts.hpp"

namespace sluice {

// Which program a rank runs.
struct BuildFacts {
  std::string version;  // "0.2.0"
  std::string hash;     // of the program's file, 32 hexadecimal digits; empty: not readable
};

// What the system grants a rank.
struct LimitFacts {
  std::vector<int> cores;                 // of the affinity mask, ascending
  std::int64_t locked_memory_bytes = -1;  // RLIMIT_MEMLOCK; -1: unlimited
  std::int64_t shared_memory_bytes = -1;  // free in /dev/shm; -1: unknown
};

// One rank's view of where it runs.
struct RankFacts {
  int rank = 0;
  MpiInfo mpi;
  BuildFacts build;
  std::string device = "cpu";
  std::string device_identity, gpu;  // of a GPU: address, description; empty on the CPU
  std::string no_gpu;                // why a build for GPUs finds none; else empty
  std::string no_device_messages;    // as why_no_device_messages (runtime/layout/edge_route.hpp)
  int host_cores = 1;                // this job may use on the host
  int threads = 1;                   // requested, per rank
  std::string kernel_set, matmul_library;
  bool native_bf16 = true;  // as native_bf16() (stages/cpu/cpu_report.hpp)
  LimitFacts limits;
  NetworkFacts network;
  DataFacts data;
  DirectoryFacts save;
  std::vector<std::pair<std::string, std::string>> environment;  // set variables that matter
};

// Variables that permit more ranks than cores, of Open MPI 4 and 5.
inline constexpr const char* kOversubscribe[] = {
    "OMPI_MCA_rmaps_base_oversubscribe",
    "PRTE_MCA_rmaps_default_mapping_policy",
};

// Whether the library is Open MPI, of any version.
[[nodiscard]] bool is_open_mpi(const RankFacts& facts);

// Of this process, without rank, threads, files, connections, and the facts that MPI has.
// `version` is the program's.
[[nodiscard]] RankFacts local_facts(const std::string& version);
// Collective, before anything else: programs of different versions may not understand each other
// any further. Throws Error(kMismatch) on every rank, naming two of them with host and version.
void require_one_version(Collectives& collectives, const std::string& version,
                         const std::string& host);
// "NVIDIA H200, 139.8 GiB, compute capability 9.0, driver for CUDA 13.0"; empty for a CPU.
[[nodiscard]] std::string describe_gpu(Device device);

[[nodiscard]] std::string to_json_text(const RankFacts& facts);
[[nodiscard]] RankFacts rank_facts_from_json(const std::string& text);

}  // namespace sluice
