// Which device each rank of a job computes on.
#pragma once

#include <string>
#include <vector>

#include <sluice/device.hpp>
#include <sluice/options.hpp>

#include "comm/group/collectives.hpp"
#include "comm/group/topology.hpp"

namespace sluice {

// What one rank of the job computes on.
struct RankDevice {
  Device device;
  std::string host;
  std::string identity;         // of a GPU, the same in all processes of a machine; else empty
  std::size_t free_memory = 0;  // bytes of a GPU when the job started
  std::string no_gpu;           // why "auto" chose the CPU; else empty
  // As HostMemory.
  std::size_t host_memory = 0, allowed_memory = 0;
  std::string memory_group = {};
  std::string machine = {};       // as machine_id(): the same for containers of one machine
  std::string nccl_machine = {};  // as nccl_machine_id()
  std::string driver = {};        // of a GPU: "CUDA 13.0, driver 580.65.06"
};

// A line for the start of a run: the device of each rank of a pipeline, with the reason where
// "auto" chose the CPU. Empty where all are CPUs and the build has no CUDA.
[[nodiscard]] std::string describe_devices(const std::vector<RankDevice>& ranks);

// A line that names the drivers of GPUs, [rank of the job], and who has which; empty where all have
// one.
[[nodiscard]] std::string describe_different_drivers(const std::vector<RankDevice>& ranks);

// Collective over `world`; `hosts` has the name of every rank's host. A rank's number on its host
// follows the job's numbers. Returns every rank's device, [rank of the job]. Errors are the same on
// every rank. Error(kUsage): the number of choices is not one, the ranks of the pipeline or the
// ranks of the job; a rank cannot use its device; replicas of a stage, or ranks that share one,
// have different kinds of device. Error(kDevice): a GPU fails, also where "auto" found it.
[[nodiscard]] std::vector<RankDevice> choose_devices(Collectives& world, const Topology& topology,
                                                     const std::vector<DeviceChoice>& choices,
                                                     const std::vector<std::string>& hosts);

// The hosts of some ranks of the job, for HostSums: [member] the first one on the same machine.
[[nodiscard]] std::vector<int> hosts_of(const std::vector<RankDevice>& job,
                                        const std::vector<int>& members);

}  // namespace sluice
