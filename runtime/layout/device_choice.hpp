// Which device each rank of a job computes on.
#pragma once

#include <string>
#include <string_view>
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
  std::string identity;         // of a GPU, the same from every process of a host; else empty
  std::size_t free_memory = 0;  // bytes of a GPU, when the job started
  std::string no_gpu;           // why "auto" chose the CPU; else empty
  std::size_t host_memory = 0;  // bytes that `host` has; 0: not known
};

// A line for the start of a run: what each rank of a pipeline computes on, and why on a CPU where
// "auto" chose it. Empty where there is nothing but CPUs and the build knows no other device.
[[nodiscard]] std::string describe_devices(const std::vector<RankDevice>& ranks);

// Collective over `world`: every rank's device, [rank of the job]. Throws Error(kUsage) on every
// rank, naming the rank and its host: a number of entries that fits neither one, the pipeline nor
// the job; a device that rank cannot use; replicas of a stage on devices of different kinds.
// Error(kDevice) likewise for a GPU that fails, whether asked for or found by "auto".
[[nodiscard]] std::vector<RankDevice> choose_devices(Collectives& world, const Topology& topology,
                                                     const std::vector<DeviceChoice>& choices);

}  // namespace sluice
