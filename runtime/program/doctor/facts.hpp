// Facts of one rank of a job and of its host, as `sluice doctor` gathers them. Does not call MPI.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <sluice/device.hpp>

#include "comm/group/collectives.hpp"
#include "comm/mpi/mpi_session.hpp"
#include "runtime/entry/network_facts.hpp"

namespace sluice {

// What the system grants a rank.
struct LimitFacts {
  std::vector<int> cores;                 // of the affinity mask, ascending
  std::int64_t locked_memory_bytes = -1;  // RLIMIT_MEMLOCK; -1: unlimited
  std::int64_t shared_memory_bytes = -1;  // free in /dev/shm; -1: unknown
};

// What started a rank, by its environment, and whether its MPI library speaks with that.
struct LauncherFacts {
  int processes = 0;          // that it started; 0: unknown
  std::string pmix, pmix_of;  // version of the launcher's PMIx, of the library's; empty: unknown
};

// Of the data file.
struct DataFacts {
  std::string path;     // empty: none was asked for
  std::string problem;  // why it cannot be read; else empty
  std::int64_t bytes = 0;
  std::string hash;  // of what is_hashed_whole() says
};

// Of a directory that --save would be given.
struct DirectoryFacts {
  std::string path;             // empty: none was asked for
  std::string problem;          // why the rank cannot write there; else empty
  double bytes_per_second = 0;  // written and synced; 0: another rank of the host measured
  double seen_after = -1;       // as Visibility::after (runtime/checkpoint/save_directory.hpp)
};

// One rank's view of where it runs.
struct RankFacts {
  int rank = 0;
  MpiInfo mpi;
  std::string device = "cpu";
  std::string device_identity, gpu;  // of a GPU: address, description; empty on the CPU
  std::string no_gpu;                // why a build for GPUs finds none; else empty
  std::string no_device_messages;    // as why_no_device_messages (runtime/layout/edge_route.hpp)
  int host_cores = 1;                // this job may use on the host
  int threads = 1;                   // requested, per rank
  std::string kernel_set, matmul_library;
  bool native_bf16 = true;  // as native_bf16() (stages/cpu/cpu_report.hpp)
  LimitFacts limits;
  LauncherFacts launcher;
  NetworkFacts network;
  double clock_ahead = 0;  // seconds by which the host's wall clock is ahead of rank 0's
  double clock_error = 0;  // and how far that may be wrong
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

// Of this process, without rank, threads, files, clock, connections, and the facts that MPI has.
[[nodiscard]] RankFacts local_facts();
// Bytes at each end of a data file that are compared; a file of at most twice as many is compared
// as a whole.
inline constexpr std::int64_t kHashedEnd = std::int64_t{1} << 20;
[[nodiscard]] inline bool is_hashed_whole(std::int64_t bytes) { return bytes <= 2 * kHashedEnd; }

// Reads at most 2 x kHashedEnd bytes. An unreadable file is a fact, not an error.
[[nodiscard]] DataFacts data_facts(const std::filesystem::path& path);
// Collective, with the host of each rank. The first rank of each host writes a file, of 8 MiB,
// which goes again, into the directory or into the one above that is there. An unusable directory
// is a fact, not an error. `patience`: seconds to wait until all hosts see a new file.
[[nodiscard]] DirectoryFacts probe_directory(Collectives& collectives,
                                             const std::vector<std::string>& hosts,
                                             const std::filesystem::path& path,
                                             double patience = 10);

// "NVIDIA H200, 139.8 GiB, compute capability 9.0, driver for CUDA 13.0"; empty for a CPU.
[[nodiscard]] std::string describe_gpu(Device device);

[[nodiscard]] std::string to_json_text(const RankFacts& facts);
[[nodiscard]] RankFacts rank_facts_from_json(const std::string& text);

}  // namespace sluice
