#include "runtime/layout/edge_route.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include <sluice/error.hpp>

#include "comm/base/index.hpp"
#include "comm/base/joined.hpp"
#include "comm/base/throw_error.hpp"
#include "comm/device/hardware_queues.hpp"
#if SLUICE_WITH_NCCL
#include "comm/nccl/nccl.hpp"
#endif

namespace sluice {
namespace {

constexpr std::array<const char*, 3> kChoices = {"auto", "mpi", "nccl"};

bool is_gpu(const RankDevice& rank) { return rank.device.kind != DeviceKind::kCpu; }

// NCCL refuses two ranks on one GPU, unless NCCL_HOSTID says that they are on two machines.
bool share_gpu(const RankDevice& a, const RankDevice& b) {
  return is_gpu(a) && is_gpu(b) && a.nccl_machine == b.nccl_machine && a.identity == b.identity;
}

// The reason where all ranks have the same, else the first rank's reason; empty where none has one.
std::string common_reason(const std::vector<std::string>& reasons) {
  for (std::size_t rank = 0; rank < reasons.size(); ++rank) {
    if (reasons[rank].empty()) continue;
    const bool all = std::count(reasons.begin(), reasons.end(), reasons[rank]) ==
                     static_cast<std::ptrdiff_t>(reasons.size());
    return all ? reasons[rank] : fmt::format("rank {}: {}", rank, reasons[rank]);
  }
  return {};
}

bool has_several_gpus(const std::vector<RankDevice>& job) {
  return std::count_if(job.begin(), job.end(), is_gpu) > 1;
}

// Whether MPI may carry messages from one GPU to another.
bool may_send_device_memory(const std::vector<RankDevice>& job, TransportChoice wanted,
                            const std::string& no_nccl, int depth) {
  return depth > 1 && has_several_gpus(job) && wanted != TransportChoice::kNccl &&
         (wanted == TransportChoice::kMpi || !no_nccl.empty());
}

// The words of reasons and errors.
struct Wording {
  std::string task;  // "transport nccl cannot <task>"
  const char* needs_gpus;
  const char* on_cpus;
  const char* by_nccl;
};

// The one rule of what carries tensors between two devices: NCCL wherever it can be used, unless
// another transport is wanted.
EdgeRoute choose(const RankDevice& a, const RankDevice& b, const RouteQuestion& question,
                 const Wording& wording) {
  const bool gpus = is_gpu(a) && is_gpu(b);
  const std::string why_not = gpus ? question.nccl_refusal : wording.needs_gpus;
  if (question.wanted == TransportChoice::kNccl && !why_not.empty()) {
    throw_usage("transport nccl cannot {}: {}; legal: auto, mpi", wording.task, why_not);
  }
  if (!is_gpu(a) && !is_gpu(b)) return {RouteKind::kHost, wording.on_cpus};
  if (!gpus) return {RouteKind::kStaged, "a GPU's neighbour is a CPU"};
  if (question.wanted == TransportChoice::kMpi) {
    return {RouteKind::kStaged, "asked for by --transport mpi"};
  }
  if (!why_not.empty()) return {RouteKind::kStaged, why_not};
  return {RouteKind::kNccl, wording.by_nccl};
}

// The indices of routes with the same kind and reason, local ones left out.
std::map<std::pair<RouteKind, std::string>, std::vector<std::size_t>> group(
    const std::vector<EdgeRoute>& routes) {
  std::map<std::pair<RouteKind, std::string>, std::vector<std::size_t>> groups;
  for (std::size_t i = 0; i < routes.size(); ++i) {
    if (routes[i].kind == RouteKind::kLocal) continue;
    groups[{routes[i].kind, routes[i].reason}].push_back(i);
  }
  return groups;
}

// Where not all ranks of the pipeline are meant.
std::string of_ranks(const std::vector<std::size_t>& ranks, std::size_t all) {
  return ranks.size() == all ? "" : fmt::format(" of pipeline ranks {}", joined(ranks, ", "));
}

}  // namespace

std::string to_string(UnitShape shape) {
  std::string text = fmt::format("{} samples", shape.samples);
  if (shape.positions > 0) text += fmt::format(" of {} positions", shape.positions);
  return text;
}

std::string why_no_nccl(const std::vector<RankDevice>& job) {
  if (SLUICE_WITH_NCCL == 0) return "this build has no NCCL";
  for (std::size_t a = 0; a < job.size(); ++a) {
    for (std::size_t b = a + 1; b < job.size(); ++b) {
      if (!share_gpu(job[a], job[b])) continue;
      if (job[a].machine != job[b].machine) {
        return fmt::format(
            "NCCL takes ranks {} on {} and {} on {} to share a GPU: their NCCL_HOSTID is equal", a,
            job[a].host, b, job[b].host);
      }
      return fmt::format("ranks {} and {} share {} on {}, which NCCL refuses", a, b,
                         to_string(job[a].device), job[a].host);
    }
  }
  return {};
}

std::string find_why_no_nccl(Collectives& world, const std::vector<RankDevice>& job,
                             TransportChoice wanted) {
  std::string why = why_no_nccl(job);
  if (!why.empty() || wanted == TransportChoice::kMpi || !has_several_gpus(job)) return why;
#if SLUICE_WITH_NCCL
  const int rank = world.communicator().rank();
  const auto refused = nccl_refusal(world, job[at(rank)].device, {"this job", rank});
  if (refused) return refused->what();
#else
  static_cast<void>(world);
#endif
  return {};
}

std::string why_no_device_messages(Collectives& world, const std::vector<RankDevice>& job,
                                   TransportChoice wanted, const std::string& no_nccl, int depth) {
  if (!may_send_device_memory(job, wanted, no_nccl, depth)) return kDeviceMessagesNotTried;
  const Communicator& comm = world.communicator();
  return common_reason(
      world.all_gather_strings(comm.device_memory_unsupported_reason(job[at(comm.rank())].device)));
}

const char* name_of(TransportChoice choice) { return kChoices[static_cast<std::size_t>(choice)]; }

EdgeRoute choose_sum_route(int rank, int replicas, const RouteQuestion& question) {
  if (replicas == 1) return {};
  const RankDevice& mine = question.devices[at(rank)];
  return choose(mine, mine, question,
                {.task = fmt::format("sum over the {} replicas of pipeline rank {} ({})", replicas,
                                     rank, to_string(mine.device)),
                 .needs_gpus = "it needs GPUs",
                 .on_cpus = "computed on the CPU",
                 .by_nccl = "a GPU of its own for every replica"});
}

EdgeRoute choose_tensor_route(int rank, const RouteQuestion& question) {
  if (question.tensor_ranks == 1) return {};
  const RankDevice& mine = question.devices[at(rank)];
  return choose(mine, mine, question,
                {.task = fmt::format("join the {} tensor ranks of pipeline rank {} ({})",
                                     question.tensor_ranks, rank, to_string(mine.device)),
                 .needs_gpus = "it needs GPUs",
                 .on_cpus = "computed on the CPU",
                 .by_nccl = "a GPU of its own for every tensor rank"});
}

RouteChoice::RouteChoice(const RouteQuestion& question)
    : question_(question), partners_(question.devices.size()) {}

EdgeRoute RouteChoice::between(int from, int to) {
  if (from == to) return {};
  const RankDevice &a = question_.devices[at(from)], &b = question_.devices[at(to)];
  RouteQuestion question = question_;
  const int most = kMostNcclPartners - (question.tensor_ranks > 1 ? 1 : 0);
  for (const auto& [rank, other] : {std::pair(from, to), std::pair(to, from)}) {
    if (question.nccl_refusal.empty() && !partners_[at(rank)].contains(other) &&
        static_cast<int>(partners_[at(rank)].size()) == most) {
      question.nccl_refusal = fmt::format(
          "rank {} of the pipeline exchanges with {} others over NCCL already, and has "
          "hardware queues for no more",
          rank, most);
    }
  }
  const EdgeRoute route =
      choose(a, b, question,
             {.task = fmt::format("join pipeline ranks {} ({}) and {} ({})", from,
                                  to_string(a.device), to, to_string(b.device)),
              .needs_gpus = "it needs a GPU at both ends",
              .on_cpus = "both ends compute on the CPU",
              .by_nccl = "a GPU of its own at both ends"});
  if (route.kind == RouteKind::kNccl) {
    partners_[at(from)].insert(to);
    partners_[at(to)].insert(from);
  }
  return route;
}

std::vector<EdgeRoute> RouteChoice::edges(const Placement& placement) {
  std::vector<EdgeRoute> routes(at(placement.stages()));
  const auto on_gpu = [&](int stage) {
    return is_gpu(question_.devices[at(placement.rank_of(stage))]);
  };
  for (int s = 1; s < placement.stages(); ++s) {
    routes[at(s)] = between(placement.rank_of(s - 1), placement.rank_of(s));
  }
  if (uses_nccl(routes)) return routes;
  const std::string& why_not = question_.no_device_messages;
  for (int s = 1; s < placement.stages(); ++s) {
    EdgeRoute& route = routes[at(s)];
    if (route.kind != RouteKind::kStaged || !on_gpu(s - 1) || !on_gpu(s)) continue;
    if (why_not.empty()) route.kind = RouteKind::kDirect;
    route.reason += "; " + (why_not.empty() ? "MPI takes a GPU's memory" : why_not);
  }
  return routes;
}

bool uses_nccl(const std::vector<EdgeRoute>& routes) {
  return std::any_of(routes.begin(), routes.end(),
                     [](const EdgeRoute& route) { return route.kind == RouteKind::kNccl; });
}

std::string describe_route(const EdgeRoute& route) {
  constexpr std::array<const char*, 5> kNames = {"on the rank", "messages of host memory",
                                                 "through page-locked host memory",
                                                 "MPI from GPU to GPU", "NCCL"};
  return fmt::format("{} ({})", kNames[static_cast<std::size_t>(route.kind)], route.reason);
}

std::string describe_routes(const std::vector<EdgeRoute>& routes) {
  std::string text;
  for (const auto& [route, stages] : group(routes)) {
    std::vector<std::string> edges;
    for (const std::size_t s : stages) edges.push_back(fmt::format("{}-{}", s - 1, s));
    text += fmt::format("  stages {}: {}\n", joined(edges, ", "),
                        describe_route({route.first, route.second}));
  }
  return text;
}

std::string describe_tensor(const std::vector<EdgeRoute>& tensor) {
  std::string text;
  for (const auto& [route, ranks] : group(tensor)) {
    text +=
        fmt::format("  collectives of tensor ranks{}: by a tree over these ranks, {}\n",
                    of_ranks(ranks, tensor.size()), describe_route({route.first, route.second}));
  }
  return text;
}

std::string describe_sums(const std::vector<EdgeRoute>& sums, bool all_reduce) {
  std::string text;
  for (const auto& [route, ranks] : group(sums)) {
    const std::string where = of_ranks(ranks, sums.size());
    const std::string how =
        all_reduce && route.first == RouteKind::kNccl
            ? fmt::format("NCCL's all-reduce: not depth-invariant ({})", route.second)
            : "by a tree over the replicas, " + describe_route({route.first, route.second});
    text += fmt::format("  sums over replicas{}: {}\n", where, how);
  }
  return text;
}

}  // namespace sluice
