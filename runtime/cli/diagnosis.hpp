// What `sluice doctor` finds out about a job: the facts of each rank, and the findings they lead
// to. Does not call MPI.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <sluice/device.hpp>

#include "comm/mpi/mpi_session.hpp"

namespace sluice {

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
  bool native_bf16 = true;                // as native_bf16() (stages/cpu/cpu_report.hpp)
  bool fast_network = false;              // the host has an InfiniBand or RoCE device
  std::int64_t shared_memory_bytes = -1;  // free in /dev/shm; -1: unknown
  std::vector<std::pair<std::string, std::string>> environment;  // set variables that matter
};

// Of this process, without rank, threads and the facts that MPI has.
[[nodiscard]] RankFacts local_facts();
// "NVIDIA H200, 139.8 GiB, compute capability 9.0, driver for CUDA 13.0"; empty for a CPU.
[[nodiscard]] std::string describe_gpu(Device device);

[[nodiscard]] std::string to_json_text(const RankFacts& facts);
[[nodiscard]] RankFacts rank_facts_from_json(const std::string& text);

struct Finding {
  bool wrong = false;  // false: worth knowing, nothing to repair
  std::string text;    // the fact, and what to do about it
};

// `ranks` ascend and are not empty.
[[nodiscard]] std::vector<Finding> diagnose(const std::vector<RankFacts>& ranks);

}  // namespace sluice
