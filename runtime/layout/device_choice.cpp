#include "runtime/layout/device_choice.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <span>

#include <sluice/error.hpp>
#include <sluice/options.hpp>

#include "comm/base/host.hpp"
#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/group/collectives.hpp"
#include "runtime/files/json_text.hpp"
#include "runtime/layout/host_memory.hpp"

namespace sluice {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Device, kind, index)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankDevice, device, host, identity, free_memory, no_gpu,
                                   host_memory, allowed_memory, memory_group, machine, nccl_machine,
                                   driver)

namespace {

using Json = nlohmann::json;

DeviceChoice parse_choice(std::string_view text, std::string_view whole) {
  if (text == "auto") return {DeviceChoice::Kind::kAuto, 0};
  if (text == "cuda") return {DeviceChoice::Kind::kCuda, 0};
  try {
    const Device device = parse_device(text);
    if (device.kind == DeviceKind::kCpu) return {};
    return {DeviceChoice::Kind::kCudaIndex, device.index};
  } catch (const Error&) {
    throw_usage(
        "devices '{}': '{}' is not a device; legal: cpu, cuda, cuda:<index>, auto, or a list of "
        "these, one per rank",
        whole, text);
  }
}

// What a rank tells the others about its device. `refusal`: empty where the device can be used.
struct DeviceReport {
  RankDevice rank;
  std::string refusal;
  ErrorCode code = ErrorCode::kUsage;
};

// The choice of one rank; the number of entries decides what they stand for.
const DeviceChoice& choice_of(const std::vector<DeviceChoice>& choices, const Topology& topology,
                              int rank) {
  if (choices.size() == 1) return choices.front();
  if (choices.size() == at(topology.ranks())) return choices[at(rank)];
  if (choices.size() == at(topology.size.pipeline))
    return choices[at(topology.place_of(rank).pipeline)];
  throw_usage(
      "{} devices for {} ranks; legal: 1, {} (one per rank of a pipeline) or {} (one per rank of "
      "the job)",
      choices.size(), topology.ranks(), topology.size.pipeline, topology.ranks());
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DeviceReport, rank, refusal, code)

struct Resolved {
  Device device;
  std::string no_gpu;  // as of RankDevice
};

Resolved resolve(const DeviceChoice& choice, int local_rank) {
  switch (choice.kind) {
    case DeviceChoice::Kind::kCpu:
      return {};
    case DeviceChoice::Kind::kCudaIndex:
      return {{DeviceKind::kCuda, choice.index}, ""};
    case DeviceChoice::Kind::kCuda:
    case DeviceChoice::Kind::kAuto:
      break;
  }
  const int count = device_count(DeviceKind::kCuda);
  const Device gpu{DeviceKind::kCuda, count == 0 ? 0 : local_rank % count};
  if (choice.kind == DeviceChoice::Kind::kCuda) return {gpu, ""};
  if (count == 0) return {{}, no_gpu_reason()};
  try {
    open_device(gpu);
    return {gpu, ""};
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUsage) throw;  // a GPU that fails is not replaced by the CPU
    return {{}, error.what()};
  }
}

// "cpu" with the reason where "auto" found no GPU that can be used.
std::string describe_device(const RankDevice& rank) {
  return to_string(rank.device) + (rank.no_gpu.empty() ? "" : " (" + rank.no_gpu + ")");
}

// CUDA's version of the driver, and its own where the kernel shows it.
std::string driver_text(const DeviceProperties& gpu) {
  if (gpu.driver == 0) return "";
  std::string own;
  std::ifstream("/sys/module/nvidia/version") >> own;
  return fmt::format("CUDA {}.{}{}", gpu.driver / 1000, gpu.driver % 1000 / 10,
                     own.empty() ? "" : ", driver " + own);
}

}  // namespace

std::vector<DeviceChoice> parse_devices(std::string_view text) {
  std::vector<DeviceChoice> choices;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    choices.push_back(parse_choice(text.substr(begin, end - begin), text));
    begin = end + 1;
  }
  return choices;
}

std::string to_string(const std::vector<DeviceChoice>& choices) {
  std::string text;
  for (const DeviceChoice& choice : choices) {
    constexpr std::array<const char*, 4> kNames = {"cpu", "cuda", "cuda:", "auto"};
    if (!text.empty()) text += ',';
    text += kNames[static_cast<std::size_t>(choice.kind)];
    if (choice.kind == DeviceChoice::Kind::kCudaIndex) text += std::to_string(choice.index);
  }
  return text;
}

