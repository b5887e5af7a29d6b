// How the tensors of each edge of a pipeline get from stage to stage: chosen for every edge before
// anything is allocated, with the reason, and refused where it cannot work.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <sluice/communicator.hpp>
#include <sluice/device.hpp>
#include <sluice/options.hpp>
#include <sluice/schedule.hpp>

#include "runtime/layout/device_choice.hpp"

namespace sluice {

enum class RouteKind : std::uint8_t {
  kLocal,   // both stages on one rank: handed over
  kHost,    // messages of host memory
  kStaged,  // a GPU at one end or both: messages pass page-locked host memory
  kDirect,  // MPI reads and writes the GPUs' memory itself
  kNccl,    // NCCL, from GPU to GPU
};

struct EdgeRoute {
  RouteKind kind = RouteKind::kLocal;
  std::string reason;
};

struct RouteQuestion {
  TransportChoice wanted = TransportChoice::kAuto;
  std::string no_device_messages;   // as why_no_device_messages
  std::string nccl_refusal;         // as find_why_no_nccl
  std::vector<RankDevice> devices;  // [rank of the pipeline]
};
// Why NCCL cannot join the GPUs of a job, [rank of the job], whatever library they have: a build
// without it, two ranks on one GPU. Empty where it can.
[[nodiscard]] std::string why_no_nccl(const std::vector<RankDevice>& job);
// The same, or which rank's NCCL or driver does not serve. Collective over `world`. NCCL is looked
// for only where it could be chosen: by several GPUs, unless MPI is wanted.
[[nodiscard]] std::string find_why_no_nccl(Collectives& world, const std::vector<RankDevice>& job,
                                           TransportChoice wanted);
// Why not every rank's MPI takes a GPU's memory; empty where it does. Collective over `world`.
// `job`: [rank of the job]; `no_nccl`: as find_why_no_nccl; `depth`: ranks of a pipeline. Where no
// message can need it MPI is not asked, since trying it, where a library says wrongly that it can,
// may end the process, and the answer is kDeviceMessagesNotTried.
inline constexpr const char* kDeviceMessagesNotTried = "not tried: no edge needs it";
[[nodiscard]] std::string why_no_device_messages(Collectives& world,
                                                 const std::vector<RankDevice>& job,
                                                 TransportChoice wanted, const std::string& no_nccl,
                                                 int depth);

// What two ranks of a pipeline exchange, both directions; never direct. Throws as choose_routes().
[[nodiscard]] EdgeRoute choose_route(int from, int to, const RouteQuestion& question);
// [stage s]: the edge between stages s - 1 and s, both directions; entry 0 is local. Where any edge
// is NCCL's, none is direct: CUDA-aware MPI beside NCCL can deadlock. Throws Error(kUsage) naming
// both ranks where the wanted transport cannot serve an edge.
[[nodiscard]] std::vector<EdgeRoute> choose_routes(const Placement& placement,
                                                   const RouteQuestion& question);

// What sums the gradients of pipeline rank `rank` over `replicas` replicas: local for one replica,
// else host, staged or NCCL's. Throws Error(kUsage) naming the rank where NCCL is wanted and
// cannot.
[[nodiscard]] EdgeRoute choose_sum_route(int rank, int replicas, const RouteQuestion& question);

[[nodiscard]] bool uses_nccl(const std::vector<EdgeRoute>& routes);

// Lines for the start of a run: edges of one kind and reason together.
[[nodiscard]] std::string describe_routes(const std::vector<EdgeRoute>& routes);
// The same for choose_sum_route() of every pipeline rank; `all_reduce`: in NCCL's own order.
[[nodiscard]] std::string describe_sums(const std::vector<EdgeRoute>& sums, bool all_reduce);
// "NCCL (a GPU of its own at both ends)".
[[nodiscard]] std::string describe_route(const EdgeRoute& route);

}  // namespace sluice