std::string describe_devices(const std::vector<RankDevice>& ranks) {
  const RankDevice& first = ranks.front();
  const bool alike = std::all_of(ranks.begin(), ranks.end(), [&](const RankDevice& rank) {
    return rank.device.kind == DeviceKind::kCpu && rank.no_gpu == first.no_gpu;
  });
  if (alike && !built_with_cuda()) return "";
  if (alike) {
    const std::string why = first.no_gpu.empty() ? no_gpu_reason() : first.no_gpu;
    return fmt::format("  devices: cpu (GPUs: {})\n", why.empty() ? "not asked for" : why);
  }
  std::vector<std::string> entries;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    entries.push_back(
        fmt::format("{} {} on {}", rank, describe_device(ranks[rank]), ranks[rank].host));
  }
  return fmt::format("  devices: {}\n", joined(entries, ", "));
}

std::string describe_different_drivers(const std::vector<RankDevice>& ranks) {
  std::map<std::string, std::vector<std::string>> having;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].driver.empty()) continue;
    having[ranks[rank].driver].push_back(fmt::format("{} on {}", rank, ranks[rank].host));
  }
  if (having.size() < 2) return "";
  std::vector<std::string> parts;
  for (const auto& [driver, who] : having) {
    constexpr std::size_t kMost = 4;
    const std::size_t named = std::min(who.size(), kMost);
    parts.push_back(
        fmt::format("{} (rank {}{})", driver, joined(std::span(who).first(named), ", rank "),
                    named < who.size() ? fmt::format(" and {} more", who.size() - named) : ""));
  }
  return fmt::format("  drivers of the GPUs differ: {}\n", joined(parts, "; "));
}

std::vector<RankDevice> choose_devices(Collectives& world, const Topology& topology,
                                       const std::vector<DeviceChoice>& choices,
                                       const std::vector<std::string>& hosts) {
  const int mine = world.communicator().rank();
  const DeviceChoice& choice = choice_of(choices, topology, mine);
  int local_rank = 0;
  for (int rank = 0; rank < mine; ++rank) local_rank += hosts[at(rank)] == hosts[at(mine)] ? 1 : 0;
  // Every rank learns of a refusal, so that none waits for this one.
  DeviceReport report;
  report.rank.host = hosts[at(mine)];
  report.rank.machine = machine_id();
  report.rank.nccl_machine = nccl_machine_id();
  try {
    const auto [device, no_gpu] = resolve(choice, local_rank);
    open_device(device);  // before anything else makes this process a client of the first GPU
    const DeviceProperties properties = properties_of(device);
    report.rank.device = device;
    report.rank.identity = properties.identity;
    report.rank.free_memory = properties.free_memory;
    report.rank.no_gpu = no_gpu;
    report.rank.driver = driver_text(properties);
    const HostMemory memory = host_memory();
    report.rank.host_memory = memory.bytes;
    report.rank.allowed_memory = memory.allowed;
    report.rank.memory_group = memory.group;
  } catch (const Error& error) {
    report.refusal = fmt::format("rank {} on {}: {}", mine, hosts[at(mine)], error.what());
    report.code = error.code();
  }
  std::vector<RankDevice> devices;
  for (const std::string& text : world.all_gather_strings(dump_json(Json(report)))) {
    const auto other = parse_json(text).get<DeviceReport>();
    const int rank = static_cast<int>(devices.size());
    if (!other.refusal.empty()) throw Error(other.code, other.refusal, rank);
    devices.push_back(other.rank);
  }
  for (const Axis axis : {Axis::kReplica, Axis::kTensor}) {
    for (const std::vector<int>& members : topology.groups(axis)) {
      const int first = members.front();
      for (const int other : members) {
        if (devices[at(other)].device.kind == devices[at(first)].device.kind) continue;
        throw_usage(
            "{} must compute on one kind of device, but rank {} has {} and rank {} has {}; "
            "--rank-order chooses another order of ranks",
            axis == Axis::kReplica ? "replicas of one stage" : "ranks that share a stage", first,
            describe_device(devices[at(first)]), other, describe_device(devices[at(other)]));
      }
    }
  }
  return devices;
}

std::vector<int> hosts_of(const std::vector<RankDevice>& job, const std::vector<int>& members) {
  std::map<std::string, int> first;
  std::vector<int> hosts;
  for (const int rank : members) {
    hosts.push_back(
        first.try_emplace(job[at(rank)].machine, static_cast<int>(hosts.size())).first->second);
  }
  return hosts;
}

}  // namespace sluice
